r"""The modified Bessel functions of the von Mises-Fisher distribution, in any dimension and at any concentration.

Everything follows from two functions of the concentration kappa in d dimensions, with nu = d/2 - 1:

- the growth `G = log(Gamma(nu + 1) (2 / kappa)^nu I_nu(kappa))`, which is `log C_d(0) - log C_d(kappa)`, and
- its derivative, the mean resultant length `A_d = I_{nu+1}(kappa) / I_nu(kappa)`.

At large orders both come from Debye's uniform expansion, whose leading term is written without cancellation; small
orders are reached from a large one by the ratios `r_n = I_{n+1} / I_n = kappa / (2 (n + 1) + kappa r_{n+1})`, a
recurrence that damps errors. There is no branch on the data, so that the functions compile, and no power of a
Bessel function itself, so that nothing overflows.

Reference:
    NIST Digital Library of Mathematical Functions, 10.41.3 and 10.41.9 (uniform expansion), 10.29.1 (recurrence).
"""

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.geometry.autograd import differentiable_once
from hf_sphere.geometry.debye import series_for


def log_vmf_normalizer(concentration: Tensor, dim: int) -> Tensor:
    r"""Logarithm of the normalising constant of the von Mises-Fisher distribution on the sphere in `dim` dimensions.

    `C_d(kappa) = kappa^(d/2-1) / ((2 pi)^(d/2) I_{d/2-1}(kappa))`, so that the density `C_d(kappa) exp(kappa mu.x)`
    integrates to one. Its derivative is minus the mean resultant length. Twice differentiable.

    Args:
        concentration: kappa, from 0 to 1e8, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.

    Returns:
        log C_d(kappa) in nats, in the shape and dtype of `concentration`. In float64 the error is below 1e-12 of the
        largest of 1, d and kappa.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` is not of a floating dtype.
    """
    wide = _check(concentration, dim)
    return (log_uniform_density(dim) - _Growth.apply(wide, dim)).to(concentration.dtype)


def log_vmf_growth(concentration: Tensor, dim: int) -> Tensor:
    """Logarithm of the mean of exp(kappa mu.x) over the sphere, `log C_d(0) - log C_d(kappa)`. Twice differentiable.

    For differences and divergences, from which the area of the sphere cancels.

    Args:
        concentration: kappa, from 0 to 1e8, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.
    """
    return _Growth.apply(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length(concentration: Tensor, dim: int) -> Tensor:
    """Length of the mean of a von Mises-Fisher distribution: `A_d(kappa) = I_{d/2}(kappa) / I_{d/2-1}(kappa)`.

    It grows from 0 (uniform) to 1 (a point). Twice differentiable.

    Args:
        concentration: kappa, from 0 to 1e8, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.

    Returns:
        A_d(kappa) in [0, 1], in the shape and dtype of `concentration`.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` is not of a floating dtype.
    """
    return _Length.apply(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length_slope(concentration: Tensor, dim: int) -> Tensor:
    """Derivative of the mean resultant length by the concentration: the variance of mu.x, free of cancellation.

    Equal to `1 - A^2 - (d - 1) A / kappa`, whose terms cancel where the concentration is large.

    Args:
        concentration: kappa, from 0 to 1e8, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.

    Returns:
        A_d'(kappa) in (0, 1/d], in the shape and dtype of `concentration`.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` is not of a floating dtype.
    """
    return _slope(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length_complement(concentration: Tensor, dim: int) -> Tensor:
    """Return `1 - A_d(kappa)`, accurate also where A is close to 1. Twice differentiable.

    Args:
        concentration: kappa, from 0 to 1e8, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` is not of a floating dtype.
    """
    return _Complement.apply(_check(concentration, dim), dim).to(concentration.dtype)


def means_from_natural_parameters(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Means of the von Mises-Fisher distributions with these directions times concentrations, smooth also at 0.

    A mean is the gradient of the growth; its own derivative is the covariance of the distribution. Differentiable once.

    Args:
        *vectors: eta = kappa mu, each (N, d), all of one d, float32 or float64.

    Returns:
        A_d(|eta|) eta / |eta| for each, (N, d).
    """
    return _Means.apply(*vectors)


def concentration_from_mean_resultant_length(length: Tensor, dim: int) -> Tensor:
    """Invert `mean_resultant_length`: the maximum-likelihood concentration of points whose mean has this length.

    Args:
        length: Between 0 and 1, any shape, of a floating dtype. Computed in float32 or better.
        dim: Number of coordinates d, at least 2.

    Returns:
        kappa, in the shape and dtype of `length`; infinite for a length of 1, NaN outside of 0 to 1. As lengths
        come close to 1 their own rounding error decides: kappa is as sure as 1 - length is.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `length` is not of a floating dtype.

    Reference:
        Starting value of Banerjee, Dhillon, Ghosh and Sra, "Clustering on the unit hypersphere using von Mises-Fisher
        distributions", JMLR 2005, equation 4.4; Newton's method from there as in Sra, "A short note on parameter
        approximation for von Mises-Fisher distributions", Computational Statistics 2012.
    """
    return _Concentration.apply(_check(length, dim), dim).to(length.dtype)


def log_uniform_density(dim: int) -> float:
    """Logarithm of one over the area of the unit sphere in `dim` dimensions: log C_d(0)."""
    _check_dim(dim)
    return math.lgamma(dim / 2) - math.log(2.0) - dim / 2 * math.log(math.pi)


class GrowthAndRatio(NamedTuple):
    """The growth, and A_d(kappa) / kappa, which is twice its derivative by kappa^2."""

    growth: Tensor
    ratio: Tensor


def growth_and_ratio(square: Tensor, dim: int) -> GrowthAndRatio:
    """Growth `log C_d(0) - log C_d(kappa)` and `A_d(kappa) / kappa` of the squared concentration, both smooth at 0.

    Without autograd's help: a loss that needs these for millions of values brings its own gradient.
    """
    series = series_for(dim / 2 - 1, square.dtype)
    inverse_root = (square + series.order**2).rsqrt_()
    growth, ratio = series.growth_and_ratio(square, inverse_root)
    for step in range(series.steps):
        order = series.order - step
        factor = square * ratio
        growth = growth + (factor / (2 * order)).log1p_()
        ratio = (factor + 2 * order).reciprocal_()
    return GrowthAndRatio(growth, ratio)


def _check_dim(dim: int) -> None:
    try:
        enough = operator.index(dim) >= 2
    except TypeError:
        enough = False
    if not enough:
        raise ValueError(f"a sphere needs a whole number of at least 2 dimensions; got {dim}.")


def _check(values: Tensor, dim: int) -> Tensor:
    """Return the values in float32 or better."""
    _check_dim(dim)
    if not values.is_floating_point():
        raise TypeError(f"expected values of a floating dtype; got {values.dtype}.")
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _ratio(square: Tensor, dim: int) -> Tensor:
    """A / kappa from kappa^2."""
    series = series_for(dim / 2 - 1, square.dtype)
    ratio = series.ratio((square + series.order**2).sqrt())
    for step in range(series.steps):
        ratio = 1 / (2 * (series.order - step) + square * ratio)
    return ratio


def _slope(concentration: Tensor, dim: int) -> Tensor:
    """A', by differentiating the recurrence of the ratios itself."""
    series = series_for(dim / 2 - 1, concentration.dtype)
    square = concentration.square()
    root = (square + series.order**2).sqrt()
    ratio, slope = series.ratio(root), series.slope(root)
    for step in range(series.steps):
        order = series.order - step
        ratio = 1 / (2 * order + square * ratio)
        slope = (2 * order - square * slope) * ratio.square()
    return slope


class _OfOneNumber(torch.autograd.Function):
    """A function of one number a distribution and of the dimension; its derivative is made from the number again."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.dim = inputs[1]


class _Growth(_OfOneNumber):
    """log C_d(0) - log C_d(kappa)."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        return growth_and_ratio(concentration.square(), dim).growth

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * _Length.apply(*ctx.saved_tensors, ctx.dim), None


class _Length(_OfOneNumber):
    """A_d(kappa)."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        ratio = _ratio(concentration.square(), dim)
        return (concentration * ratio).clamp(max=1.0)  # rounding must not make a mean longer than 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return gradient * _slope(concentration, ctx.dim), None


class _Means(torch.autograd.Function):
    """The means as functions of the natural parameters, which share the evaluation of the series."""

    @staticmethod
    def forward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        squares = torch.cat([part.square().sum(-1) for part in vectors])
        ratio = _ratio(squares, vectors[0].shape[-1])
        ctx.save_for_backward(squares, ratio, *vectors)
        ctx.sizes = [len(part) for part in vectors]
        parts = zip(ratio.split(ctx.sizes), vectors, strict=True)
        return tuple(share[:, None] * part for share, part in parts)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # The covariance: the slope A' along the direction, A / kappa across it.
        squares, ratio, *vectors = ctx.saved_tensors
        excess = _slope(squares.sqrt(), vectors[0].shape[-1]) - ratio
        excess = excess / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        parts = zip(gradients, vectors, ratio.split(ctx.sizes), excess.split(ctx.sizes), strict=True)
        return tuple(
            torch.addcmul(gradient * share[:, None], ((gradient * part).sum(-1) * more)[:, None], part)
            for gradient, part, share, more in parts
        )


class _Complement(_OfOneNumber):
    """1 - A_d(kappa), by the recurrence of the ratios' complements."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        series = series_for(dim / 2 - 1, concentration.dtype)
        rest = series.complement(concentration, (concentration.square() + series.order**2).sqrt())
        for step in range(series.steps):
            order = series.order - step
            rest = (2 * order - concentration * rest) / (2 * order + concentration * (1 - rest))
        return rest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return -gradient * _slope(concentration, ctx.dim), None


class _Concentration(_OfOneNumber):
    """The inverse of A_d."""

    @staticmethod
    def forward(length: Tensor, dim: int) -> Tensor:
        concentration = length * (dim - length.square()) / ((1 - length) * (1 + length))
        for _ in range(5 if length.dtype == torch.float64 else 3):
            # A Newton step of the logarithm, for which the function is tame at both ends. Close to 1 the complements
            # are compared. A length of 1 has an infinite start, which stays.
            value = concentration.clamp(1e-30, torch.finfo(length.dtype).max ** 0.25)
            above = torch.where(
                length < 0.5, _Length.apply(value, dim) - length, (1 - length) - _Complement.apply(value, dim)
            )
            step = concentration * (-above / (value * _slope(value, dim))).exp()
            concentration = torch.where(concentration.isinf(), concentration, step)
        return torch.where((length >= 0) & (length <= 1), concentration, torch.nan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The concentration is made anew, so that the second derivative knows how it depends on the length.
        concentration = _Concentration.apply(*ctx.saved_tensors, ctx.dim)
        return gradient / _slope(concentration, ctx.dim), None
