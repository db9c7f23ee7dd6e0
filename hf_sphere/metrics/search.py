"""Nearest neighbors of queries among references: exact with torch or FAISS, approximate with an index of FAISS."""

import importlib.util
import logging
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.checks import check_embeddings
from hf_sphere.metrics.neighbors import Distance, for_hyperbolic_distances, padded
from hf_sphere.utils.files import atomic_file

logger = logging.getLogger(__name__)

SearchKind = Literal["torch", "flat", "ivf", "hnsw"]
"""Exact search with torch or FAISS, or approximate search with an inverted file or a graph of FAISS."""

APPROXIMATE: tuple[SearchKind, ...] = ("ivf", "hnsw")
"""Kinds that build an index."""

LARGEST_EXACT = 200_000
"""Number of references above which the search is approximate by default."""

TARGET_RECALL = 0.98
"""Recall@10 that an approximate search must reach."""

TUNING_QUERIES = 500
"""Number of queries to measure the recall."""

SPARE = 8
"""Additional candidates, whose order is corrected by distances in float64."""

QUERIES, REFERENCES, NUMBERS = 512, 8192, 1 << 24
"""Sizes of a block of similarities, 16 MiB, and of one of candidates for exact distances, 128 MiB."""


def choose_kind(count: int, distance: Distance) -> SearchKind:
    """Return the kind of search for a number of references: approximate above `LARGEST_EXACT`, torch without FAISS."""
    if distance == "hyperbolic":
        return "torch"
    if importlib.util.find_spec("faiss") is None:
        logger.warning("FAISS is not installed, so the search is exact, with torch: pip install 'hf_sphere[faiss]'.")
        return "torch"
    return "flat" if count <= LARGEST_EXACT else "ivf"


class NeighborSearch:
    """References that are searched for the nearest neighbors of queries, on the CPU.

    An approximate search looks into as many lists of the inverted file, or candidates of the graph, as reach a
    recall@10 of `TARGET_RECALL` for the mirror images of references' tenth neighbors, reflected at the references; the
    references themselves would be found more easily than new queries.

    Args:
        references: (N, d), finite, of any real dtype; a tensor, an array or lists, as the queries.
        distance: `cosine` (1 - cosine; 1 for a zero vector), `euclidean` or `hyperbolic`; see `retrieval_scores`.
        curvature: c > 0 for the curvature -c of the hyperbolic distance.
        kind: Kind of the search; by default that of `choose_kind`.
        file: File of an approximate search that `save` wrote for these references. It stays on disk and is
            mapped into memory.

    Attributes:
        recall: Recall@10 measured when an approximate search was built; 1 for an exact search, NaN for a `file`.

    Raises:
        ValueError: If an argument is invalid, or FAISS does not support the distance.
        ImportError: If the kind needs FAISS and it is not installed.

    Example:
        >>> distances, rows = NeighborSearch(embeddings, kind="torch").search(embeddings[:2], 5)
        >>> rows.shape, rows[:, 0]
        (torch.Size([2, 5]), tensor([0, 1]))
    """

    def __init__(
        self,
        references: Tensor,
        *,
        distance: Distance = "cosine",
        curvature: float = 1e-5,
        kind: SearchKind | None = None,
        file: Path | None = None,
    ) -> None:
        if distance not in get_args(Distance):
            raise ValueError(f"unknown distance {distance!r}; choose one of {', '.join(get_args(Distance))}.")
        self.references = _at_least_float32(references)
        self.distance: Distance = distance
        self.curvature = curvature
        count, is_double = len(self.references), self.references.dtype == torch.float64
        # FAISS compares in float32, which may not distinguish the nearest references.
        self.kind = kind or ("torch" if is_double and count <= LARGEST_EXACT else choose_kind(count, distance))
        self.recall = 1.0 if file is None else torch.nan
        if self.kind not in get_args(SearchKind):
            raise ValueError(f"unknown kind of search {kind!r}; choose one of {', '.join(get_args(SearchKind))}.")
        if self.kind != "torch" and distance == "hyperbolic":
            raise ValueError(f"FAISS does not support the hyperbolic distance; use kind='torch' instead of {kind!r}.")
        if self.kind != "torch" and importlib.util.find_spec("faiss") is None:
            raise ImportError(f"kind {kind!r} needs FAISS: pip install 'hf_sphere[faiss]', or use kind='torch'.")
        # Only an exact search needs all references in memory; the other reads the candidates.
        self._vectors = self._prepare(self.references, as_query=False) if self.kind not in APPROXIMATE else None
        self._index: Any = None
        if file is not None:
            self._index = _read_index(file, self.references.shape)
        elif self._vectors is None:
            self._build()

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the distances of the nearest references in increasing order and their rows, (Q, k) each.

        Args:
            queries: (Q, d), finite.
            k: Number of neighbors, at most N. An approximate search that finds fewer fills up with infinite distances
                and the row -1.

        Returns:
            Distances, float64, and rows, int64.

        Raises:
            ValueError: If the queries have another length or are not finite, or k is not in 1..N.
        """
        queries = _at_least_float32(queries)
        count, dim = self.references.shape
        if queries.shape[1] != dim:
            raise ValueError(f"queries must have {dim} dimensions, as the references; got {queries.shape[1]}.")
        if not 1 <= k <= count:
            raise ValueError(f"k must be from 1 to the number of references, {count:,}; got {k}.")
        rows = self._candidates(queries, min(k + SPARE, count))
        at_once = min(QUERIES, max(1, NUMBERS // (rows.shape[1] * dim)))
        parts = zip(queries.split(at_once), rows.split(at_once), strict=True)
        distances = torch.cat([self._distances(*part) for part in parts])
        # By row first, so that equal distances are in the order of the references.
        by_row = rows.argsort(dim=1)
        order = by_row.gather(1, distances.gather(1, by_row).argsort(dim=1, stable=True))[:, :k]
        return distances.gather(1, order), rows.gather(1, order)

    def save(self, path: Path) -> None:
        """Write the index of an approximate search to a file."""
        import faiss

        with atomic_file(path) as unfinished:
            faiss.write_index(self._index, str(unfinished))

    def _candidates(self, queries: Tensor, count: int) -> Tensor:
        """Return the rows of the references with the largest similarities, (Q, count), in any order."""
        vectors = self._prepare(queries.to(self.references.dtype), as_query=True)
        if self._index is not None:
            return torch.from_numpy(self._index.search(vectors.numpy(), count)[1])
        assert self._vectors is not None
        if self.kind == "flat":
            import faiss

            return torch.from_numpy(faiss.knn(vectors.numpy(), self._vectors.numpy(), count, self._metric)[1])
        return torch.cat([_largest_products(part, self._vectors, count) for part in vectors.split(QUERIES)])

    def _prepare(self, points: Tensor, *, as_query: bool) -> Tensor:
        """Map points (n, d) to the vectors (n, e) whose inner products, or distances for FAISS, are compared."""
        if self.distance == "hyperbolic":
            return for_hyperbolic_distances(points, self.curvature)[0 if as_query else 1]
        if self.distance == "cosine":
            points = project_to_sphere(points)
        else:  # centered against cancellation
            points = points - self.references[:: max(1, len(self.references) // 10_000)].mean(0)
        if self.kind != "torch":
            return points.float()
        if self.distance == "cosine":
            return points
        squares = points.square().sum(1, keepdim=True)
        return torch.cat([points, torch.ones_like(squares) if as_query else -squares / 2], dim=1)

    def _distances(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Return the distances between queries (b, d) and the references of rows (b, n): (b, n), float64."""
        found = self.references[rows.clamp_min(0)].double()
        points = queries[:, None].double()
        if self.distance == "cosine":
            found, points = project_to_sphere(found), project_to_sphere(points)
            missing = ~(points.any(2) & found.any(2))
            distances = ((points - found).square().sum(2) / 2).masked_fill(missing, 1.0)
        else:
            distances = torch.linalg.vector_norm(points - found, dim=2)
        if self.distance == "hyperbolic":
            inside = [1 - self.curvature * part.square().sum(2) for part in (points, found)]
            ratio = self.curvature * distances.square() / (inside[0] * inside[1])
            distances = 2 * ratio.sqrt().asinh() / self.curvature**0.5
        return distances.masked_fill(rows < 0, torch.inf)

    @property
    def _metric(self) -> int:
        import faiss

        return faiss.METRIC_INNER_PRODUCT if self.distance == "cosine" else faiss.METRIC_L2

    def _build(self) -> None:
        """Build the index, and search ever more of it until the recall is high enough."""
        import faiss

        count, dim = self.references.shape
        vectors = self._prepare(self.references, as_query=False)
        if self.kind == "hnsw":
            self._index = faiss.IndexHNSWFlat(dim, 32, self._metric)
            parameter, effort, limit = "efSearch", 16, 1024
        else:
            # FAISS recommends 4 to 16 sqrt(N) lists and at least 39 references for the training of each.
            limit = max(1, min(round(4 * count**0.5), count // 39))
            self._index = faiss.index_factory(dim, f"IVF{limit},Flat", self._metric)
            self._index.cp.min_points_per_centroid = 1
            self._index.cp.max_points_per_centroid = 64  # the default of 256 takes four times as long
            self._index.train(vectors.numpy())
            parameter, effort = "nprobe", 1
        self._index.add(vectors.numpy())
        k = min(10, count)
        exact = NeighborSearch(self.references, distance=self.distance, kind="flat")
        chosen = torch.arange(count)[:: max(1, count // TUNING_QUERIES)][:TUNING_QUERIES]
        partners = exact.search(self.references[chosen], k)[1][:, -1]
        points = vectors if self.distance == "cosine" else self.references
        queries = 2 * points[chosen] - points[partners]
        farthest = exact.search(queries, k)[0][:, -1:] * (1 + 1e-9)
        while True:
            faiss.ParameterSpace().set_index_parameter(self._index, parameter, effort)
            self.recall = float((self.search(queries, k)[0] <= farthest).double().mean())
            if self.recall >= TARGET_RECALL or effort >= limit:
                return
            effort = min(2 * effort, limit)


def _at_least_float32(embeddings: Any) -> Tensor:
    embeddings = check_embeddings(embeddings).cpu()
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


def _largest_products(queries: Tensor, references: Tensor, count: int) -> Tensor:
    """Return the rows of the references (N, e) with the largest inner products with queries (b, e): (b, count)."""
    products, rows = [], []
    for start in range(0, len(references), REFERENCES):
        block = references[start : start + REFERENCES]
        similarities = (padded(queries) @ padded(block).T)[: len(queries), : len(block)]
        largest = _largest(similarities, min(count, len(block)))
        products.append(similarities.gather(1, largest))
        rows.append(start + largest)
    return torch.cat(rows, 1).gather(1, _largest(torch.cat(products, 1), count))


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest values per row, (b, m) -> (b, count); of equal values the first."""
    largest, columns = values.topk(min(count + 1, values.shape[1]), dim=1)
    if (tied := largest[:, count - 1] == largest[:, -1]).any() and count < values.shape[1]:
        columns[tied, :count] = values[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return columns[:, :count].sort(dim=1).values


def _read_index(file: Path, shape: torch.Size) -> Any:
    import faiss

    try:
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ValueError(f"{file} is damaged: FAISS cannot read it.") from error
    if (index.ntotal, index.d) != tuple(shape):
        raise ValueError(f"{file} has {index.ntotal} x {index.d} numbers, but the embeddings are {tuple(shape)}.")
    return index
