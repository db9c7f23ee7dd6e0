"""Indexes of approximate searches, and their files: the lists or the graph, and the codes of the vectors.

FAISS's own files are not read: it trusts their sizes and row numbers, so a crafted file can crash the process. Here
everything is checked.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.utils.checks import error_text
from hf_sphere.utils.files import atomic_file

LINKS, LARGEST_EFFORT = 32, 1024
"""Links per reference and level of a graph, twice as many at the lowest level; largest number of its candidates."""

ABOUT = {"numbers": torch.int64, "hashes": torch.int64, "center": torch.float64, "counts": torch.int64}
COMMON = {"codes": torch.uint8, "ranges": torch.float32, "effort": torch.int64, **ABOUT}

DTYPES = {
    "ivf": {"centroids": torch.float32, "sizes": torch.int64, **COMMON},
    "hnsw": {"links": torch.int32, "levels": torch.int32, "entry": torch.int64, **COMMON},
}
"""Tensors of a file by kind of index.

Entries have codes, by the ranges of the dimensions, and numbers of different references, in the order of the lists with
their sizes. Hashes are those of all references. Counts are those of changes and of additional candidates. Effort is the
number of lists, or of candidates of the graph, in a search."""


def number_of_lists(count: int) -> int:
    """Return the number of lists of an inverted file: FAISS recommends 4 to 16 sqrt(N), of at least 39 entries."""
    return max(1, min(round(4 * count**0.5), count // 39))


def new_index(kind: str, dim: int, lists: int, metric: int) -> Any:
    """Return a FAISS index of codes of 8 bits per dimension that is not trained."""
    import faiss

    kinds: Any = faiss
    is_graph = kind == "hnsw"
    index = kinds.index_factory(dim, f"HNSW{LINKS}_SQ8" if is_graph else f"IVF{lists},SQ8", metric)
    quantizer = kinds.downcast_index(index.storage).sq if is_graph else index.sq
    # The least and the largest of a thousand values are cut, so that one does not coarsen the codes of all.
    quantizer.rangestat, quantizer.rangestat_arg = kinds.ScalarQuantizer.RS_quantiles, 1e-3
    if not is_graph:
        index.cp.min_points_per_centroid = 1
    return index


def write_index(path: Path, index: Any, references: str, about: dict[str, Tensor]) -> None:
    """Write a FAISS index with a digest of its references, and what else is known of them."""
    import faiss
    from safetensors.torch import save_file  # here, since searches without files do not need it

    tensors = dict(about)
    if isinstance(index, faiss.IndexHNSW):
        graph: Any = index.hnsw
        storage: Any = faiss.downcast_index(index.storage)
        for name, values in {"links": graph.neighbors, "levels": graph.levels, "codes": storage.codes}.items():
            tensors[name] = torch.from_numpy(faiss.vector_to_array(values))
        tensors |= {"entry": torch.tensor(graph.entry_point), "effort": torch.tensor(graph.efSearch)}
    else:
        storage = index
        stored, sizes = index.invlists, [index.invlists.list_size(number) for number in range(index.nlist)]
        ids = [faiss.rev_swig_ptr(stored.get_ids(n), size) for n, size in enumerate(sizes) if size]
        codes = [faiss.rev_swig_ptr(stored.get_codes(n), size * index.d) for n, size in enumerate(sizes) if size]
        tensors |= {"numbers": about["numbers"][np.concatenate(ids)], "codes": torch.from_numpy(np.concatenate(codes))}
        # a tensor with contrib.torch_utils
        tensors["centroids"] = torch.as_tensor(index.quantizer.reconstruct_n(0, index.nlist))
        tensors |= {"sizes": torch.tensor(sizes), "effort": torch.tensor(index.nprobe)}
    tensors["codes"] = tensors["codes"].view(-1, index.d)
    tensors["ranges"] = torch.from_numpy(faiss.vector_to_array(storage.sq.trained))
    with atomic_file(path) as unfinished:
        save_file(tensors, unfinished, {"references": references})


def read_index(
    path: Path, kind: str, shape: tuple[int, ...], metric: int, references: str
) -> tuple[Any, dict[str, Tensor]]:
    """Return the FAISS index of a file and what was known of its references, which have the shape (N, d)."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; build the index again.")
    try:
        with safe_open(path, framework="pt") as file:
            owner = (file.metadata() or {}).get("references")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if owner != references:
            raise ValueError("it was built for other embeddings, or for another distance")
        if {name: tensor.dtype for name, tensor in tensors.items()} != DTYPES.get(kind):
            raise ValueError(f"it does not have the tensors of the kind {kind}")
        count, dim = tensors["numbers"].numel(), shape[1]
        shapes = [(count,), (count, dim), (2 * dim,), shape[:1], (dim,), (2,)]
        names = ("numbers", "codes", "ranges", "hashes", "center", "counts")
        if [tensors[name].shape for name in names] != shapes:
            raise ValueError("its tensors do not fit together")
        is_finite = tensors["ranges"].isfinite().all() and tensors["center"].isfinite().all()
        if not is_finite or tensors["counts"].min() < 0:
            raise ValueError("it has numbers that are not finite, or negative counts")
        about = {name: tensors.pop(name).clone() for name in ABOUT}
        index = _read_lists(metric, path, **tensors) if kind == "ivf" else _read_graph(metric, **tensors)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error_text(error)}. Build the index again.") from error
    if index is None:
        raise ValueError(f"{path} cannot be used: its {kind} index is not one of {count:,} entries.")
    return index, about


def _read_lists(
    metric: int, path: Path, centroids: Tensor, sizes: Tensor, effort: Tensor, codes: Tensor, ranges: Tensor
) -> Any:
    import faiss
    from safetensors import safe_open

    count, dim = codes.shape
    fits = centroids.shape == (*sizes.shape, dim) and centroids.isfinite().all() and _within(effort, 1, len(centroids))
    if not (fits and 0 <= sizes.min() <= sizes.max() <= count == sizes.sum()):
        return None
    index = new_index("ivf", dim, len(centroids), metric)
    index.quantizer.add(centroids.numpy())
    faiss.copy_array_to_vector(ranges.numpy(), index.sq.trained)
    index.is_trained, index.nprobe, index.ntotal = True, int(effort), count
    for number, ids in enumerate(torch.arange(count).split(sizes.tolist())):
        if len(ids):
            with safe_open(path, framework="pt") as file:  # so that only one list is mapped into memory
                cells = file.get_slice("codes")[int(ids[0]) : int(ids[-1]) + 1].numpy()
            if cells.shape != (len(ids), dim):  # the file was replaced meanwhile
                return None
            index.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids.numpy()), faiss.swig_ptr(cells))
    return index


def _read_graph(
    metric: int, links: Tensor, levels: Tensor, entry: Tensor, effort: Tensor, codes: Tensor, ranges: Tensor
) -> Any:
    import faiss

    count, dim = codes.shape
    index = new_index("hnsw", dim, 0, metric)
    graph: Any = index.hnsw
    ends = torch.from_numpy(faiss.vector_to_array(graph.cum_nneighbor_per_level)).long()  # of the links of each level
    if levels.shape != (count,) or levels.min() < 1 or levels.max() >= len(ends):
        return None
    offsets = F.pad(ends[levels.long()].cumsum(0), (1, 0))
    if links.shape != (offsets[-1],) or links.min() < -1 or links.max() >= count:
        return None
    for level in range(1, int(levels.max())):  # links of a level lead to references that have this level
        linked = links[offsets[:-1][levels > level, None] + torch.arange(int(ends[level]), int(ends[level + 1]))].long()
        if (levels[linked[linked >= 0]] <= level).any():
            return None
    if not (_within(entry, 0, count - 1) and levels[entry] == levels.max() and _within(effort, 1, LARGEST_EFFORT)):
        return None
    storage: Any = faiss.downcast_index(index.storage)
    faiss.copy_array_to_vector(codes.flatten().numpy(), storage.codes)
    faiss.copy_array_to_vector(ranges.numpy(), storage.sq.trained)
    storage.is_trained, index.is_trained, storage.ntotal, index.ntotal = True, True, count, count
    faiss.copy_array_to_vector(links.numpy(), graph.neighbors)
    faiss.copy_array_to_vector(levels.numpy(), graph.levels)
    faiss.copy_array_to_vector(offsets.numpy().astype("uint64"), graph.offsets)
    graph.entry_point, graph.max_level, graph.efSearch = int(entry), int(levels.max()) - 1, int(effort)
    return index


def _within(value: Tensor, low: int, high: int) -> bool:
    return value.ndim == 0 and low <= int(value) <= high
