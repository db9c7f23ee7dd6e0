"""Nearest neighbors of queries among references: exact with torch or FAISS, approximate with an index of FAISS."""

import importlib.util
import logging
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_positive
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.checks import check_embeddings, check_rows
from hf_sphere.metrics.neighbors import Distance, for_hyperbolic_distances, padded
from hf_sphere.search.faiss_files import LARGEST_EFFORT, LINKS, read_index, write_index

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
"""Additional candidates, whose order is corrected by distances in float64; more if all are at the same distance."""

FEW_QUERIES = 64
"""Number of queries from which products of matrices by torch are faster than FAISS's exact search."""

QUERIES, REFERENCES, NUMBERS = 512, 8192, 1 << 24
"""Sizes of a block of similarities, 16 MiB, and of one of candidates for exact distances, 128 MiB."""


def choose_kind(count: int, distance: Distance) -> SearchKind:
    """Return the kind of search for a number of references: approximate above `LARGEST_EXACT`, torch without FAISS."""
    if distance == "hyperbolic":
        return "torch"
    if importlib.util.find_spec("faiss") is None:
        if count > LARGEST_EXACT:
            hint = "pip install 'hf_sphere[faiss]'"
            logger.warning("FAISS is not installed, so the search is exact, with torch: %s.", hint)
        return "torch"
    return "flat" if count <= LARGEST_EXACT else "ivf"


def check_kind(kind: str, distance: Distance) -> None:
    """Raise an error if a kind of search is unknown, does not support the distance, or is not installed."""
    if kind not in get_args(SearchKind):
        raise ValueError(f"unknown kind of search {kind!r}; choose one of {', '.join(get_args(SearchKind))}.")
    if kind != "torch" and distance == "hyperbolic":
        raise ValueError(f"FAISS does not support the hyperbolic distance; use kind='torch' instead of {kind!r}.")
    if kind != "torch" and importlib.util.find_spec("faiss") is None:
        raise ImportError(f"kind {kind!r} needs FAISS: pip install 'hf_sphere[faiss]', or use kind='torch'.")


class NeighborSearch:
    """References that are searched for the nearest neighbors of queries, on the CPU.

    An approximate search looks into as many lists of the inverted file, or candidates of the graph, as reach a
    recall@10 of `TARGET_RECALL` for the mirror images of references' tenth neighbors, reflected at the references; the
    references themselves would be found more easily than new queries.

    Neighbors at equal distances are in the order of the references, the first ones if there are more than k: of equal
    references always, of others among those that an approximate search finds. An exact search compares candidates in
    the dtype of the references, or float32 with FAISS, and may confuse distances that differ by less than its rounding.

    Args:
        references: (N, d), finite, of any real dtype; a tensor, an array or lists, as the queries.
        distance: `cosine` (1 - cosine; 1 for a zero vector), `euclidean` or `hyperbolic`; see `retrieval_scores`.
        curvature: c > 0 for the curvature -c of the hyperbolic distance.
        kind: Kind of the search; by default that of `choose_kind`.
        file: File of an approximate search that `save` wrote for these references.

    Attributes:
        recall: Recall@10 measured when an approximate search was built; 1 for an exact search, NaN for a `file`.

    Raises:
        ValueError: If an argument or the file is invalid, or FAISS does not support the distance.
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
        check_positive("curvature", curvature)
        self.references = _at_least_float32(references)
        self.distance: Distance = distance
        self.curvature = curvature
        count, is_double = len(self.references), self.references.dtype == torch.float64
        # FAISS compares in float32, which may not distinguish the nearest references.
        self.kind = kind or ("torch" if is_double and count <= LARGEST_EXACT else choose_kind(count, distance))
        self.recall = 1.0 if file is None else torch.nan
        check_kind(self.kind, distance)
        self._order, self._starts = _group_equal(self.references)
        self._first = self._order[self._starts[:-1]]  # of equal references, only this one is compared
        vectors = self._prepare(self.references, as_query=False)
        vectors = vectors if len(self._first) == count else vectors[self._first]
        self._vectors = vectors if self.kind not in APPROXIMATE else None
        self._index: Any = None
        if self.kind in APPROXIMATE and file is None:
            self._build(vectors)
        elif file is not None:
            self._index = read_index(file, self.kind, vectors, self._metric, self._digest())

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
        return self._nearest(queries, k, k + SPARE)

    @torch.no_grad()
    def search_others(self, queries: Tensor, k: int, keys: Tensor, query_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Search exactly and as `search`, but leave out the references that have the key of the query.

        Args:
            queries: (Q, d), finite.
            k: Number of neighbors; where fewer are left, infinite distances and the row -1 fill up.
            keys: (N,) int64, such as groups.
            query_keys: (Q,) int64.
        """
        queries = _at_least_float32(queries)
        vectors = padded(self._prepare(self.references, as_query=False, as_products=True))
        count, total = min(k + SPARE, len(self.references)), len(self.references)
        at_once = max(1, min(QUERIES, 4 * NUMBERS // total, NUMBERS // (count * queries.shape[1])))
        neighbors = []
        for block, own in zip(queries.split(at_once), query_keys.split(at_once), strict=True):
            points = padded(self._prepare(block, as_query=True, as_products=True))
            similarities = (points @ vectors.T)[: len(block), :total]
            similarities.masked_fill_(own[:, None] == keys, -torch.inf)
            largest, rows = similarities.topk(count)
            rows = rows.masked_fill(largest == -torch.inf, -1).sort(dim=1).values  # equal distances are in their order
            distances, order = self.distances(block, rows).sort(dim=1, stable=True)
            neighbors.append((distances[:, :k], rows.gather(1, order)[:, :k]))
        distances, rows = (torch.cat(pieces) for pieces in zip(*neighbors, strict=True))
        missing = (0, k - rows.shape[1])
        return F.pad(distances, missing, value=torch.inf), F.pad(rows, missing, value=-1)

    def _nearest(self, queries: Tensor, k: int, count: int) -> tuple[Tensor, Tensor]:
        """Search among `count` candidates, and among more if the k-th neighbor is as far as the last of them."""
        most, copies = len(self._first), min(k, int(self._starts.diff().max()))
        count = min(count, most)
        candidates = self._candidates(queries, count)
        at_once = min(QUERIES, max(1, NUMBERS // (count * max(copies, queries.shape[1]))))
        blocks = zip(queries.split(at_once), candidates.split(at_once), strict=True)
        neighbors = [self._choose(*block, k, copies) for block in blocks]
        distances, rows, last = (torch.cat(pieces) for pieces in zip(*neighbors, strict=True))
        if count < most and (tied := (distances[:, -1] == last) & last.isfinite()).any():
            unique, index = queries[tied].unique(dim=0, return_inverse=True)
            blocks_of_more = unique.split(max(1, NUMBERS // min(4 * count, most)))
            wider = [self._nearest(block, k, 4 * count) for block in blocks_of_more]
            distances[tied], rows[tied] = (torch.cat(pieces)[index] for pieces in zip(*wider, strict=True))
        return distances, rows

    def _choose(self, queries: Tensor, candidates: Tensor, k: int, copies: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return distances and rows of the nearest of candidates, (b, k) each, and the distance of the last, (b,)."""
        valid = candidates.clamp_min(0)
        distances = self.distances(queries, self._first[valid].where(candidates >= 0, -1))
        # Each candidate stands for the first k references that are equal to it.
        positions = self._starts[valid, None] + torch.arange(copies)
        exist = (positions < self._starts[valid + 1, None]) & (candidates >= 0)[..., None]
        rows = self._order[positions.clamp_max(len(self._order) - 1)].where(exist, -1).flatten(1)
        last, distances = distances.amax(1), distances[..., None].where(exist, torch.inf).flatten(1)
        # By row first, so that equal distances are in the order of the references.
        by_row = rows.argsort(dim=1)
        order = by_row.gather(1, distances.gather(1, by_row).argsort(dim=1, stable=True))[:, :k]
        return distances.gather(1, order), rows.gather(1, order), last

    def save(self, path: Path) -> None:
        """Write the index of an approximate search, without the references, to a safetensors file."""
        write_index(path, self._index, self._digest())

    def _digest(self) -> str:
        return f"{self.distance} {zlib.crc32(self.references.contiguous().numpy().data):08x}"

    def _candidates(self, queries: Tensor, count: int) -> Tensor:
        """Return the numbers of the vectors with the largest similarities, (Q, count), in any order."""
        vectors = self._prepare(queries, as_query=True)
        if self._index is not None:
            return torch.from_numpy(self._index.search(vectors.numpy(), count)[1])
        assert self._vectors is not None
        if self.kind == "flat" and (self.distance != "cosine" or len(queries) < FEW_QUERIES):
            import faiss

            return torch.from_numpy(faiss.knn(vectors.numpy(), self._vectors.numpy(), count, self._metric)[1])
        return torch.cat([_largest_products(block, self._vectors, count) for block in vectors.split(QUERIES)])

    def _prepare(self, points: Tensor, *, as_query: bool, as_products: bool = False) -> Tensor:
        """Map points (n, d) to the vectors (n, e) whose inner products, or distances for FAISS, are compared.

        With `as_products`, inner products are compared whatever the kind is.
        """
        if self.distance == "hyperbolic":
            return for_hyperbolic_distances(points, self.curvature)[0 if as_query else 1]
        # centered against cancellation
        points = project_to_sphere(points) if self.distance == "cosine" else points - self._center
        points = points.to(self.references.dtype if self.kind == "torch" else torch.float32)
        if self.distance == "cosine":
            return points
        squares, limits = points.square().sum(1, keepdim=True), torch.finfo(points.dtype)
        rule = f"{'queries' if as_query else 'references'} must be below {limits.max**0.5 / 8:.0e} to be compared"
        check_rows(squares[:, 0] < limits.max / 64, f"{rule} in {limits.dtype}", "are not")
        if self.kind != "torch" and not as_products:
            return points
        return torch.cat([points, torch.ones_like(squares) if as_query else -squares / 2], dim=1)

    def distances(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Return the distances between queries (b, d) and the references of rows (b, n): (b, n), float64."""
        neighbors = self.references[rows.clamp_min(0)].double()
        points = queries[:, None].double()
        if self.distance == "cosine":
            neighbors, points = project_to_sphere(neighbors), project_to_sphere(points)
            missing = ~(points.any(2) & neighbors.any(2))
            distances = ((points - neighbors).square().sum(2) / 2).masked_fill(missing, 1.0)
        else:
            distances = torch.linalg.vector_norm(points - neighbors, dim=2)
        if self.distance == "hyperbolic":
            inside = [1 - self.curvature * values.square().sum(2) for values in (points, neighbors)]
            ratio = self.curvature * distances.square() / (inside[0] * inside[1])
            distances = 2 * ratio.sqrt().asinh() / self.curvature**0.5
        return distances.masked_fill(rows < 0, torch.inf)

    @cached_property
    def _center(self) -> Tensor:
        # A median, since one large value would move the mean away from all others; it also keeps integers exact.
        return self.references[self._first[:: max(1, len(self._first) // 10_000)]].median(0).values

    @property
    def _metric(self) -> int:
        import faiss

        return faiss.METRIC_INNER_PRODUCT if self.distance == "cosine" else faiss.METRIC_L2

    def _build(self, vectors: Tensor) -> None:
        """Build the index, and search ever more of it until the recall is high enough."""
        import faiss

        if len(vectors) < len(self.references):  # so that the recall is that of different neighbors
            different = NeighborSearch(self.references[self._first], distance=self.distance, kind=self.kind)
            self._index, self.recall = different._index, different.recall
            return
        count, dim = vectors.shape
        if self.kind == "hnsw":
            self._index = faiss.IndexHNSWFlat(dim, LINKS, self._metric)
            parameter, effort, limit = "efSearch", 16, LARGEST_EFFORT
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
        sample = torch.arange(count)[:: max(1, count // TUNING_QUERIES)][:TUNING_QUERIES]
        partners = exact.search(self.references[sample], k)[1][:, -1]
        points = vectors if self.distance == "cosine" else self.references
        queries = 2 * points[sample] - points[partners]
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


def _group_equal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of vectors (N, d) sorted by vector, (N,), and where each of U vectors starts, (U + 1,)."""
    cells = (vectors + 0.0).contiguous().numpy()  # -0.0 and 0.0 are equal
    rows = cells.view(f"V{cells.itemsize * cells.shape[1]}")[:, 0]
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    group = torch.from_numpy(first.argsort().argsort()[inverse])  # in the order of their first rows
    return group.argsort(stable=True), F.pad(group.bincount().cumsum(0), (1, 0))


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
