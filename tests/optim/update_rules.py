"""The update rules as formulas: documentation, and the reference for tests of the optimizers.

Each rule is a function of the weights x, the gradient g, the moments m and v (zero before the first step) and the step
count t = 1, 2, ...; it returns the new weights and moments. `dims` are the axes that index the groups: [0] for each
filter before BatchNorm, [] for the entire tensor before LayerNorm. L2 weight decay is part of the gradient (g +
weight_decay * x), and `shrink` is 1 - lr * weight_decay for decoupled weight decay. The files of `optimizers/` compute
the same updates in fewer passes over memory.

Source: Roburin et al., "A spherical perspective on learning with normalization layers" (Neurocomputing 2022), section
5; Adam-G: Cho and Lee, "Riemannian approach to batch normalization" (NeurIPS 2017), algorithm 4.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Step = tuple[Tensor, Tensor, Tensor]


def inner(a: Tensor, b: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the inner product over each group, with the shape of `a` but 1 along all axes except `dims`."""
    within = [axis for axis in range(a.ndim) if axis not in dims]
    return (a * b).sum(within, keepdim=True) if within else a * b


def adam_s(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, dims: Sequence[int], lr: float,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, shrink: float = 1.0,
) -> Step:  # fmt: skip
    """Adam-S: one second moment per group, so that the step keeps the direction of the momentum."""
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * inner(g, g, dims)
    group_size = x.numel() / v.numel()
    step = group_size**0.5 * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return shrink * x - lr * step, m, v


def adam_srt(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, dims: Sequence[int], **options: Any) -> Step:
    """Adam-SRT: Adam-S, then the moments are rescaled and transported to the new weights y."""
    y, m, v = adam_s(x, g, m, v, t, dims, **options)
    v = v * inner(x, x, dims) / inner(y, y, dims)
    m = (inner(x, y, dims) * m - inner(m, y, dims) * x) / inner(y, y, dims)
    return y, m, v


def adam_g(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, dims: Sequence[int], lr: float, **options: Any) -> Step:
    """Adam-G: a step without the factor sqrt(D), a transported momentum, and weights of unit norm."""
    group_size = x.numel() / v.numel()
    y, m, v = adam_s(x, g, m, v, t, dims, lr=lr / group_size**0.5, **options)
    norms = (inner(x, x, dims) * inner(y, y, dims)).sqrt()
    m = (inner(x, y, dims) * m - inner(m, y, dims) * x) / norms
    return y / inner(y, y, dims).sqrt(), m, v


def sgd_mrt(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, dims: Sequence[int], lr: float,
    momentum: float = 0.9, dampening: float = 0.0, shrink: float = 1.0,
) -> Step:  # fmt: skip
    """SGD-MRT: SGD, then the momentum is rescaled and transported to the new weights y; v is not used."""
    m = momentum * m + (1 - dampening) * g
    y = shrink * x - lr * m
    m = (inner(x, y, dims) * m - inner(m, y, dims) * x) / inner(y, y, dims)
    return y, m, v
