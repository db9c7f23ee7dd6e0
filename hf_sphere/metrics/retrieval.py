"""Retrieval metrics of embeddings: Recall@k, R-precision and MAP@R."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry.checks import check_embeddings, check_labels, to_floating
from hf_sphere.metrics.neighbors import Distance, Gallery
from hf_sphere.utils.checks import check_choice, check_integer, check_number, check_seed


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
    with _full_precision(device):
        gallery = Gallery.of(embeddings, labels.to(device), distance, curvature)
        excluded = int((gallery.relevant == 0).sum())
        if excluded == len(labels):
            raise ValueError(f"none of the {excluded} classes has two members, so there are no queries.")
        count = max([int(gallery.relevant.max()), *ks])
        rows = torch.arange(excluded, len(labels), device=device)
        blocks = rows.split(gallery.block_size(count))
        scores = torch.cat([_scores(gallery, block, ks) for block in blocks])
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
    interval: float = 0.95,
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
        interval: Fraction of the samples' scores inside the interval.
        **options: Options of `retrieval_scores`.

    Returns:
        For each score of `retrieval_scores` its `mean` over the samples, and the ends `low` and `high` of the interval
        around the median.

    Raises:
        ValueError: If `num_samples` is not positive, `interval` is not in (0, 1), a direction or a concentration is
            not valid, and for the same reasons as `retrieval_scores`.

    Example:
        >>> sampled_retrieval_scores(torch.eye(3)[labels], torch.full((60,), 10.0), labels).keys()
        dict_keys(['recall_at_1', 'r_precision', 'map_at_r'])
    """
    check_integer("num_samples", num_samples, 1)
    check_number("interval", interval, "(0, 1)")
    directions = check_embeddings(directions)
    concentration = to_floating("concentration", concentration)
    dtype = torch.promote_types(torch.promote_types(directions.dtype, concentration.dtype), torch.float32)
    # Explicit, since compiling a model disables the validation of distributions for the entire process.
    axes = F.normalize(directions.to("cpu", dtype), dim=-1)
    points = VonMisesFisher(axes, concentration.to("cpu", dtype), validate_args=True)
    generator = torch.Generator().manual_seed(check_seed(seed))
    samples = (points.rsample(generator=generator).to(directions.device) for _ in range(num_samples))
    runs = [retrieval_scores(sample, labels, **options) for sample in samples]
    tail = (1 - interval) / 2
    results = {}
    for name in [name for name in runs[0] if not name.startswith("num_")]:
        values = torch.tensor([run[name] for run in runs], dtype=torch.float64)
        low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        results[name] = {"mean": float(values.mean()), "low": low, "high": high}
    return results


def _scores(gallery: Gallery, rows: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the scores of queries (b,): (b, len(ks) + 2), float32 on the CPU."""
    relevant = gallery.relevant[rows, None]
    count = max([int(relevant.max()), *ks])
    same, others = gallery.nearest(rows, count)
    # The j-th member ranks behind j - 1 members and all embeddings of other classes that are not farther away.
    order = torch.arange(1, same.shape[1] + 1, device=rows.device)
    rank = order + torch.searchsorted(-others, -same, right=True)
    is_hit = rank <= relevant
    scores = [rank[:, 0] <= k for k in ks]
    scores += [is_hit.sum(1) / relevant[:, 0], (is_hit * order / rank).sum(1) / relevant[:, 0]]
    return torch.stack([score.float() for score in scores], dim=1).cpu()


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in full float32, regardless of the precision allowed for training."""
    backends: Any = torch.backends
    products = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision
