"""A space of a few bits per dimension: codes of FAISS instead of vectors, with measured recall and p-values."""

import importlib.util
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.calibration import Calibration
from hf_sphere.search.index_files import CODES_FILE, check_replaceable
from hf_sphere.search.margins import Nearest, check_offsets
from hf_sphere.search.matching import CalibratedSearch, Candidates
from hf_sphere.search.rows import GroupedVectors
from hf_sphere.search.sampling import independent_rows
from hf_sphere.search.vectors import check_ids, check_names, check_vectors
from hf_sphere.utils import files
from hf_sphere.utils.checks import check_choice, check_integer, check_seed, error_text

HELD_OUT, SMALLEST, TRAINING, BLOCK, MOST = 500, 100, 100_000, 8192, 1 << 24
"""Largest number of queries for the recall, smallest of rows, numbers of rows that fit codes and of a block, and of
scores in memory."""

ABOUT_FILE = "compressed.json"

BITS = (1, 2, 4, 8)

CALIBRATION = ("groups", "ids", "scores", "match_groups", "matches")
"""Tensors of a `Calibration`."""


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
    calibration: Calibration = None  # type: ignore[assignment]
    groups, ids, _ids_of = GroupedVectors.groups, GroupedVectors.ids, GroupedVectors._ids_of

    def __init__(self, about: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        self.bits, self.recall, self._names = about["bits"], tuple(about["recall"]), about["names"]
        self._numbers, self._groups, self._rotation = (tensors[name] for name in ("numbers", "groups", "rotation"))
        self._ids, self.score = about["ids"], about["score"]
        if "offsets" in tensors:
            check_offsets(tensors["offsets"], len(self._numbers))
            self._nearest = Nearest.known(tensors["offsets"])
        faiss, self._index = load_faiss(), make_index(self.bits, len(self._rotation))
        self.bytes_per_vector = int(self._index.code_size)
        faiss.copy_array_to_vector(tensors["learned"].numpy(), _learned(self._index))
        faiss.copy_array_to_vector(tensors["codes"].numpy().ravel(), self._index.codes)
        self._index.ntotal, self._index.is_trained = len(self._numbers), True
        if "known_ids" in tensors:
            groups, ids, scores, numbers, matches = (tensors[f"known_{name}"] for name in CALIBRATION)
            self.calibration = Calibration(groups, ids, scores, numbers, matches, 0, about["rule"])

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        size = f"{len(self):,} vectors of {len(self._rotation)} dimensions, {self.bytes_per_vector} bytes each"
        return "CompressedSpace({}; recall@10 {:.3f} ({:.3f} to {:.3f}))".format(size, *self.recall)

    def save(self, folder: str | PathLike) -> None:
        """Write the space to a folder; an older one is replaced.

        Raises:
            FileExistsError: If the folder contains other files.
            ValueError: If somebody has set an attribute to what cannot be read back.
        """
        codes = load_faiss().vector_to_array(self._index.codes).reshape(len(self), -1)
        learned = load_faiss().vector_to_array(_learned(self._index))
        # Without groups they are the numbers of the rows, and safetensors does not write one tensor twice.
        tensors = {"numbers": self._numbers, "groups": self._groups.clone(), "rotation": self._rotation}
        tensors |= {"codes": torch.from_numpy(codes), "learned": torch.from_numpy(learned)}
        tensors |= {f"known_{name}": getattr(self.calibration, name) for name in CALIBRATION}
        if self.score == "margin":
            tensors["offsets"] = self._near().cosines[:, 0]
        about = {"bits": self.bits, "recall": self.recall, "names": self._names, "ids": self._ids}
        about |= {"rule": self.calibration.rule, "score": self.score}
        _check_contents(about, tensors)  # somebody may have set attributes
        with files.lock_folder(folder):
            check_replaceable(Path(folder), {ABOUT_FILE, CODES_FILE, files.MANIFEST_FILE})
            with files.atomic_folder(folder) as unfinished:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished / CODES_FILE)
                files.write_json(unfinished / ABOUT_FILE, about, strict=True)
                files.write_manifest(unfinished)

    @classmethod
    def load(cls, folder: str | PathLike) -> "CompressedSpace":
        """Read a space that `save` wrote.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a file is damaged.
        """
        return files.read_whole(folder, partial(_read, cls))

    def _check(self, what: str, vectors: Any) -> Tensor:
        return check_vectors(what, vectors, len(self._rotation), "cosine")

    def _candidates(self, queries: Tensor, count: int, left_out: Tensor | None = None) -> Candidates:
        if left_out is None:
            return self._search_codes(queries, count)
        return self._search_others(queries, count, left_out, min(2 * count, len(self)))

    def _search_codes(self, points: Tensor, count: int) -> Candidates:
        scores, found = self._index.search(_rotate(points, self._rotation), count)
        rows = torch.from_numpy(found)
        return Candidates(torch.from_numpy(scores).double(), rows, self._numbers[rows], self._groups[rows])

    def _search_others(self, points: Tensor, count: int, left_out: Tensor, fetched: int) -> Candidates:
        """Search rows of other groups among `fetched` ones, and among more for those points that find too few."""
        parts = []
        for block, own in zip(*(column.split(max(1, MOST // fetched)) for column in (points, left_out)), strict=True):
            found = self._search_codes(block, fetched)
            scores = found.scores.masked_fill(found.groups == own[:, None], -torch.inf)
            order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
            scores, exists = scores.gather(1, order), scores.gather(1, order) > -torch.inf
            parts.append(Candidates(scores, *(column.gather(1, order).where(exists, -1) for column in found[1:])))
        best = Candidates(*map(torch.cat, zip(*parts, strict=True)))
        lacking = best.rows[:, -1] < 0
        if lacking.any() and fetched < len(self):
            more = self._search_others(points[lacking], count, left_out[lacking], min(4 * fetched, len(self)))
            for column, wider in zip(best, more, strict=True):
                column[lacking] = wider
        return best


def compress(space: Any, bits: int, max_recall_loss: float | None, seed: int) -> CompressedSpace:
    """Measure the recall of codes and make a space of them; see `EmbeddingSpace.compress`."""
    from scipy.stats import t  # slow to import

    vectors, groups, count = space.vectors, space._groups, len(space)
    if (bits := check_integer("bits", bits, 1)) not in BITS:
        raise ValueError(f"bits must be 1, 2, 4 or 8; got {bits}.")
    if max_recall_loss is not None and not 0 <= max_recall_loss < 1:
        raise ValueError(f"max_recall_loss must be at least 0 and below 1; got {max_recall_loss}.")
    if space.metric["distance"] != "cosine":
        raise ValueError(f"only cosines are compressed, not the {space.metric['distance']} distance.")
    if count < SMALLEST or (groups == groups[0]).all():
        least = f"{SMALLEST} rows and two groups"
        raise ValueError(f"{least} are needed to measure recall@10; the space has {count} and {len(groups.unique())}.")
    faiss, index, generator = load_faiss(), make_index(bits, vectors.shape[1]), torch.Generator()
    generator.manual_seed(check_seed(seed))
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
    index = encode(others)
    search, found = space.neighbor_search, torch.from_numpy(index.search(rotated(queries), 10)[1])
    farthest = search.search_others(vectors[queries], 10, is_query, is_query[queries])[0][:, -1:]
    # Another row at the same distance is right, too.
    recalls = (search.distances(vectors[queries], others[found]) <= farthest * (1 + 1e-9)).double().mean(1)
    recall, half = float(recalls.mean()), float(recalls.std() / len(queries) ** 0.5 * t.ppf(0.975, len(queries) - 1))
    # At least as wide as for independent neighbors, all of which are found.
    low, high = max(0.0, min(recall - half, 0.025 ** (0.1 / len(queries)))), min(1.0, recall + half)
    if max_recall_loss is not None and 1 - low > max_recall_loss:
        measured = f"recall@10 is {recall:.3f} ({low:.3f} to {high:.3f}) with bits={bits}"
        loss = f"the loss may exceed max_recall_loss={max_recall_loss}"
        raise ValueError(f"{measured}, so {loss}. Use more bits, or allow more.")
    index = encode(torch.arange(count))  # also fitted to the queries, which may be beyond the ranges of the others
    codes, learned = (torch.from_numpy(faiss.vector_to_array(values)) for values in (index.codes, _learned(index)))
    tensors = {"codes": codes.view(count, -1), "learned": learned, "rotation": rotation}
    about = {"bits": bits, "recall": (recall, low, high), "names": space._names, "ids": space._ids}
    about["score"] = space.score
    small = CompressedSpace(about, tensors | {"numbers": space._numbers, "groups": groups})
    if space._queries is None:
        rows, numbers = space._calibration_rows(), groups[space._calibration_rows()]
        queries, ids, left_out = space.vectors[rows], space._numbers[rows], numbers
    else:
        (queries, numbers), left_out = space._queries, None
        ids = torch.full_like(numbers, -1)
    if space.score == "margin":  # that of a loaded space has no groups to leave out
        small._nearest = Nearest.of(vectors, groups, space._sample())
    best = small._find(project_to_sphere(queries), left_out)
    # Rows are not added to codes, so there is no next id, and no group is left out any more.
    small.calibration = Calibration(numbers, ids, *best, 0, space.rule)
    if small._nearest is not None:
        small._nearest = Nearest.known(small._nearest.offsets(torch.arange(count)))
    return small


def _rotate(vectors: Tensor, rotation: Tensor) -> np.ndarray:
    """Return rotated vectors that do not depend on the number of rows: float32 would round each size differently."""
    return (vectors.double() @ rotation.double().T).float().numpy()


def load_faiss() -> Any:
    """Return FAISS, if it has these codes without errors."""
    hint = "pip install -U 'hf_sphere[faiss]'"
    if importlib.util.find_spec("faiss") is None:
        raise ImportError(f"a compressed space needs FAISS: {hint}.")
    import faiss

    if tuple(map(int, faiss.__version__.split(".")[:3])) < (1, 14, 2):
        raise ImportError(f"a compressed space needs FAISS 1.14.2 or later; {faiss.__version__} is installed: {hint}.")
    return faiss


def make_index(bits: int, dim: int) -> Any:
    """Return an empty FAISS index: of RaBitQ, or for 8 bits, which it takes long to compute, of a scalar quantizer."""
    faiss = load_faiss()
    if bits == 8:
        return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    index = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT, bits)
    index.qb = 8  # bits of the queries: they find as much as float32 and are a hundred times faster
    return index


def _learned(index: Any) -> Any:
    """Return the center of RaBitQ, or the ranges of a scalar quantizer."""
    return index.sq.trained if hasattr(index, "sq") else index.center


def _check_contents(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if the contents of the files of a space are not valid."""
    bits, names, groups = about["bits"], about["names"], tensors["groups"]
    if (
        check_integer("bits", bits, 1) not in BITS
        or len(about["recall"]) != 3
        or not all(0 <= value <= 1 for value in about["recall"])
    ):
        raise ValueError(f"bits or recall of {ABOUT_FILE} is invalid")
    count, dim, size = len(groups), len(tensors["rotation"]), len(tensors["known_ids"])
    shapes = {"numbers": (count,), "groups": (count,), "rotation": (dim, dim), "learned": (dim * (1 + (bits == 8)),)}
    shapes |= {"codes": (count, make_index(bits, dim).code_size)}
    shapes |= {f"known_{name}": (size,) if name in ("groups", "ids") else (size, 2) for name in CALIBRATION}
    dtypes = dict.fromkeys(("rotation", "learned"), torch.float32)
    dtypes |= {"codes": torch.uint8, "known_scores": torch.float64}
    for name, shape in shapes.items():
        tensor = tensors[name]
        is_valid = tensor.dtype == dtypes.get(name, torch.int64) and tensor.shape == shape and 0 not in shape
        lowest = -torch.inf if name == "known_scores" else torch.finfo(torch.float32).min  # no second group
        if not is_valid or not ((tensor >= lowest) & (tensor < torch.inf)).all():
            raise ValueError(f"{name} of {CODES_FILE} is invalid")
    check_choice("rule", about["rule"], ("sharp", "strict"))
    check_choice("score", about["score"], ("margin",) if "offsets" in tensors else ("cosine",))
    if tensors["numbers"].min() < 0 or len(tensors["numbers"].unique()) < count:
        raise ValueError(f"numbers of {CODES_FILE} are negative or repeated")
    if about["ids"] is not None:
        check_ids(about["ids"], count)
    if names is not None and not 0 <= groups.min() <= groups.max() < len(check_names("names", names, len(names))):
        raise ValueError(f"groups of {CODES_FILE} have no names in {ABOUT_FILE}")


def _read(space_class: type[CompressedSpace], folder: Path) -> CompressedSpace:
    if not (folder / ABOUT_FILE).exists():
        raise FileNotFoundError(f"there is no {folder / ABOUT_FILE}; write one with space.compress().save().")
    load_faiss()
    try:
        if damage := files.find_damage(folder, (ABOUT_FILE, CODES_FILE)):
            raise ValueError(damage)
        about, tensors = files.read_json(folder / ABOUT_FILE), files.read_tensors(folder / CODES_FILE)
        _check_contents(about, tensors)
        return space_class(about, tensors)
    except MemoryError:
        raise
    except Exception as error:  # of safetensors and of Python, of many classes
        text = error_text(error).rstrip(".")
        raise ValueError(f"the compressed space {folder} is damaged: {text}. Compress the space again.") from error
