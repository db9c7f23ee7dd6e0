"""Nearest neighbors of embeddings within their class and in other classes, with torch or faiss."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

Distance = Literal["cosine", "euclidean", "hyperbolic"]
Backend = Literal["torch", "faiss"]

BYTES_IN_MEMORY = 2**28
"""Approximate memory of a block of queries."""

TILE = 64
"""Rows and columns of matrix products are padded to a multiple of this. Otherwise results at the edges may differ in
the last digits for equal embeddings, which breaks ties."""

GROUP = 8
"""Number of similarities per group in the search for the largest ones."""


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings sorted by class, small classes first, and transformed for comparison by inner products.

    Attributes:
        queries: (N, e), the embeddings as queries.
        references: (N or more, e), the embeddings as references; a nearer reference has a larger inner product with the
            query. Rows beyond N are padding.
        squares: (N or more,), squared norms of the references if nearer references have a larger cosine with the query
            instead of a larger inner product; otherwise None.
        first: (N,), index of the first member of each embedding's class, int64.
        end: (N,), index after its last member, int64.
        order: (N,), index of each embedding before the sorting, int64.
    """

    queries: Tensor
    references: Tensor
    squares: Tensor | None
    first: Tensor
    end: Tensor
    order: Tensor

    @property
    def relevant(self) -> Tensor:
        """Number of other members of each embedding's class, (N,), int64."""
        return self.end - self.first - 1

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor, distance: Distance, curvature: float) -> "Gallery":
        """Sort finite embeddings (N, d) by their labels (N,) and transform them."""
        _, group, sizes = labels.unique(return_inverse=True, return_counts=True)
        key = sizes[group] * len(sizes) + group
        order = key.argsort(stable=True)
        squares = None
        if distance == "cosine":
            queries, references, squares = _for_cosines(embeddings[order])
        elif distance == "euclidean":
            queries, references = _for_euclidean_distances(embeddings[order])
        else:
            queries, references = for_hyperbolic_distances(embeddings[order], curvature)
        _, sizes = key[order].unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        if squares is not None:
            squares = F.pad(squares, (0, -len(squares) % TILE), value=1.0)
        return cls(queries, _padded(references), squares, ends - sizes.repeat_interleave(sizes), ends, order)

    def block_size(self, count: int) -> int:
        """Return the number of queries that fit into memory with their `count` neighbors and the largest class."""
        row = len(self.queries) * self.queries.element_size() + 64 * (int(self.relevant.max()) + count)
        return max(1, BYTES_IN_MEMORY // row)

    def nearest(self, rows: Tensor, count: int, backend: Backend) -> tuple[Tensor, Tensor]:
        """Return the similarities of the queries `rows` (b,) with their class and with neighbors of other classes.

        `count`, the number of neighbors, is at least that of the other members of any query's class.

        Returns:
            Similarities (b, p) with the other members of the class, where p is their number in the largest class, and
            (b, n) with the nearest members of other classes, where n is `count`, or smaller if there are fewer. Both
            are in decreasing order and padded with -inf; faiss omits similarities beyond the `count` nearest.
        """
        # Codes whose comparison is exact only in float64 are beyond faiss.
        use_faiss = backend == "faiss" and self.queries.dtype == torch.float32
        return self._by_faiss(rows, count) if use_faiss else self._by_product(rows, count)

    def _by_product(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        similarities = (_padded(self.queries[rows]) @ self.references.T)[: len(rows)]
        if self.squares is not None:
            similarities.mul_(similarities.abs()).div_(self.squares)  # proportional to the square of the cosine
        similarities[:, len(self.queries) :] = -torch.inf
        # Columns of each row's class; smaller classes are padded with the query itself.
        members = torch.arange(int(self.relevant[rows].max()) + 1, device=rows.device)
        columns = self.first[rows, None] + members
        columns = torch.where(columns < self.end[rows, None], columns, rows[:, None])
        same = similarities.gather(1, columns).masked_fill_(columns == rows[:, None], -torch.inf)
        similarities.scatter_(1, columns, -torch.inf)
        others = _largest(similarities, min(count, len(self.queries)))
        return same.sort(dim=1, descending=True).values[:, :-1], others

    def _by_faiss(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        import faiss

        # Two more: the query itself, and one to detect a tie that continues beyond the end of the list.
        found = min(count + 2, len(self.queries))
        searched: Any = faiss.knn(
            self.queries[rows].numpy(),
            self.references[: len(self.queries)].numpy(),
            found,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        similarities, columns = (torch.from_numpy(array) for array in searched)
        in_class = (columns >= self.first[rows, None]) & (columns < self.end[rows, None])
        same = similarities.masked_fill(~in_class | (columns == rows[:, None]), -torch.inf)
        same = same.sort(dim=1, descending=True).values
        others = similarities.masked_fill(in_class, -torch.inf).sort(dim=1, descending=True).values
        tied = (similarities[:, -2] == similarities[:, -1]).nonzero().squeeze(1)
        if found < len(self.queries) and len(tied) > 0:
            for listed, known in zip((same, others), self._by_product(rows[tied], count), strict=True):
                listed[tied] = F.pad(known, (0, found - known.shape[1]), value=-torch.inf)
        return same, others


def choose_backend(backend: Backend | None, distance: Distance, embeddings: Tensor, count: int) -> Backend:
    """Return `backend` if it supports the input; if it is None, return the faster one.

    Measured on an x86 server with 10,000 and 60,000 embeddings: for at least 128 dimensions and few neighbors, faiss
    1.15 is 1.2 to 1.6 times as fast as torch 2.15; otherwise it is not faster.
    """
    device, dtype, (total, dim) = embeddings.device.type, embeddings.dtype, embeddings.shape
    possible = distance != "hyperbolic" and device == "cpu" and dtype != torch.float64
    installed = importlib.util.find_spec("faiss") is not None
    if backend is None:
        return "faiss" if possible and installed and dim >= 128 and total >= max(10_000, 100 * count) else "torch"
    if backend == "torch":
        return "torch"
    if backend != "faiss":
        raise ValueError(f"unknown backend {backend!r}; choose torch, faiss, or None for the faster one.")
    if not possible:
        given = f"the {distance} distance and {dtype} on {device}"
        raise ValueError(f"faiss supports cosine and Euclidean distances, float32, on the CPU; got {given}.")
    if not installed:
        raise ImportError("backend 'faiss' needs faiss: `pip install faiss-cpu`, or use backend='torch'.")
    return "faiss"


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % TILE))


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the `count` largest values per row in decreasing order, (b, m) -> (b, count); m a multiple of `GROUP`."""
    if 4 * GROUP * count > values.shape[1]:
        return values.topk(count, dim=1).values
    # They are in the groups with the largest maxima, which are found much faster.
    groups = values.unflatten(1, (GROUP, -1))
    nearest = groups.amax(1).topk(count, dim=1, sorted=False).indices
    return groups.gather(2, nearest[:, None].expand(-1, GROUP, -1)).flatten(1).topk(count, dim=1).values


def _for_cosines(embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = signs_of_codes(embeddings, (1,))
    codes = codes * power_of_two(codes.abs().amax(1, keepdim=True))
    if largest_norm(codes, (1,)) <= 2**53:  # up to 2^26 the squares below are exact too, and equal ratios remain equal
        codes = codes.double()
        squares = codes.square().sum(1)
        return codes, codes, torch.where(squares > 0, squares, 1.0)
    unit = project_to_sphere(embeddings)
    return unit, unit, None


def _for_euclidean_distances(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    # |q - n|^2 up to a term that is the same for all n; centered and scaled against cancellation and overflow. Medians
    # and powers of two keep embeddings on a lattice.
    points = signs_of_codes(embeddings, (0, 1))
    points = points * power_of_two(points.abs().max())
    centered = points - points.median(0).values
    centered = centered * power_of_two(centered.abs().max())
    norm = largest_norm(centered, (0, 1))
    if 2**24 < 3 * norm <= 2**53:  # the products below are multiples of half a squared step, up to 1.5 times the norm
        centered = centered.double()
    squares = centered.square().sum(-1, keepdim=True)
    return F.pad(centered, (0, 1), value=1.0), torch.cat([centered, -squares / 2], dim=1)


def for_hyperbolic_distances(embeddings: Tensor, curvature: float) -> tuple[Tensor, Tensor]:
    """Return points (N, d) as queries and as references, (N, d + 2) float64, to be compared by inner products."""
    # The distance is acosh(1 + 2 c |q - n|^2 / ((1 - c |q|^2) (1 - c |n|^2))) / sqrt(c), which grows with
    # |q - n|^2 / (1 - c |n|^2): the rest is the same for all n, and acosh near 1 would lose digits. In float64, because
    # points near the boundary of the ball can be far apart and have almost equal coordinates.
    points = embeddings.double() * curvature**0.5
    squares = points.square().sum(-1, keepdim=True)
    if not (squares < 1).all():
        row = int((squares >= 1).squeeze(-1).nonzero()[0])
        raise ValueError(
            f"embeddings must lie in the ball of curvature -{curvature:g}, of radius {curvature**-0.5:g}; one has the "
            f"norm {float(squares[row].sqrt()) / curvature**0.5:g}. Project them or use a smaller curvature."
        )
    weights = 1 / (1 - squares)
    ones = torch.ones_like(squares)
    return (
        torch.cat([2 * points, squares, ones], dim=1),
        torch.cat([points * weights, -weights, -squares * weights], dim=1),
    )


STEP = 2.0**-23  # smallest step of a lattice, relative to the largest value


def power_of_two(largest: Tensor) -> Tensor:
    """Return factors that scale values of these largest magnitudes to about 1 without rounding."""
    number = torch.finfo(largest.dtype)
    return torch.exp2(-torch.frexp(largest.clamp(number.tiny, number.max / 4)).exponent.to(largest.dtype))


def signs_of_codes(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Replace values (N, e) by their signs, if along the axes all are zero or of the same magnitude.

    Normalized binary codes are on no lattice with a power of two as its step.
    """
    magnitudes = values.abs()
    is_code = ((values == 0) | (magnitudes == magnitudes.amax(axes, keepdim=True))).all(axes, keepdim=True)
    return torch.where(is_code, values.sign(), values)


def largest_norm(values: Tensor, axes: tuple[int, ...]) -> float:
    """Return the largest squared norm of rows (N, e), in units of the squared step of their lattice.

    Args:
        values: Values of magnitude at most 4.
        axes: Along these axes values share a step, a power of two.

    Returns:
        An integer, which bounds the multiples that occur in inner products; infinite if the values are on no lattice.
    """
    multiples = values / STEP
    if not (multiples == multiples.round()).all():
        return math.inf
    integers = multiples.long()
    lowest_bits = integers & -integers
    steps = torch.where(lowest_bits > 0, lowest_bits, int(1 / STEP)).amin(axes, keepdim=True)
    return float((integers // steps).double().square().sum(1).max())
