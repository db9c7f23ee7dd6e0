"""Files of approximate searches: the lists or the graph of a FAISS index, without the vectors.

FAISS's own files are not read: it trusts their sizes and row numbers, so a crafted file can crash the process. Here the
vectors are those of the references, and everything else is checked.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.utils.arguments import error_text
from hf_sphere.utils.files import atomic_file

DTYPES = {
    "ivf": {"centroids": torch.float32, "lists": torch.int64, "effort": torch.int64},
    "hnsw": {"links": torch.int32, "levels": torch.int32, "entry": torch.int64, "effort": torch.int64},
}
"""Tensors of a file by kind of index. Effort is the number of lists, or of candidates of the graph, in a search."""

LINKS = 32
"""Links per reference and level of a graph; twice as many at the lowest level."""

LARGEST_EFFORT = 1024
"""Largest number of candidates of the graph."""


def write_index(path: Path, index: Any, references: str) -> None:
    """Write a FAISS index, of an inverted file or a graph, with a digest of its references."""
    import faiss

    if isinstance(index, faiss.IndexHNSWFlat):
        graph: Any = index.hnsw
        links, levels = (torch.from_numpy(faiss.vector_to_array(part)) for part in (graph.neighbors, graph.levels))
        parts = {"links": links, "levels": levels, "entry": graph.entry_point, "effort": graph.efSearch}
    else:
        lists, stored = torch.empty(index.ntotal, dtype=torch.int64), index.invlists
        for number in range(index.nlist):
            if size := stored.list_size(number):
                lists[torch.from_numpy(faiss.rev_swig_ptr(stored.get_ids(number), size))] = number
        centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, index.nlist))
        parts = {"centroids": centroids, "lists": lists, "effort": index.nprobe}
    with atomic_file(path) as unfinished:
        tensors = {name: torch.as_tensor(part) for name, part in parts.items()}
        save_file(tensors, unfinished, {"references": references})


def read_index(path: Path, kind: str, vectors: Tensor, metric: int, references: str) -> Any:
    """Return the FAISS index of a file and the vectors (U, d), float32, of its references.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or of other references.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; build the index again.")
    try:
        with safe_open(path, framework="pt") as file:
            owner = (file.metadata() or {}).get("references")
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if {name: part.dtype for name, part in parts.items()} != DTYPES[kind]:
            raise ValueError(f"it does not have the tensors of the kind {kind}")
        if owner != references:
            raise ValueError("it was built for other embeddings, or for another distance")
        return (_read_lists if kind == "ivf" else _read_graph)(parts, vectors, metric)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error_text(error)}. Build the index again.") from error


def _read_lists(parts: dict[str, Tensor], vectors: Tensor, metric: int) -> Any:
    import faiss

    centroids, lists, (count, dim) = parts["centroids"], parts["lists"].numpy(), vectors.shape
    if centroids.ndim != 2 or centroids.shape[1] != dim or not centroids.isfinite().all():
        raise ValueError(f"its centroids are no finite vectors of {dim} dimensions")
    if lists.shape != (count,) or lists.min() < 0 or lists.max() >= len(centroids):
        raise ValueError(f"it has no list for each of {count:,} references")
    quantizer = faiss.IndexFlat(dim, metric)
    quantizer.add(centroids.numpy())
    index = faiss.IndexIVFFlat(quantizer, dim, len(centroids), metric)
    index.is_trained, index.nprobe = True, _effort(parts, len(centroids))
    rows = vectors.contiguous().numpy()
    index.add_core(count, faiss.swig_ptr(rows), None, faiss.swig_ptr(lists))
    return index


def _read_graph(parts: dict[str, Tensor], vectors: Tensor, metric: int) -> Any:
    import faiss

    links, levels, (count, dim) = parts["links"], parts["levels"], vectors.shape
    index = faiss.IndexHNSWFlat(dim, LINKS, metric)
    graph = index.hnsw
    ends = torch.from_numpy(faiss.vector_to_array(graph.cum_nneighbor_per_level)).long()  # of the links of each level
    if levels.shape != (count,) or levels.min() < 1 or levels.max() >= len(ends):
        raise ValueError(f"it has no valid level for each of {count:,} references")
    offsets = torch.nn.functional.pad(ends[levels.long()].cumsum(0), (1, 0))
    if links.shape != (offsets[-1],) or links.min() < -1 or links.max() >= count:
        raise ValueError(f"its links are not between {count:,} references")
    for level in range(1, int(levels.max())):
        linked = links[offsets[:-1][levels > level, None] + torch.arange(int(ends[level]), int(ends[level + 1]))].long()
        if (levels[linked[linked >= 0]] <= level).any():
            raise ValueError(f"some links lead to references that are not at the level {level}")
    entry = int(parts["entry"])
    if not 0 <= entry < count or levels[entry] != levels.max():
        raise ValueError("the search does not begin at the highest level")
    faiss.downcast_index(index.storage).add(vectors.numpy())
    index.ntotal, index.is_trained = count, True
    for part, name in ((links, "neighbors"), (levels, "levels"), (offsets, "offsets")):
        array = part.numpy()
        faiss.copy_array_to_vector(array.astype("uint64") if name == "offsets" else array, getattr(graph, name))
    graph.entry_point, graph.max_level = entry, int(levels.max()) - 1
    graph.efSearch = _effort(parts, LARGEST_EFFORT)
    return index


def _effort(parts: dict[str, Tensor], limit: int) -> int:
    if parts["effort"].ndim or not 1 <= int(parts["effort"]) <= limit:
        raise ValueError(f"the effort of a search must be from 1 to {limit:,}")
    return int(parts["effort"])
