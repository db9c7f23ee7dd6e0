"""The nearest of each embedding's own class and of the others, block by block, by torch or by faiss."""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Distance = Literal["cosine", "euclidean", "hyperbolic"]
Backend = Literal["torch", "faiss"]

BYTES_IN_MEMORY = 2**28
"""About how much the block of queries in hand takes."""

TILE = 64
"""Products of matrices have a multiple of so many rows and columns: at the edges of others the last digits of equal
embeddings differ, which unties them."""

GROUP = 8
"""Similarities that are looked at together when the largest few are sought."""


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings in the order of their classes, small classes first, made ready for comparison.

    Attributes:
        queries: (N, e), what is compared.
        references: (N or more, e), with what: the nearer, the larger is the inner product. What is beyond N is padding.
        first: (N,), where the class of each embedding begins, int64.
        end: (N,), where it ends, int64.
    """

    queries: Tensor
    references: Tensor
    first: Tensor
    end: Tensor

    @property
    def relevant(self) -> Tensor:
        """(N,), number of other members of each embedding's class, int64."""
        return self.end - self.first - 1

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor, distance: Distance, curvature: float) -> "Gallery":
        """Sort finite embeddings (N, d) by their labels (N,) and prepare them."""
        _, group, sizes = labels.unique(return_inverse=True, return_counts=True)
        key = sizes[group] * len(sizes) + group
        order = key.argsort(stable=True)
        queries, references = _as_inner_products(embeddings[order], distance, curvature)
        _, sizes = key[order].unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        return cls(queries, _padded(references), (ends - sizes).repeat_interleave(sizes), ends.repeat_interleave(sizes))

    def block_size(self, count: int) -> int:
        """How many queries fit into memory with their `count` nearest and the largest class."""
        row = len(self.queries) * self.queries.element_size() + 64 * (int(self.relevant.max()) + count)
        return max(1, BYTES_IN_MEMORY // row)

    def nearest(self, rows: Tensor, count: int, backend: Backend) -> tuple[Tensor, Tensor]:
        """Similarities of queries with all others of their class and with the nearest of other classes.

        Args:
            rows: (b,), which embeddings are the queries.
            count: How many neighbours matter, at least as many as the classes of `rows` have members less one.
            backend: Who searches.

        Returns:
            (b, p) similarities with the class, p the size of the largest class less one, and (b, n) with the nearest
            of the other classes, n = `count` where there are as many. Both from the nearest on, filled up with -inf;
            faiss leaves out what is not among the `count` nearest.
        """
        return self._by_faiss(rows, count) if backend == "faiss" else self._by_product(rows, count)

    def _by_product(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        similarities = (_padded(self.queries[rows]) @ self.references.T)[: len(rows)]
        similarities[:, len(self.queries) :] = -torch.inf
        # Columns of each row's own class; the query itself where the class has no further member.
        members = torch.arange(int(self.relevant[rows].max()) + 1, device=rows.device)
        columns = self.first[rows, None] + members
        columns = torch.where(columns < self.end[rows, None], columns, rows[:, None])
        same = similarities.gather(1, columns).masked_fill_(columns == rows[:, None], -torch.inf)
        similarities.scatter_(1, columns, -torch.inf)
        others = _largest(similarities, min(count, len(self.queries)))
        return same.sort(dim=1, descending=True).values[:, :-1], others

    def _by_faiss(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        import faiss

        # The query itself, and one more than matters, to see whether a tie goes on where the list ends.
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
    """Return the backend asked for where it can do the work, or else the faster one.

    Measured on an x86 server with 10,000 and 60,000 embeddings: from 128 numbers each on, and with few neighbours,
    faiss 1.15 is 1.2 to 1.6 times as fast as torch 2.15; otherwise there is no gain, or a loss.
    """
    device, dtype, (total, dim) = embeddings.device.type, embeddings.dtype, embeddings.shape
    possible = distance != "hyperbolic" and device == "cpu" and dtype != torch.float64
    installed = importlib.util.find_spec("faiss") is not None
    if backend is None:
        return "faiss" if possible and installed and dim >= 128 and total >= max(10_000, 100 * count) else "torch"
    if backend == "torch":
        return "torch"
    if backend != "faiss":
        raise ValueError(f"no backend {backend!r}; there are torch, faiss, and None for the faster one.")
    if not possible:
        raise ValueError(
            "backend 'faiss' compares on the CPU, in float32, by cosine or Euclidean distance; got "
            f"{distance} distance and {dtype} on {device}. Take backend='torch'."
        )
    if not installed:
        raise ImportError("backend 'faiss' needs faiss: `pip install faiss-cpu`, or take backend='torch'.")
    return "faiss"


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % TILE))


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, (b, m) -> (b, count), from the largest on; m a multiple of `GROUP`."""
    if 4 * GROUP * count > values.shape[1]:
        return values.topk(count, dim=1).values
    # They are within the groups of the largest maxima, which are found much faster.
    groups = values.unflatten(1, (GROUP, -1))
    nearest = groups.amax(1).topk(count, dim=1, sorted=False).indices
    return groups.gather(2, nearest[:, None].expand(-1, GROUP, -1)).flatten(1).topk(count, dim=1).values


def _as_inner_products(embeddings: Tensor, distance: Distance, curvature: float) -> tuple[Tensor, Tensor]:
    """Two matrices (N, e) such that row q of the first is the nearer to n, the larger its product with row n."""
    if distance == "cosine":
        largest = embeddings.abs().amax(-1, keepdim=True)
        unit = F.normalize(embeddings / largest.clamp_min(torch.finfo(embeddings.dtype).tiny), dim=-1)
        return unit, unit
    if distance == "euclidean":
        # |q - n|^2 up to what is the same for all n; moved and scaled so that few digits cancel and none overflow.
        centred = embeddings - embeddings.mean(0)
        centred = centred / centred.abs().max().clamp_min(torch.finfo(embeddings.dtype).tiny)
        squares = centred.square().sum(-1, keepdim=True)
        return F.pad(centred, (0, 1), value=1.0), torch.cat([centred, -squares / 2], dim=1)
    # The distance is acosh(1 + 2 c |q - n|^2 / ((1 - c |q|^2) (1 - c |n|^2))) / sqrt(c), which grows with
    # |q - n|^2 / (1 - c |n|^2): the rest is the same for all n, and acosh near 1 would only lose digits. Near the
    # boundary of the ball points that are far apart have almost equal coordinates: float64.
    points = embeddings.double() * curvature**0.5
    squares = points.square().sum(-1, keepdim=True)
    if not (squares < 1).all():
        row = int((squares >= 1).squeeze(-1).nonzero()[0])
        raise ValueError(
            f"every point must lie in the ball of curvature -{curvature:g}, of radius {curvature**-0.5:g}; one has the "
            f"norm {float(squares[row].sqrt()) / curvature**0.5:g}. Project the points or take a smaller curvature."
        )
    weights = 1 / (1 - squares)
    ones = torch.ones_like(squares)
    return (
        torch.cat([2 * points, squares, ones], dim=1),
        torch.cat([points * weights, -weights, -squares * weights], dim=1),
    )
