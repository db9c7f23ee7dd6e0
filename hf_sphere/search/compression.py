"""A space of a few bits per dimension: codes of FAISS instead of vectors, with measured recall and p-values."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.calibration import PARTS, Calibration, Candidates, Nearest, mean_interval
from hf_sphere.search.index_files import CODES_FILE, check_replaceable, read_about
from hf_sphere.search.matching import CalibratedSearch, sort_candidates
from hf_sphere.search.rows import GroupedVectors
from hf_sphere.search.vectors import independent_rows
from hf_sphere.utils import files
from hf_sphere.utils.checks import check_choice, check_extra, check_integer, check_number, check_seed

HELD_OUT, SMALLEST, TRAINING, BLOCK, MOST = 500, 100, 100_000, 8192, 1 << 24
"""Largest number of queries for the recall, smallest of rows, numbers of rows that fit codes and of a block, and of
scores in memory."""

ABOUT_FILE = "compressed.json"


class CompressedSpace(CalibratedSearch):
    """Rows of an `EmbeddingSpace` as codes of a few bits per dimension, which are searched without the vectors.

    `EmbeddingSpace.compress` makes it. Its scores are cosines to the codes, and it is calibrated by such scores, of
    rows that were searched without their group, or of the separate queries of the space. So the levels of false accepts
    hold; what is lost are matches.

    Attributes:
        bits: Bits per dimension.
        recall: Recall@10 of held-out rows, and the lower and upper end of its 95 % interval over groups.
        bytes_per_vector: Size of a code. Numbers and groups take 16 bytes per row, a rotation of all vectors 4 d^2.

    Example:
        >>> EmbeddingSpace.fit(torch.randn(200, 16)).compress(bits=4).save("compressed")
        >>> CompressedSpace.load("compressed").search(torch.randn(2, 16), k=3).rows.shape
        torch.Size([2, 3])
    """

    metric = {"distance": "cosine"}
    groups, ids, _ids_of = GroupedVectors.groups, GroupedVectors.ids, GroupedVectors._ids_of

    def __init__(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._about, self._tensors = about, tensors
        self.bits, self.recall, self.score = about["bits"], tuple(about["recall"]), about["score"]
        self._names, self._ids = about["names"], about["ids"]
        self._numbers, self._groups, self._rotation = (tensors[name] for name in ("numbers", "groups", "rotation"))
        if "offsets" in tensors:
            self._nearest = Nearest.known(tensors["offsets"])
        self._dim = len(self._rotation)
        self._index, learned = make_index(self.bits, self._dim), tensors["learned"].numpy()
        self.bytes_per_vector = int(self._index.code_size)
        size = self._dim * (1 + (self.bits == 8))
        if tensors["codes"].shape != (len(self), self.bytes_per_vector) or learned.shape != (size,):
            raise ValueError("the codes do not fit the rows")  # FAISS would read other memory
        import faiss

        faiss.copy_array_to_vector(learned, _learned(self._index))
        faiss.copy_array_to_vector(tensors["codes"].numpy().ravel(), self._index.codes)
        self._index.ntotal, self._index.is_trained = len(self._numbers), True
        if "known_ids" in tensors:
            parts: Any = {name: tensors[f"known_{name}"] for name in PARTS}
            # Rows are not added to codes, so there is no next id.
            self._calibration = Calibration(**parts, next_id=0, rule=about["rule"])

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        size = f"{len(self):,} vectors of {self._dim} dimensions, {self.bytes_per_vector} bytes each"
        return "CompressedSpace({}; recall@10 {:.3f} ({:.3f} to {:.3f}))".format(size, *self.recall)

    def save(self, folder: str | PathLike) -> None:
        """Write the space to a folder; an older one is replaced.

        Raises:
            FileExistsError: If the folder contains other files.
        """
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors.items()}
        with files.lock_folder(folder):
            check_replaceable(Path(folder), {ABOUT_FILE, CODES_FILE, files.MANIFEST_FILE})
            with files.atomic_folder(folder) as unfinished:
                save_file(tensors, unfinished / CODES_FILE)
                files.write_json(unfinished / ABOUT_FILE, self._about, strict=True)
                files.write_manifest(unfinished)

    @classmethod
    def load(cls, folder: str | PathLike) -> "CompressedSpace":
        """Read a space that `save` wrote.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a file is damaged.
        """
        return files.read_whole(folder, cls._read)

    @classmethod
    def _read(cls, folder: Path) -> "CompressedSpace":
        return cls(read_about(folder, ABOUT_FILE, CODES_FILE), files.read_tensors(folder / CODES_FILE))

    def _candidates(self, queries: Tensor, count: int, left_out: Tensor | None = None, among: Any = None) -> Candidates:
        fetched, parts = count if left_out is None else min(2 * count, len(self)), []
        own = torch.full((len(queries),), -1) if left_out is None else left_out
        for block, names in zip(*(column.split(max(1, MOST // fetched)) for column in (queries, own)), strict=True):
            scores, rows = map(torch.from_numpy, self._index.search(_rotate(block, self._rotation), fetched))
            found = Candidates(scores.double(), self._groups[rows], self._numbers[rows], rows)
            others = found.scores.masked_fill(found.groups == names[:, None], -torch.inf)
            parts.append(sort_candidates(found, others, count))
        scores, *columns = map(torch.cat, zip(*parts, strict=True))
        best = Candidates(scores, *(column.where(scores > -torch.inf, -1) for column in columns))
        lacking = best.rows[:, -1] < 0  # others that were found are too few
        if lacking.any() and fetched < len(self):
            more = self._candidates(queries[lacking], min(4 * count, len(self)), own[lacking])
            for column, wider in zip(best, more, strict=True):
                column[lacking] = wider[:, :count]
        return best


def compress(space: Any, bits: int, max_recall_loss: float | None, seed: int) -> CompressedSpace:
    """Measure the recall of codes and make a space of them; see `EmbeddingSpace.compress`."""
    vectors, count = space.vectors, len(space)
    used, groups = space._groups.unique(return_inverse=True)  # without those that were removed
    names = space._names and [space._names[number] for number in used.tolist()]
    bits = int(check_choice("bits", bits, (1, 2, 4, 8)))
    if max_recall_loss is not None:
        check_number("max_recall_loss", max_recall_loss, "[0, 1)")
    check_choice("the distance of vectors to compress", space.metric["distance"], ["cosine"])
    check_integer("the number of rows, to measure recall@10,", count, SMALLEST)
    check_integer("the number of groups", len(used), 2)
    generator = torch.Generator().manual_seed(check_seed(seed))
    rotation = torch.linalg.qr(torch.randn(2 * vectors.shape[1:], generator=generator)).Q

    def rotated(rows: Tensor) -> np.ndarray:
        return _rotate(project_to_sphere(vectors[rows]), rotation)

    def encode(rows: Tensor) -> Any:
        index = make_index(bits, vectors.shape[1])
        index.train(rotated(rows[:: -(-len(rows) // TRAINING)]))
        for block in rows.split(BLOCK):
            index.add(rotated(block))
        return index

    queries = independent_rows(groups, min(HELD_OUT, count // 10), seed)
    is_query = torch.zeros(count, dtype=torch.long).index_fill_(0, queries, 1)
    others = (is_query == 0).nonzero()[:, 0]
    search, found = space.neighbor_search, torch.from_numpy(encode(others).search(rotated(queries), 10)[1])
    farthest = search.search_others(vectors[queries], 10, is_query, is_query[queries])[0][:, -1:]
    # Another row at the same distance is right, too.
    recalls = (search.distances(vectors[queries], others[found]) <= farthest * (1 + 1e-9)).double().mean(1)
    low, recall, high = mean_interval(recalls)
    # At least as wide as for independent neighbors, all of which are found.
    low = min(low, 0.025 ** (0.1 / len(queries)))
    if max_recall_loss is not None and 1 - low > max_recall_loss:
        text = f"recall@10 is {recall:.3f} ({low:.3f} to {high:.3f}) with bits={bits}, so the loss may exceed"
        raise ValueError(f"{text} max_recall_loss={max_recall_loss}. Use more bits, or allow more.")
    import faiss

    index = encode(torch.arange(count))  # also fitted to the queries, which may be beyond the ranges of the others
    codes, learned = (torch.from_numpy(faiss.vector_to_array(values)) for values in (index.codes, _learned(index)))
    tensors = {"codes": codes.view(count, -1), "learned": learned, "rotation": rotation}
    tensors |= {"numbers": space._numbers, "groups": groups}
    about = {"bits": bits, "recall": (recall, low, high), "names": names, "ids": space._ids}
    about |= {"score": space.score, "rule": space.rule}
    small, sample = CompressedSpace(about, tensors), space._sample()
    queries, numbers, ids, left_out = space._calibrating()
    if left_out is not None:
        numbers = left_out = groups[sample]
    if space.score == "margin":  # that of a loaded space has no groups to leave out
        small._nearest = Nearest.of(vectors, groups, vectors[sample], groups[sample])
        tensors["offsets"] = small._nearest.offsets(torch.arange(count))
    best = small._find(project_to_sphere(queries), left_out)
    tensors |= {f"known_{name}": part for name, part in zip(PARTS, (numbers, ids, *best[:3]), strict=True)}
    return CompressedSpace(about, tensors)


def _rotate(vectors: Tensor, rotation: Tensor) -> np.ndarray:
    """Return rotated vectors that do not depend on the number of rows: float32 would round each size differently."""
    return (vectors.double() @ rotation.double().T).float().numpy()


def make_index(bits: int, dim: int) -> Any:
    """Return an empty FAISS index: of RaBitQ, or for 8 bits, which it takes long to compute, of a scalar quantizer."""
    check_extra("faiss", "a compressed space", "faiss")
    import faiss

    # Before, FAISS has errors in these codes.
    if tuple(map(int, faiss.__version__.split(".")[:3])) < (1, 14, 2):
        hint = "pip install -U 'hf_sphere[faiss]'"
        raise ImportError(f"a compressed space needs FAISS 1.14.2 or later; {faiss.__version__} is installed: {hint}.")
    if bits == 8:
        return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    index = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT, bits)
    index.qb = 8  # bits of the queries: they find as much as float32 and are a hundred times faster
    return index


def _learned(index: Any) -> Any:
    """Return the center of RaBitQ, or the ranges of a scalar quantizer."""
    return index.sq.trained if hasattr(index, "sq") else index.center
