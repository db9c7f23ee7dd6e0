"""Indexes of approximate searches, and their files: the lists or the graph, and the codes of the vectors.

FAISS's own files are not read: it trusts their sizes and row numbers, so a crafted file can crash the process. Here
what FAISS would read beyond its memory is checked.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.utils.files import atomic_file

LINKS, LARGEST_EFFORT = 32, 1024
"""Links per reference and level of a graph, twice as many at the lowest level; largest number of its candidates."""


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


def write_index(path: Path, index: Any, about: dict[str, Any], **known: Tensor) -> None:
    """Write a FAISS index, and what is known of its references."""
    import faiss
    from safetensors.torch import save_file  # here, since searches without files do not need it

    if isinstance(index, faiss.IndexHNSW):
        graph: Any = index.hnsw
        storage: Any = faiss.downcast_index(index.storage)
        arrays = {"links": graph.neighbors, "levels": graph.levels, "codes": storage.codes}
        tensors = {name: torch.from_numpy(faiss.vector_to_array(values)) for name, values in arrays.items()}
        about = about | {"entry": graph.entry_point, "effort": graph.efSearch}
    else:
        storage, stored = index, index.invlists
        sizes = [stored.list_size(number) for number in range(index.nlist)]
        lists = [number for number, size in enumerate(sizes) if size]
        ids = [faiss.rev_swig_ptr(stored.get_ids(number), sizes[number]) for number in lists]
        codes = [faiss.rev_swig_ptr(stored.get_codes(number), sizes[number] * index.d) for number in lists]
        tensors = {"ids": torch.from_numpy(np.concatenate(ids)), "codes": torch.from_numpy(np.concatenate(codes))}
        # a tensor with contrib.torch_utils
        tensors["centroids"] = torch.as_tensor(index.quantizer.reconstruct_n(0, index.nlist))
        tensors["sizes"], about = torch.tensor(sizes), about | {"effort": index.nprobe}
    tensors |= known | {"ranges": torch.from_numpy(faiss.vector_to_array(storage.sq.trained))}
    tensors["codes"] = tensors["codes"].view(-1, index.d)
    with atomic_file(path) as unfinished:
        save_file(tensors, unfinished, {"about": json.dumps(about)})


def read_index(path: Path, kind: str, dim: int, metric: int) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Return the FAISS index of a file, and what `write_index` was given."""
    import faiss
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        codes, ranges = tensors.pop("codes"), tensors.pop("ranges")
        index = new_index(kind, dim, len(tensors.get("centroids", ())), metric)
        storage: Any = faiss.downcast_index(index.storage) if kind == "hnsw" else index
        count = len(codes)
        fits = codes.shape == (count, dim) and codes.dtype == torch.uint8 and ranges.shape == (2 * dim,)
        fits &= len(tensors.get("sizes", ())) == len(tensors.get("centroids", ()))
        if not fits or len(tensors.get("ids", codes)) != count:
            raise ValueError(f"the codes of {path} have another shape; build the index again.")
        faiss.copy_array_to_vector(ranges.numpy(), storage.sq.trained)
        storage.is_trained = index.is_trained = True
        if kind == "hnsw":
            faiss.copy_array_to_vector(codes.flatten().numpy(), storage.codes)
            _read_graph(index.hnsw, count, tensors.pop("links"), tensors.pop("levels"), about["entry"])
            index.hnsw.efSearch = min(about["effort"], LARGEST_EFFORT)
        else:
            index.quantizer.add(tensors.pop("centroids").numpy())
            index.nprobe = min(about["effort"], index.nlist)
            start = 0
            for number, ids in enumerate(tensors.pop("ids").long().split(tensors.pop("sizes").tolist())):
                if len(ids):  # only one list is mapped into memory
                    cells = file.get_slice("codes")[start : start + len(ids)].numpy()
                    ids = np.ascontiguousarray(ids.numpy())
                    index.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(cells))
                    start += len(ids)
        storage.ntotal = index.ntotal = count
        return index, about, tensors


def _read_graph(graph: Any, count: int, links: Tensor, levels: Tensor, entry: int) -> None:
    """Set the graph of an index; links of a level must lead to references that have this level."""
    import faiss

    ends = torch.from_numpy(faiss.vector_to_array(graph.cum_nneighbor_per_level)).long()  # of the links of each level
    offsets = F.pad(ends[levels.long()].cumsum(0), (1, 0))
    is_valid = levels.shape == (count,) and levels.min() >= 1 and levels[entry] == levels.max() and entry >= 0
    is_valid &= links.shape == (offsets[-1],) and links.min() >= -1 and links.max() < count
    for level in range(1, int(levels.max()) if is_valid else 0):
        linked = links[offsets[:-1][levels > level, None] + torch.arange(int(ends[level]), int(ends[level + 1]))].long()
        is_valid &= not (levels[linked[linked >= 0]] <= level).any()
    if not is_valid:
        raise ValueError("the graph has links to what is not there; build the index again.")
    faiss.copy_array_to_vector(links.numpy(), graph.neighbors)
    faiss.copy_array_to_vector(levels.numpy(), graph.levels)
    faiss.copy_array_to_vector(offsets.numpy().astype("uint64"), graph.offsets)
    graph.entry_point, graph.max_level = entry, int(levels.max()) - 1
