"""How well embeddings find others of their class."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.metrics.neighbours import Backend, Distance, Gallery, choose_backend


@torch.no_grad()
def retrieval_scores(
    embeddings: Tensor,
    labels: Tensor,
    *,
    distance: Distance = "cosine",
    ks: Sequence[int] = (1,),
    curvature: float = 1e-5,
    device: torch.device | str | None = None,
    backend: Backend | None = None,
    block_size: int | None = None,
) -> dict[str, float]:
    """Search each embedding's class among all other embeddings.

    The measures of Musgrave, Belongie, Lim, "A Metric Learning Reality Check", ECCV 2020. With R the number of other
    members of a query's class, R-precision is the share of the class among the R nearest, and MAP@R the mean over
    j = 1..R of the precision among the j nearest where the j-th is of the class, and 0 where it is not. Recall@k is the
    share of queries with one of their class or more among the k nearest. A query whose class has no other member
    cannot succeed: it is left out of the means, but others may find it.

    A tie counts against the query: of two that are equally near, the one of another class comes first. So equal
    embeddings are worth nothing, and the order of the embeddings does not matter.

    Computed block by block in float32, or in float64 where the embeddings are and for the hyperbolic distance.

    Args:
        embeddings: (N, d), finite, of any real dtype; N and d at least 1. A tensor, an array or lists.
        labels: (N,), class of each embedding; any integers.
        distance: `cosine`, where a zero vector has the cosine 0 with every other, `euclidean`, or `hyperbolic`: in the
            Poincare ball of radius 1 / sqrt(curvature).
        ks: For which k to give Recall@k.
        curvature: With the hyperbolic distance, c > 0 for the curvature -c.
        device: Where to compute; by default where the embeddings are.
        backend: `torch`; `faiss`, on the CPU and not for the hyperbolic distance; by default the faster one, of those
            installed. Their results are the same but for rounding.
        block_size: Queries to compare at a time; by default as many as take some 256 MiB. Has no effect on the result.

    Returns:
        `recall_at_<k>` for each k, `r_precision` and `map_at_r`, in [0, 1], higher is better; `num_queries`, over which
        they are the means, and `num_excluded`, left out.

    Raises:
        TypeError: If the embeddings are complex, the labels are not integers or `ks` is no sequence.
        ValueError: If a shape is wrong, an embedding is not finite or lies outside of the ball, no class has two
            members, `ks`, `curvature` or `block_size` are not positive, there is no such distance or backend, or faiss
            cannot do it.
        ImportError: If `backend` is `faiss` and it is not installed.
    """
    if distance not in get_args(Distance):
        raise ValueError(f"no distance {distance!r}; there are {', '.join(get_args(Distance))}.")
    if not isinstance(ks, Sequence):
        raise TypeError(f"ks must be a sequence of integers, for instance (1, 5); got {ks!r}.")
    if any(not isinstance(k, int) or k < 1 for k in ks):
        raise ValueError(f"ks must be integers of at least 1; got {list(ks)}.")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be at least 1, or None for what fits into memory; got {block_size}.")
    if not (curvature > 0 and math.isfinite(curvature)):
        raise ValueError(f"curvature must be finite and positive, c for the curvature -c; got {curvature}.")
    embeddings, labels = _check_data(embeddings, labels)
    device = embeddings.device if device is None else torch.device(device)
    embeddings = embeddings.to(device, torch.promote_types(embeddings.dtype, torch.float32))
    with _full_precision(device):
        gallery = Gallery.of(embeddings, labels.to(device), distance, curvature)
        excluded = int((gallery.relevant == 0).sum())
        if excluded == len(labels):
            raise ValueError(f"none of the {excluded} classes has two members, so there is nothing to find.")
        count = max([int(gallery.relevant.max()), *ks])
        backend = choose_backend(backend, distance, embeddings, count)
        rows = torch.arange(excluded, len(labels), device=device)
        blocks = rows.split(block_size or gallery.block_size(count))
        scores = torch.cat([_scores(gallery, block, ks, backend) for block in blocks])
    names = [*(f"recall_at_{k}" for k in ks), "r_precision", "map_at_r"]
    means = dict(zip(names, scores.double().mean(0).tolist(), strict=True))
    return {**means, "num_queries": len(rows), "num_excluded": excluded}


@torch.no_grad()
def sampled_retrieval_scores(
    directions: Tensor,
    concentration: Tensor,
    labels: Tensor,
    *,
    num_samples: int = 10,
    seed: int = 0,
    interval: float = 0.95,
    device: torch.device | str | None = None,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Retrieval with embeddings that are von Mises-Fisher distributions: scores of samples of them.

    Scott, Gallagher, Mozer, "von Mises-Fisher Loss: An Exploration of Embedding Geometries for Supervised Learning",
    ICCV 2021. The samples are drawn on the CPU by a generator of their own: they are the same on every device, and the
    global generators stay as they are.

    Args:
        directions: (N, d), mean directions; of any norms but zero. A tensor, an array or lists, as all others.
        concentration: (N,), how far each point is concentrated around its direction, positive.
        labels: (N,), class of each embedding; any integers.
        num_samples: How many times to draw all points.
        seed: Of the samples.
        interval: Share of the samples' scores that the interval holds.
        device: Where to compute the scores; by default where the directions are.
        **options: Of `retrieval_scores`.

    Returns:
        For each score of `retrieval_scores` its `mean` over the samples and the ends of the interval around the median,
        `low` and `high`.

    Raises:
        ValueError: If `num_samples` is not positive, `interval` is not in (0, 1), the concentrations are not (N,) or
            not valid, and as `retrieval_scores` does.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1; got {num_samples}.")
    if not 0 < interval < 1:
        raise ValueError(f"interval must be in (0, 1), for instance 0.95; got {interval}.")
    directions, labels = _check_data(directions, labels)
    concentration = torch.as_tensor(concentration)
    if concentration.shape != labels.shape:
        raise ValueError(f"concentration must have the shape {tuple(labels.shape)}; got {tuple(concentration.shape)}.")
    if not directions.any(-1).all():
        raise ValueError("every direction must be other than zero; got zero vectors. Remove them.")
    device = directions.device if device is None else device
    dtype = torch.promote_types(directions.dtype, torch.float32)
    # Compiling a model turns validation off by default, for the whole process.
    axes = F.normalize(directions.to("cpu", dtype), dim=-1)
    points = VonMisesFisher(axes, concentration.to("cpu", dtype), validate_args=True)
    generator = torch.Generator().manual_seed(seed)
    runs = [
        retrieval_scores(points.rsample(generator=generator), labels, device=device, **options)
        for _ in range(num_samples)
    ]
    tail = (1 - interval) / 2
    results = {}
    for name in [name for name in runs[0] if not name.startswith("num_")]:
        values = torch.tensor([run[name] for run in runs], dtype=torch.float64)
        low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        results[name] = {"mean": float(values.mean()), "low": low, "high": high}
    return results


def _scores(gallery: Gallery, rows: Tensor, ks: Sequence[int], backend: Backend) -> Tensor:
    """Scores of queries (b,), (b, len(ks) + 2), float32 on the CPU."""
    relevant = gallery.relevant[rows, None]
    count = max([int(relevant.max()), *ks])
    same, others = gallery.nearest(rows, count, backend)
    # The j-th of the class has j - 1 of the class and all others that are as near or nearer before it.
    place = torch.arange(1, same.shape[1] + 1, device=rows.device)
    rank = place + torch.searchsorted(-others, -same, right=True)
    found = rank <= relevant
    scores = [rank[:, 0] <= k for k in ks]
    scores += [found.sum(1) / relevant[:, 0], (found * place / rank).sum(1) / relevant[:, 0]]
    return torch.stack([score.float() for score in scores], dim=1).cpu()


def _check_data(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    embeddings, labels = torch.as_tensor(embeddings), torch.as_tensor(labels)
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"embeddings must have the shape (N, d) with N >= 1 and d >= 1; got {tuple(embeddings.shape)}."
        )
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"labels must have the shape ({len(embeddings)},), one an embedding; got {tuple(labels.shape)}."
        )
    if embeddings.is_complex():
        raise TypeError(f"embeddings must be real; got {embeddings.dtype}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers; got {labels.dtype}. Convert them with .long().")
    finite = embeddings.isfinite().all(-1)
    if not finite.all():
        raise ValueError(
            f"every embedding must be finite; {int((~finite).sum())} of {len(finite)} are not, the first is number "
            f"{int((~finite).nonzero()[0])}."
        )
    return embeddings, labels


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products of matrices in full float32, whatever was allowed for training."""
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
