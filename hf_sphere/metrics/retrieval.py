"""Retrieval metrics of embeddings, Recall@k, R-precision and MAP@R, and the nearest neighbors that they compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, check_labels, to_floating
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.checks import check_choice, check_integer, check_number, check_seed
from hf_sphere.utils.modules import full_precision

Distance = Literal["cosine", "euclidean", "hyperbolic"]

BYTES_IN_MEMORY = 2**28
"""Approximate memory of a block of queries."""

TILE = 64
"""Rows and columns of matrix products are padded to a multiple of this. Otherwise results at the edges may differ in
the last digits for equal embeddings, which breaks ties."""

GROUP = 8
"""Number of similarities per group in the search for the largest ones."""


@torch.no_grad()
def retrieval_scores(
    embeddings: Tensor,
    labels: Tensor,
    *,
    distance: Distance = "cosine",
    ks: Sequence[int] = (1,),
    curvature: float = 1e-5,
) -> dict[str, float]:
    """Compute retrieval metrics with each embedding as a query among all others.

    The metrics are from Musgrave, Belongie, Lim, "A Metric Learning Reality Check", ECCV 2020. Let R be the number
    of other members of a query's class. R-precision is the precision among the R nearest neighbors. MAP@R is the mean
    over j = 1..R of the precision among the j nearest neighbors if the j-th is of the class, and of 0 if it is not.
    Recall@k is the fraction of queries with at least one member of their class among the k nearest neighbors. An
    embedding that is the only one of its class is not a query, but still a reference for the others.

    Ties count against the query: of two neighbors at the same distance, the one of another class comes first. Collapsed
    embeddings therefore score 0, and the order of the embeddings does not matter.

    Distances to equal embeddings are equal; other equal distances may be ordered by rounding errors.

    The computation is on the device of the embeddings, in blocks, in float32, or in float64 for float64 embeddings and
    for the hyperbolic distance.

    Args:
        embeddings: (N, d), finite, of any real dtype; N and d at least 1. A tensor, an array or lists.
        labels: (N,), class of each embedding; any integers.
        distance: `cosine` (0 between a zero vector and any other), `euclidean`, or `hyperbolic`, in the Poincare ball
            of radius 1 / sqrt(curvature).
        ks: Values of k for Recall@k.
        curvature: c > 0 for the curvature -c of the hyperbolic distance.

    Returns:
        `recall_at_<k>` for each k, `r_precision` and `map_at_r`, in [0, 1], higher is better: means over `num_queries`
        queries. `num_excluded` embeddings are not queries.

    Raises:
        TypeError: If the embeddings are complex, or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is not finite or outside the ball, no class has two members, `ks`
            or `curvature` is not positive, or the distance is unknown.

    Example:
        >>> retrieval_scores(torch.eye(4)[labels], labels)["recall_at_1"]
        1.0
    """
    rows, scores = score_queries(embeddings, labels, distance=distance, ks=ks, curvature=curvature)
    means = {name: float(values.double().mean()) for name, values in scores.items()}
    return {**means, "num_queries": len(rows), "num_excluded": len(labels) - len(rows)}


@torch.no_grad()
def score_queries(
    embeddings: Tensor,
    labels: Tensor,
    *,
    distance: Distance = "cosine",
    ks: Sequence[int] = (1,),
    curvature: float = 1e-5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the index of each query, (Q,) on the CPU, and its scores, (Q,) each; see `retrieval_scores`.

    Example:
        >>> rows, scores = score_queries(embeddings, labels)
        >>> len(rows), scores.keys()
        (60, dict_keys(['recall_at_1', 'r_precision', 'map_at_r']))
    """
    check_choice("distance", distance, get_args(Distance))
    ks = [check_integer("each of ks", k, 1) for k in ks]
    check_number("curvature", curvature, "(0, inf)")
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    device = embeddings.device
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    with full_precision(device.type):
        gallery = Gallery.of(embeddings, labels.to(device), distance, curvature)
        excluded = int((gallery.relevant == 0).sum())
        if excluded == len(labels):
            raise ValueError(f"none of the {excluded} classes has two members, so there are no queries.")
        most = int(gallery.relevant.max())  # of the largest class
        row_bytes = len(labels) * gallery.queries.element_size() + 64 * (most + max([most, *ks]))
        rows = torch.arange(excluded, len(labels), device=device)
        blocks = rows.split(max(1, BYTES_IN_MEMORY // row_bytes))
        scores = torch.cat([gallery.scores(block, ks) for block in blocks])
    names = [*(f"recall_at_{k}" for k in ks), "r_precision", "map_at_r"]
    return gallery.order[rows].cpu(), dict(zip(names, scores.unbind(1), strict=True))


@torch.no_grad()
def sampled_retrieval_scores(
    directions: Tensor,
    concentration: Tensor,
    labels: Tensor,
    *,
    num_samples: int = 10,
    seed: int = 0,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Compute retrieval metrics of samples from embeddings that are von Mises-Fisher distributions.

    Scott, Gallagher, Mozer, "von Mises-Fisher Loss: An Exploration of Embedding Geometries for Supervised Learning",
    ICCV 2021. Samples are generated on the CPU, so they are the same for every device; the global random state does not
    change.

    Args:
        directions: (N, d), mean directions, of any nonzero norms. A tensor, an array or lists, as for all inputs.
        concentration: (N,), concentration of each distribution, at least 0.
        labels: (N,), class of each embedding; any integers.
        num_samples: Number of samples from each distribution.
        seed: Seed of the samples.
        **options: Options of `retrieval_scores`.

    Returns:
        For each score of `retrieval_scores` its `mean` over the samples, and the ends `low` and `high` of the interval
        around the median with 95 % of them.

    Raises:
        ValueError: If `num_samples` is not positive, a direction or a concentration is not valid, and for the same
            reasons as `retrieval_scores`.

    Example:
        >>> sampled_retrieval_scores(torch.eye(3)[labels], torch.full((60,), 10.0), labels).keys()
        dict_keys(['recall_at_1', 'r_precision', 'map_at_r'])
    """
    from hf_sphere.distributions import VonMisesFisher  # of which the search needs none

    check_integer("num_samples", num_samples, 1)
    directions = check_embeddings(directions, what="directions")
    concentration = to_floating("concentration", concentration)
    dtype = torch.promote_types(torch.promote_types(directions.dtype, concentration.dtype), torch.float32)
    # Explicit, since compiling a model disables the validation of distributions for the entire process.
    axes = F.normalize(directions.to("cpu", dtype), dim=-1)
    points = VonMisesFisher(axes, concentration.to("cpu", dtype), validate_args=True)
    generator = torch.Generator().manual_seed(check_seed(seed))
    samples = (points.rsample(generator=generator).to(directions.device) for _ in range(num_samples))
    runs = [retrieval_scores(sample, labels, **options) for sample in samples]
    tail, results = 0.025, {}
    for name in [name for name in runs[0] if not name.startswith("num_")]:
        values = torch.tensor([run[name] for run in runs], dtype=torch.float64)
        low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        results[name] = {"mean": float(values.mean()), "low": low, "high": high}
    return results


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
            # |q - n|^2 up to a term that is the same for all n; centered and scaled against cancellation and overflow.
            # Medians and powers of two keep small integers exact.
            points = embeddings[order]
            points = points * _power_of_two(points.abs().max())
            centered = points - points.median(0).values
            centered = centered * _power_of_two(centered.abs().max())
            squares = centered.square().sum(-1, keepdim=True)
            queries, references = F.pad(centered, (0, 1), value=1.0), torch.cat([centered, -squares / 2], dim=1)
        else:
            queries, references = (points[order] for points in for_hyperbolic_distances(embeddings, curvature))
        _, sizes = key[order].unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        return cls(queries, padded(references), ends - sizes.repeat_interleave(sizes), ends, order)

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

    def scores(self, rows: Tensor, ks: Sequence[int]) -> Tensor:
        """Return the scores of queries (b,): (b, len(ks) + 2), float32 on the CPU."""
        relevant = self.relevant[rows, None]
        same, others = self.nearest(rows, max([int(relevant.max()), *ks]))
        # The j-th member ranks behind j - 1 members and all embeddings of other classes that are not farther away.
        order = torch.arange(1, same.shape[1] + 1, device=rows.device)
        rank = order + torch.searchsorted(-others, -same, right=True)
        is_hit = rank <= relevant
        scores = [rank[:, 0] <= k for k in ks]
        scores += [is_hit.sum(1) / relevant[:, 0], (is_hit * order / rank).sum(1) / relevant[:, 0]]
        return torch.stack([score.float() for score in scores], dim=1).cpu()


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
