"""Nearest neighbors of queries among references: exact with torch or FAISS, approximate with an index of FAISS."""

import importlib.util
import logging
import zlib
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, check_rows
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.retrieval import Distance, for_hyperbolic_distances, largest_products
from hf_sphere.search.faiss_files import LARGEST_EFFORT, new_index, number_of_lists, read_index, write_index
from hf_sphere.search.vectors import hash_rows
from hf_sphere.utils.checks import check_choice, check_extra, check_integer, check_number

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

SPARE, MOST_SPARE = 8, 512
"""Additional candidates, whose order is corrected by distances in float64; more if all are at the same distance, and up
to the second number as an approximate search needs them, whose codes cannot distinguish vectors that are very near."""

FEW_QUERIES = 64
"""Number of queries from which products of matrices by torch are faster than FAISS's exact search."""

QUERIES, REFERENCES, NUMBERS, EXACT = 512, 8192, 1 << 22, 1 << 18
"""Sizes of a block of similarities, 16 MiB, of one of candidates, and of one for exact distances, for the cache."""


def choose_kind(count: int, distance: Distance) -> SearchKind:
    """Return the kind of search for a number of references: approximate above `LARGEST_EXACT`, torch without FAISS."""
    if distance == "hyperbolic":
        return "torch"
    if importlib.util.find_spec("faiss") is None:
        if count > LARGEST_EXACT:
            logger.warning("FAISS is not installed, so the search is exact: pip install 'hf_sphere[faiss]'.")
        return "torch"
    return "flat" if count <= LARGEST_EXACT else "ivf"


def check_kind(kind: str, distance: Distance) -> None:
    """Raise an error if a kind of search is unknown, does not support the distance, or is not installed."""
    check_choice("kind of search", kind, get_args(SearchKind))
    if kind != "torch" and distance == "hyperbolic":
        raise ValueError(f"FAISS does not support the hyperbolic distance; use kind='torch' instead of {kind!r}.")
    if kind != "torch":
        check_extra("faiss", f"the kind {kind!r}", "faiss")


class NeighborSearch:
    """References that are searched for the nearest neighbors of queries, on the CPU.

    An approximate search looks into as many lists of the inverted file, or candidates of the graph, as reach a
    recall@10 of `TARGET_RECALL` for the mirror images of references' tenth neighbors, reflected at the references; the
    references themselves would be found more easily than new queries. Its index holds codes of 8 bits per number; the
    distances of the candidates are exact.

    Neighbors at equal distances are in the order of the references, the first ones if there are more than k: of equal
    references always, of others among those that an approximate search finds. An exact search compares candidates in
    the dtype of the references, or float32 with FAISS, and may confuse distances that differ by less than its rounding.

    Args:
        references: (N, d), finite, of any real dtype; a tensor, an array or lists, as the queries.
        distance: `cosine` (1 - cosine; 1 for a zero vector), `euclidean` or `hyperbolic`; see `retrieval_scores`.
        curvature: c > 0 for the curvature -c of the hyperbolic distance.
        kind: Kind of the search; by default from `choose_kind`.
        file: File of an approximate search that `save` wrote for these references, which are not read then, so that
            a mapped file stays on disk.

    Attributes:
        recall: Recall@10 measured when an approximate search was built, or after rows were changed; 1 for an exact
            search, NaN for a `file`.

    Raises:
        ValueError: If an argument or the file is invalid, or FAISS does not support the distance.
        TypeError: If references are no dense numbers.
        OSError: If the file cannot be read.
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
        self.distance: Distance = check_choice("distance", distance, get_args(Distance))
        check_number("curvature", curvature, "(0, inf)")
        is_mapped = file is not None and isinstance(references, Tensor) and references.dtype == torch.float32
        self.references = references.detach().cpu() if is_mapped else _at_least_float32(references)
        self.curvature = curvature
        count, is_double = len(self.references), self.references.dtype == torch.float64
        # FAISS compares in float32, which may not distinguish the nearest references.
        self.kind = kind or ("torch" if is_double and count <= LARGEST_EXACT else choose_kind(count, distance))
        check_kind(self.kind, distance)
        self._dtype = self.references.dtype if self.kind == "torch" else torch.float32
        self.recall = 1.0 if file is None else torch.nan
        self._vectors: Tensor | None = None
        self._index: Any = None
        self._spare, self._changed = SPARE, 0
        if self.kind != "torch":
            import faiss

            self._metric = faiss.METRIC_INNER_PRODUCT if distance == "cosine" else faiss.METRIC_L2
        if file is not None:
            self._index, about, stored = read_index(file, self.kind, self.references.shape[1], self._metric)
            if about["references"] != self._digest():
                raise ValueError(f"{file} was built for other embeddings; build the index again.")
            self._changed, self._spare = about["changed"], about["spare"]
            self._origin = stored["center"].to(self.references.dtype)
            self._group(stored["hashes"])
            return
        self._group(hash_rows(self.references))
        self._check_range("references", self.references)
        if self.kind in APPROXIMATE:
            self._build()
        else:
            vectors = self._prepare(self.references, as_query=False)
            self._vectors = vectors if len(self._first) == count else vectors[self._first]

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
            TypeError: If queries are no dense numbers.
        """
        check_integer("k", k, 1, len(self.references))
        return self.find(self._check_queries(queries), k)

    @torch.no_grad()
    def search_others(self, queries: Tensor, k: int, keys: Tensor, query_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Search exactly and as `search`, but leave out the references that have the key of the query.

        The keys are int64, (N,) of references, such as groups, and (Q,) of queries. Where fewer than k are left,
        infinite distances and the row -1 fill up.

        Raises:
            ValueError: If the queries, the keys or k are invalid.
            TypeError: If queries are no dense numbers.
        """
        queries = self._check_queries(queries)
        if keys.shape != self.references.shape[:1] or query_keys.shape != queries.shape[:1]:
            raise ValueError("keys and query_keys must be one integer per reference, and one per query.")
        count, neighbors = min(check_integer("k", k, 1) + SPARE, len(keys)), []
        for block, own in zip(queries.split(4 * QUERIES), query_keys.split(4 * QUERIES), strict=True):
            points = self._prepare(block, as_query=True, as_products=True)
            blocks = self.references.split(REFERENCES)  # one after another, since all need much memory
            parts = (self._prepare(part, as_query=False, as_products=True) for part in blocks)
            rows = largest_products(points, parts, count, keys, own)  # equal distances are in their order
            distances, order = self.distances(block, rows).sort(dim=1, stable=True)
            neighbors.append((distances[:, :k], rows.gather(1, order)[:, :k]))
        distances, rows = map(torch.cat, zip(*neighbors, strict=True))
        missing = (0, k - rows.shape[1])
        return F.pad(distances, missing, value=torch.inf), F.pad(rows, missing, value=-1)

    def _check_queries(self, queries: Tensor) -> Tensor:
        queries, dim = _at_least_float32(queries), self.references.shape[1]
        if queries.shape[1] != dim:
            raise ValueError(f"queries must have {dim} dimensions, as the references; got {queries.shape[1]}.")
        return queries

    def find(self, queries: Tensor, k: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Search for valid queries, among more candidates if the k-th neighbor is as far as the last of `count`."""
        most, copies = len(self._first), min(k, int(self._starts.diff().max()))
        count = min(count or k + self._spare, most)
        candidates = self._candidates(queries, count)
        at_once = min(QUERIES, max(1, NUMBERS // (count * max(copies, queries.shape[1]))))
        neighbors = map(partial(self._choose, k=k, copies=copies), queries.split(at_once), candidates.split(at_once))
        distances, rows, last = map(torch.cat, zip(*neighbors, strict=True))
        if count < most and (tied := (distances[:, -1] == last) & last.isfinite()).any():
            unique, index = queries[tied].unique(dim=0, return_inverse=True)
            parts = unique.split(max(1, NUMBERS // min(4 * count, most)))
            wider = [self.find(part, k, 4 * count) for part in parts]
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
        about = {"references": self._digest(), "changed": self._changed, "spare": self._spare}
        write_index(path, self._index, about, hashes=self._hashes, center=self._origin.double())

    def extend(self, references: Tensor) -> bool:
        """Take valid references that begin with those before; return whether an approximate index got the new ones."""
        if self._index is None:
            return False
        added, known = references[len(self.references) :], len(self._first)
        self._check_range("references", added)
        self.references = references
        self._group(torch.cat([self._hashes, hash_rows(added)]))
        self.__dict__.pop("_center", None)
        self._append(torch.arange(known, len(self._first)))
        self._changed += len(self._first) - known
        return True

    def refresh(self) -> None:
        """Measure the recall after many changes; build the index again if it fell, or for more or fewer lists.

        It fell if chance does not explain it, for all references or for the last ones.
        """
        if self._changed <= (count := len(self._first)) // 1000:
            return
        recalls = [self._recalls(*self._held_out(first, 100)) for first in (0, max(0, count - self._changed))]
        highest = min(float(part.mean() + 2 * part.std(correction=0) / len(part) ** 0.5) for part in recalls)
        self.recall, self._changed = min(float(part.mean()) for part in recalls), 0
        lists = number_of_lists(count)
        if highest < TARGET_RECALL or (self.kind == "ivf" and not lists / 2 <= self._index.nlist < 2 * lists):
            logger.warning("Many rows have changed (recall@10 %.3f); the index is built again.", self.recall)
            self._build()

    def _digest(self) -> str:
        """Return what identifies the references: a digest of some, so that a mapped file stays on disk."""
        some = self.references[:: max(1, len(self.references) // 256)].contiguous()
        return f"{self.distance} {tuple(self.references.shape)} {zlib.crc32(some.numpy().data):08x}"

    def _candidates(self, queries: Tensor, count: int) -> Tensor:
        """Return the numbers of the vectors with the largest similarities, (Q, count), in any order."""
        vectors = self._prepare(queries, as_query=True)
        if self._index is not None:
            return torch.from_numpy(self._index.search(vectors.numpy(), count)[1])
        assert self._vectors is not None
        if self.kind == "flat" and (self.distance != "cosine" or len(queries) < FEW_QUERIES):
            import faiss

            return torch.from_numpy(faiss.knn(vectors.numpy(), self._vectors.numpy(), count, self._metric)[1])
        blocks, parts = vectors.split(QUERIES), self._vectors.split(REFERENCES)
        return torch.cat([largest_products(block, parts, count) for block in blocks])

    def _prepare(self, points: Tensor, *, as_query: bool, as_products: bool = False) -> Tensor:
        """Map points (n, d) to the vectors (n, e) whose inner products, or distances for FAISS, are compared.

        With `as_products`, inner products are compared whatever the kind is.
        """
        if self.distance == "hyperbolic":
            return for_hyperbolic_distances(points, self.curvature)[0 if as_query else 1]
        if self.distance == "cosine":
            is_unit = points.dtype == torch.float32 and ((points.norm(dim=1) - 1).abs() < 4e-7).all()
            return (points if is_unit else project_to_sphere(points)).to(self._dtype)
        if as_query:
            self._check_range("queries", points)
        center = self._center if as_products or self._index is None else self._origin
        points = (points - center).to(self._dtype)  # against cancellation
        if self.kind != "torch" and not as_products:
            return points
        squares = points.square().sum(1, keepdim=True)
        return torch.cat([points, torch.ones_like(squares) if as_query else -squares / 2], dim=1)

    def _check_range(self, what: str, points: Tensor) -> None:
        """Raise an error if squares of Euclidean distances overflow."""
        if self.distance == "euclidean":
            distances = torch.cdist(points, self._center[None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
            largest = torch.finfo(self._dtype).max ** 0.5 / 8
            rule = f"{what} must be below {largest:.0e} to be compared in {self._dtype}"
            check_rows(distances < largest, rule, "are not")

    def distances(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Return the distances between queries (b, d) and the references of rows (b, n): (b, n), float64."""
        at_once = max(1, EXACT // (rows.shape[1] * queries.shape[1]))
        if len(queries) > at_once:
            pairs = zip(queries.split(at_once), rows.split(at_once), strict=True)
            return torch.cat([self.distances(*pair) for pair in pairs])
        both = torch.cat([queries[:, None], self.references[rows.clamp_min(0)]], 1).double()
        if self.distance == "cosine":
            for norm, least in ((torch.inf, 0.0), (2, 1e-12)):  # as project_to_sphere, without gradients
                norms = torch.linalg.vector_norm(both, norm, -1, True)
                both /= torch.threshold(norms, least, 1.0)
            is_zero = norms[..., 0] == 0
            distances = (both[:, :1] - both[:, 1:]).square_().sum(2) / 2
            distances = distances.masked_fill(is_zero[:, :1] | is_zero[:, 1:], 1.0)
        else:
            distances = torch.linalg.vector_norm(both[:, :1] - both[:, 1:], dim=2)
        if self.distance == "hyperbolic":
            inside = 1 - self.curvature * both.square().sum(2)
            ratio = self.curvature * distances.square() / (inside[:, :1] * inside[:, 1:])
            distances = 2 * ratio.sqrt().asinh() / self.curvature**0.5
        return distances.masked_fill(rows < 0, torch.inf)

    @cached_property
    def _center(self) -> Tensor:
        # A median, since one large value would move the mean away from all others; it also keeps integers exact.
        return self.references[self._first[:: max(1, len(self._first) // 10_000)]].median(0).values

    def _group(self, hashes: Tensor) -> None:
        """Group equal references, in the order of their first rows."""
        _, first, inverse = np.unique(hashes.numpy(), return_index=True, return_inverse=True)
        self._hashes, self._groups = hashes, torch.from_numpy(first.argsort().argsort()[inverse])
        self._order = self._groups.argsort(stable=True)
        self._starts = F.pad(self._groups.bincount().cumsum(0), (1, 0))
        self._first = self._order[self._starts[:-1]]  # of equal references, only this one is compared

    def _build(self) -> None:
        """Build the index, and search more of it, or more candidates, until the recall is high enough."""
        import faiss

        count, dim, is_graph = len(self._first), self.references.shape[1], self.kind == "hnsw"
        lists, self._changed = number_of_lists(count), 0
        self._index, self._origin = new_index(self.kind, dim, lists, self._metric), self._center
        # FAISS recommends at least 39 per list; more take longer, and memory, as do many to train the codes.
        sample = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: 40 * lists]
        points = self._prepare(self.references[self._first[sample]], as_query=False).numpy()
        if not is_graph:
            faiss.Clustering(dim, lists, self._index.cp).train(points, self._index.quantizer)
        self._index.train(points[:20_000])
        del points  # the codes need memory, too
        self._append(torch.arange(count))
        parameter, effort, limit = ("efSearch", 16, LARGEST_EFFORT) if is_graph else ("nprobe", 1, lists)
        held_out = self._held_out(0, TUNING_QUERIES)

        def measure(setting: tuple[int, int]) -> float:
            faiss.ParameterSpace().set_index_parameter(self._index, parameter, setting[0])
            self._spare = setting[1]
            return float(self._recalls(*held_out).mean())

        setting = (effort, SPARE)
        self.recall = measure(setting)
        while self.recall < TARGET_RECALL and setting != (limit, MOST_SPARE):
            effort, spare = setting
            choices = {(min(2 * effort, limit), spare), (effort, min(4 * spare, MOST_SPARE))} - {setting}
            self.recall, setting = max((measure(choice), choice) for choice in choices)
        measure(setting)
        if self.recall < TARGET_RECALL:
            logger.warning("The search misses neighbors (recall@10 %.3f); use kind='flat'.", self.recall)

    def _append(self, numbers: Tensor) -> None:
        """Add different references, by their numbers, to the index."""
        import faiss

        def vectors(block: Tensor) -> np.ndarray:
            return self._prepare(self.references[self._first[block]], as_query=False).numpy()

        if self.kind == "hnsw" or self._index.ntotal:
            for block in numbers.split(8 * REFERENCES):
                self._index.add(vectors(block))
            return
        # The lists get their sizes first: if they grew, they would need twice the memory.
        blocks = numbers.split(REFERENCES)
        lists = [self._index.quantizer.assign(vectors(block), 1)[:, 0] for block in blocks]
        for number, size in enumerate(np.bincount(np.concatenate(lists)).tolist()):
            self._index.invlists.resize(number, size)
            self._index.invlists.resize(number, 0)
        for block, own in zip(blocks, lists, strict=True):
            points = vectors(block)
            self._index.add_core(len(points), faiss.swig_ptr(points), None, faiss.swig_ptr(own))

    def _held_out(self, start: int, most: int) -> tuple[Tensor, Tensor]:
        """Return mirror images of tenth neighbors, reflected at references from a number on, and their distances."""
        count, is_copy = len(self._first), torch.ones_like(self._order)
        is_copy[self._first] = 0
        points = self.references[self._first[start :: max(1, (count - start) // most)][:most]]
        k, copies = min(10, count), torch.ones(len(points), dtype=torch.long)
        partners = self.references[self.search_others(points, k, is_copy, copies)[1][:, -1]]
        if self.distance == "cosine":
            points, partners = project_to_sphere(points), project_to_sphere(partners)
        queries = 2 * points - partners
        return queries, self.search_others(queries, k, is_copy, copies)[0][:, -1:] * (1 + 1e-9)

    def _recalls(self, queries: Tensor, farthest: Tensor) -> Tensor:
        """Return the recall@10 of each query, (n,)."""
        candidates = self._candidates(queries, min(10 + self._spare, len(self._first)))
        return (self._choose(queries, candidates, 10, 1)[0] <= farthest).double().mean(1)


def _at_least_float32(embeddings: Any) -> Tensor:
    embeddings = check_embeddings(embeddings).cpu()
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
