"""Files of approximate searches: the lists or the graph of a FAISS index, without the vectors.

FAISS's own files are not read: it trusts their sizes and row numbers, so a crafted file can crash the process. Here the
vectors are those of the references, and everything else is checked.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.utils.checks import error_text
from hf_sphere.utils.files import atomic_file

LINKS, LARGEST_EFFORT = 32, 1024
"""Links per reference and level of a graph, twice as many at the lowest level; largest number of its candidates."""

DTYPES = {
    "ivf": {"centroids": torch.float32, "lists": torch.int64, "effort": torch.int64},
    "hnsw": {"links": torch.int32, "levels": torch.int32, "entry": torch.int64, "effort": torch.int64},
}
"""Tensors of a file by kind of index. Effort is the number of lists, or of candidates of the graph, in a search."""


def write_index(path: Path, index: Any, references: str) -> None:
    """Write a FAISS index, of an inverted file or a graph, with a digest of its references."""
    import faiss
    from safetensors.torch import save_file  # here, since searches without files do not need it

    if isinstance(index, faiss.IndexHNSWFlat):
        graph: Any = index.hnsw
        links, levels = (torch.from_numpy(faiss.vector_to_array(values)) for values in (graph.neighbors, graph.levels))
        arrays = {"links": links, "levels": levels, "entry": graph.entry_point, "effort": graph.efSearch}
    else:
        lists, stored = torch.empty(index.ntotal, dtype=torch.int64), index.invlists
        for list_id in range(index.nlist):
            if size := stored.list_size(list_id):
                lists[torch.from_numpy(faiss.rev_swig_ptr(stored.get_ids(list_id), size))] = list_id
        centroids = torch.as_tensor(index.quantizer.reconstruct_n(0, index.nlist))  # a tensor with contrib.torch_utils
        arrays = {"centroids": centroids, "lists": lists, "effort": index.nprobe}
    with atomic_file(path) as unfinished:
        tensors = {name: torch.as_tensor(values) for name, values in arrays.items()}
        save_file(tensors, unfinished, {"references": references})


def read_index(path: Path, kind: str, vectors: Tensor, metric: int, references: str) -> Any:
    """Return the FAISS index of a file and the vectors (U, d), float32, of its references, of which it must be."""
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
        index = (_read_lists if kind == "ivf" else _read_graph)(vectors, metric, **tensors)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error_text(error)}. Build the index again.") from error
    if index is None:
        raise ValueError(f"{path} cannot be used: its {kind} index is not one of {len(vectors):,} references.")
    return index


def _read_lists(vectors: Tensor, metric: int, centroids: Tensor, lists: Tensor, effort: Tensor) -> Any:
    import faiss

    count, dim = vectors.shape
    fits = centroids.shape[1:] == (dim,) and centroids.isfinite().all() and lists.shape == (count,)
    if not (fits and lists.min() >= 0 and lists.max() < len(centroids) and _within(effort, 1, len(centroids))):
        return None
    quantizer = faiss.IndexFlat(dim, metric)
    quantizer.add(centroids.numpy())
    index = faiss.IndexIVFFlat(quantizer, dim, len(centroids), metric)
    index.is_trained, index.nprobe = True, int(effort)
    rows, list_ids = vectors.contiguous().numpy(), lists.numpy()  # referenced during the call, which receives pointers
    index.add_core(count, faiss.swig_ptr(rows), None, faiss.swig_ptr(list_ids))
    return index


def _read_graph(vectors: Tensor, metric: int, links: Tensor, levels: Tensor, entry: Tensor, effort: Tensor) -> Any:
    import faiss

    count, dim = vectors.shape
    index = faiss.IndexHNSWFlat(dim, LINKS, metric)
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
    faiss.downcast_index(index.storage).add(vectors.numpy())
    index.ntotal = count
    faiss.copy_array_to_vector(links.numpy(), graph.neighbors)
    faiss.copy_array_to_vector(levels.numpy(), graph.levels)
    faiss.copy_array_to_vector(offsets.numpy().astype("uint64"), graph.offsets)
    graph.entry_point, graph.max_level, graph.efSearch = int(entry), int(levels.max()) - 1, int(effort)
    return index


def _within(value: Tensor, low: int, high: int) -> bool:
    return value.ndim == 0 and low <= int(value) <= high
