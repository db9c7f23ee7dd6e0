"""Nearest neighbors of embeddings within their class and in other classes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

Distance = Literal["cosine", "euclidean", "hyperbolic"]

BYTES_IN_MEMORY = 2**28
"""Approximate memory of a block of queries."""

TILE = 64
"""Rows and columns of matrix products are padded to a multiple of this. Otherwise results at the edges may differ in
the last digits for equal embeddings, which breaks ties."""

GROUP = 8
"""Number of similarities per group in the search for the largest ones."""


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings sorted by class, small classes first; nearer references have larger inner products with a query."""

    queries: Tensor  # (N, e)
    references: Tensor  # (N or more, e); rows beyond N are padding
    first: Tensor  # (N,), index of the first member of each embedding's class, int64
    end: Tensor  # (N,), index after its last member, int64
    order: Tensor  # (N,), index of each embedding before the sorting, int64

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
        if distance == "cosine":
            queries = references = project_to_sphere(embeddings[order])
        elif distance == "euclidean":
            queries, references = _for_euclidean_distances(embeddings[order])
        else:
            queries, references = (points[order] for points in for_hyperbolic_distances(embeddings, curvature))
        _, sizes = key[order].unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        return cls(queries, padded(references), ends - sizes.repeat_interleave(sizes), ends, order)

    def block_size(self, count: int) -> int:
        """Return the number of queries that fit into memory with their `count` neighbors and the largest class."""
        row = len(self.queries) * self.queries.element_size() + 64 * (int(self.relevant.max()) + count)
        return max(1, BYTES_IN_MEMORY // row)

    def nearest(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return similarities of queries (b,) with their class and with nearest others, in order; -inf fills up."""
        similarities = (padded(self.queries[rows]) @ self.references.T)[: len(rows)]
        similarities[:, len(self.queries) :] = -torch.inf
        # Columns of each row's class; smaller classes are padded with the query itself.
        members = torch.arange(int(self.relevant[rows].max()) + 1, device=rows.device)
        columns = self.first[rows, None] + members
        columns = torch.where(columns < self.end[rows, None], columns, rows[:, None])
        same = similarities.gather(1, columns).masked_fill_(columns == rows[:, None], -torch.inf)
        similarities.scatter_(1, columns, -torch.inf)
        others = _largest(similarities, min(count, len(self.queries)))
        return same.sort(dim=1, descending=True).values[:, :-1], others


def padded(rows: Tensor) -> Tensor:
    """Pad the rows of a matrix with zeros to a multiple of `TILE`; it is not copied if it has one."""
    return F.pad(rows, (0, 0, 0, -len(rows) % TILE)) if len(rows) % TILE else rows


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the `count` largest values per row in decreasing order, (b, m) -> (b, count); m a multiple of `GROUP`."""
    if 4 * GROUP * count > values.shape[1]:
        return values.topk(count, dim=1).values
    # They are in the groups with the largest maxima, which are found much faster.
    groups = values.unflatten(1, (GROUP, -1))
    nearest = groups.amax(1).topk(count, dim=1, sorted=False).indices
    return groups.gather(2, nearest[:, None].expand(-1, GROUP, -1)).flatten(1).topk(count, dim=1).values


def largest_products(queries: Tensor, parts: Iterable[Tensor], count: int, keys: Any = None, own: Any = None) -> Tensor:
    """Return the rows of the references with the largest products, (b, count), the first of equal ones; -1 fills up."""
    products, rows, start = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long), 0
    for part in parts:
        similarities = (padded(queries) @ padded(part).T)[: len(queries), : len(part)]
        if keys is not None:
            similarities.masked_fill_(own[:, None] == keys[start : start + len(part)], -torch.inf)
        largest = _first_largest(similarities, min(count, len(part)))
        products = torch.cat([products, similarities.gather(1, largest)], 1)
        chosen = _first_largest(products, min(count, products.shape[1]))
        products, rows = products.gather(1, chosen), torch.cat([rows, start + largest], 1).gather(1, chosen)
        start += len(part)
    return rows.masked_fill(products == -torch.inf, -1)


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest values per row, (b, m) -> (b, count); of equal values the first."""
    largest, columns = values.topk(min(count + 1, values.shape[1]), dim=1)
    if (tied := largest[:, count - 1] == largest[:, -1]).any() and count < values.shape[1]:
        columns[tied, :count] = values[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return columns[:, :count].sort(dim=1).values


def _for_euclidean_distances(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    # |q - n|^2 up to a term that is the same for all n; centered and scaled against cancellation and overflow. Medians
    # and powers of two keep small integers exact.
    points = embeddings * _power_of_two(embeddings.abs().max())
    centered = points - points.median(0).values
    centered = centered * _power_of_two(centered.abs().max())
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
        ball = f"the ball of curvature -{curvature:g}, of radius {curvature**-0.5:g}"
        norm = f"that at index {row} has the norm {float(squares[row].sqrt()) / curvature**0.5:g}"
        raise ValueError(f"embeddings must lie in {ball}; {norm}. Project them or use a smaller curvature.")
    weights = 1 / (1 - squares)
    references = torch.cat([points * weights, -weights, -squares * weights], dim=1)
    return torch.cat([2 * points, squares, torch.ones_like(squares)], dim=1), references


def _power_of_two(largest: Tensor) -> Tensor:
    """Return a factor that scales values of this largest magnitude to about 1 without rounding."""
    limits = torch.finfo(largest.dtype)
    return torch.exp2(-torch.frexp(largest.clamp(limits.tiny, limits.max / 4)).exponent.to(largest.dtype))
