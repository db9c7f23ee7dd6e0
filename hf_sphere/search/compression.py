"""A space of a few bits per dimension: codes of FAISS instead of vectors, with measured recall and p-values."""

import importlib.util
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.calibrated import CANDIDATES, CalibratedSearch, Candidates
from hf_sphere.search.index_files import check_replaceable
from hf_sphere.search.matching import Calibration, independent_rows
from hf_sphere.search.rows import check_names, check_vectors
from hf_sphere.utils import files
from hf_sphere.utils.checks import check_regular, error_text

if TYPE_CHECKING:
    from hf_sphere.search.space import EmbeddingSpace

HELD_OUT, SMALLEST, TRAINING, BLOCK = 500, 100, 100_000, 8192
"""Largest number of queries that measure the recall; smallest number of rows; largest one of rows to which codes are
fitted; and rows of a block."""

ABOUT_FILE, CODES_FILE = "compressed.json", "codes.safetensors"

BITS = (1, 2, 4, 8)

DTYPES = {
    "rotation": torch.float32,
    "learned": torch.float32,
    "codes": torch.uint8,
    "calibration.scores": torch.float64,
}
"""Types of tensors in a file; others are int64."""

CALIBRATION = ("groups", "scores", "matches", "ids")
"""Tensors of a `Calibration`, (C,) each."""


class CompressedSpace(CalibratedSearch):
    """Rows of an `EmbeddingSpace` as codes of a few bits per dimension, which are searched without the vectors.

    `EmbeddingSpace.compress` makes it. Its scores are cosines to the codes, and it is calibrated by such scores, of
    rows that were searched without their group, or of the separate queries of the space. So the levels of false accepts
    hold; what is lost are matches.

    Attributes:
        bits: Bits per dimension.
        recall: Recall@10, and the lower and upper end of its 95 % interval over groups; see `EmbeddingSpace.compress`.
        ids: (N,) int64, as in the space.

    Example:
        >>> EmbeddingSpace.fit(embeddings, groups=labels).compress(bits=4).save("compressed")
        >>> CompressedSpace.load("compressed").search(embeddings[:2], k=3).rows.shape
        torch.Size([2, 3])
    """

    score, metric = "cosine", {"distance": "cosine"}

    def __init__(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.bits, self.recall, self._names = about["bits"], tuple(about["recall"]), about["names"]
        self.ids, self._groups, self._rotation = (tensors[name] for name in ("ids", "groups", "rotation"))
        self._index = make_index(self.bits, len(self._rotation))
        for name, values in _contents(self._index).items():
            load_faiss().copy_array_to_vector(tensors[name].numpy().ravel(), values)
        self._index.ntotal, self._index.is_trained = len(self.ids), True
        known = {name: tensors.get(f"calibration.{name}", torch.empty(0)) for name in CALIBRATION}
        self._calibration = Calibration(next_id=0, **known)  # that number is for spaces that grow

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        size = f"{len(self):,} vectors of {len(self._rotation)} dimensions, {self.bytes_per_vector} bytes each"
        return "CompressedSpace({}; recall@10 {:.3f} ({:.3f} to {:.3f}))".format(size, *self.recall)

    @property
    def calibration(self) -> Calibration:
        """The calibration."""
        return self._calibration

    @property
    def bytes_per_vector(self) -> int:
        """Size of a code. Ids and groups take 16 bytes per row, and the rotation of all vectors 4 d^2 bytes."""
        return int(self._index.code_size)

    @property
    def groups(self) -> list[Any] | None:
        """The name of the group of each row, or None."""
        return None if self._names is None else [self._names[number] for number in self._groups.tolist()]

    def save(self, folder: str | PathLike) -> None:
        """Write the codes, ids, groups and the calibration to a folder; an older one is replaced.

        Raises:
            FileExistsError: If the folder contains other files.
        """
        tensors = {"ids": self.ids, "groups": self._groups, "rotation": self._rotation}
        tensors |= {f"calibration.{name}": getattr(self.calibration, name) for name in CALIBRATION}
        for name, values in _contents(self._index).items():
            tensors[name] = torch.from_numpy(load_faiss().vector_to_array(values))
        tensors["codes"] = tensors["codes"].view(len(self), -1)
        with files.lock_folder(folder):
            check_replaceable(Path(folder), {ABOUT_FILE, CODES_FILE, files.MANIFEST_FILE})
            with files.atomic_folder(folder) as unfinished:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished / CODES_FILE)
                about = {"bits": self.bits, "recall": self.recall, "names": self._names}
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

    def _candidates(self, queries: Tensor, count: int) -> Candidates:
        scores, found = self._index.search((queries @ self._rotation.T).numpy(), count)
        rows = torch.from_numpy(found)
        return Candidates(torch.from_numpy(scores).double(), rows, self.ids[rows], self._groups[rows])

    def _search_elsewhere(self, queries: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = torch.empty(len(queries), dtype=torch.float64), torch.empty(len(queries), dtype=torch.long)
        for number, query in enumerate(queries.split(1)):
            found = self._candidates(query, len(self))
            best[number], at = found.scores[0].where(found.groups[0] != groups[number], -torch.inf).max(0)
            ids[number] = found.ids[0, at]
        return best, ids

    def _names_of(self, found: Candidates) -> list[Any]:
        if self._names is None:
            raise ValueError("the rows have no names; fit with groups=.")
        return [self._names[number] for number in found.groups[:, 0].tolist()]


def compress(space: "EmbeddingSpace", bits: int, max_recall_loss: float | None, seed: int) -> CompressedSpace:
    """Measure the recall of codes and make a space of them; see `EmbeddingSpace.compress`."""
    from scipy.stats import t  # slow to import

    load_faiss()
    count, num_groups = len(space), len(space._groups.unique())
    if bits not in BITS:
        raise ValueError(f"bits must be 1, 2, 4 or 8; got {bits}.")
    if max_recall_loss is not None and not 0 <= max_recall_loss < 1:
        raise ValueError(f"max_recall_loss must be at least 0 and below 1; got {max_recall_loss}.")
    if space.metric["distance"] != "cosine":
        raise ValueError(f"only cosines are compressed, not the {space.metric['distance']} distance.")
    if count < SMALLEST or num_groups < 2:
        least = f"{SMALLEST} rows and two groups"
        raise ValueError(f"to measure the recall, {least} are needed; the space has {count} and {num_groups}.")
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(2 * space.vectors.shape[1:], generator=generator)).Q
    held_out = independent_rows(space._groups, min(HELD_OUT, count // 10), seed)
    others = torch.ones(count, dtype=torch.bool).index_fill_(0, held_out, False).nonzero()[:, 0]
    index = make_index(bits, len(rotation))

    def rotated(rows: Tensor) -> np.ndarray:
        return (project_to_sphere(space.vectors[rows]) @ rotation.T).numpy()

    index.train(rotated(others[:: -(-len(others) // TRAINING)]))
    for block in others.split(BLOCK):
        index.add(rotated(block))
    queries, search = space.vectors[held_out], space.neighbor_search
    is_held_out = torch.ones(count).index_fill_(0, others, 0).long()
    farthest = search.search_others(queries, 10, is_held_out, torch.ones_like(held_out))[0][:, -1:]
    found = torch.from_numpy(index.search(rotated(held_out), 10)[1])
    is_near = search._distances(queries, others[found]) <= farthest * (
        1 + 1e-9
    )  # also another one at the same distance
    recalls = (is_near & (found >= 0)).double().mean(1)
    recall, half = float(recalls.mean()), float(recalls.std() / len(recalls) ** 0.5 * t.ppf(0.975, len(recalls) - 1))
    low, high = max(0.0, recall - half), min(1.0, recall + half)
    if max_recall_loss is not None and 1 - low > max_recall_loss:
        raise ValueError(
            f"recall@10 is {recall:.3f} ({low:.3f} to {high:.3f}) with bits={bits}, so the loss may exceed "
            f"max_recall_loss={max_recall_loss}. Use more bits, or allow more."
        )
    index.add(rotated(held_out))
    tensors = {
        name: torch.from_numpy(load_faiss().vector_to_array(values)) for name, values in _contents(index).items()
    }
    codes = tensors["codes"].view(count, -1)
    tensors["codes"] = torch.empty_like(codes).index_copy_(0, torch.cat([others, held_out]), codes)
    tensors |= {"ids": space.ids, "groups": space._groups, "rotation": rotation}
    small = CompressedSpace({"bits": bits, "recall": (recall, low, high), "names": space._names}, tensors)
    rows = space._sample()
    queries, groups = (space.vectors[rows], space._groups[rows]) if space._queries is None else space._queries
    nearest = small._candidates(project_to_sphere(queries), min(CANDIDATES, count))
    if space._queries is None:
        scores, matches = small._best_elsewhere(queries, groups, nearest)
    else:
        scores, matches = nearest.scores[:, 0], nearest.ids[:, 0]
    ids = space.ids[rows] if space._queries is None else torch.full_like(groups, -1)
    small._calibration = Calibration(groups, scores, matches, ids, next_id=0)
    return small


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


def _contents(index: Any) -> dict[str, Any]:
    """Return the vectors of C++ that an index consists of."""
    return {"learned": index.sq.trained if hasattr(index, "sq") else index.center, "codes": index.codes}


def _read(space_class: type[CompressedSpace], folder: Path) -> CompressedSpace:
    if not (folder / ABOUT_FILE).exists():
        raise FileNotFoundError(f"there is no {folder / ABOUT_FILE}; write one with space.compress().save().")
    load_faiss()
    try:
        if damage := files.find_damage(folder, (ABOUT_FILE, CODES_FILE)):
            raise ValueError(damage)
        for name in (ABOUT_FILE, CODES_FILE):
            check_regular(folder / name)
        about, tensors = files.read_json(folder / ABOUT_FILE), load_file(folder / CODES_FILE)
        bits, names, groups = about["bits"], about["names"], tensors["groups"]
        count, dim, size = len(groups), len(tensors["rotation"]), len(tensors["calibration.ids"])
        if bits not in BITS or len(about["recall"]) != 3 or not all(0 <= value <= 1 for value in about["recall"]):
            raise ValueError(f"bits or recall of {ABOUT_FILE} is invalid")
        shapes = {"ids": (count,), "groups": (count,), "rotation": (dim, dim), "learned": (dim * (1 + (bits == 8)),)}
        shapes |= {"codes": (count, make_index(bits, dim).code_size)}
        shapes |= {f"calibration.{name}": (size,) for name in CALIBRATION}
        for name, shape in shapes.items():
            tensor, dtype = tensors[name], DTYPES.get(name, torch.int64)
            if tensor.dtype != dtype or tensor.shape != shape or 0 in shape or not tensor.isfinite().all():
                raise ValueError(f"{name} of {CODES_FILE} is invalid")
        if names is not None and not 0 <= groups.min() <= groups.max() < len(check_names("names", names, len(names))):
            raise ValueError(f"groups of {CODES_FILE} have no names in {ABOUT_FILE}")
        return space_class(about, tensors)
    except MemoryError:
        raise
    except Exception as error:  # of safetensors and of Python, of many classes
        text = error_text(error).rstrip(".")
        raise ValueError(f"the compressed space {folder} is damaged: {text}. Compress the space again.") from error
