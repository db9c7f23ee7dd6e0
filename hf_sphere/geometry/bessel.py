r"""The modified Bessel functions of the von Mises-Fisher distribution, in any dimension and at any concentration.

Everything follows from two functions of the concentration kappa in d dimensions, with nu = d/2 - 1:

- the log-partition function `G = log(Gamma(nu + 1) (2 / kappa)^nu I_nu(kappa)) = log C_d(0) - log C_d(kappa)`, and
- its derivative, the mean resultant length `A_d = I_{nu+1}(kappa) / I_nu(kappa)`.

At large orders both are evaluated by Debye's uniform expansion, whose leading term is in a form without cancellation.
Small orders are reached by backward recurrence of the ratios `r_n = I_{n+1} / I_n = kappa / (2 (n + 1) + kappa
r_{n+1})`, which damps errors of the ratios. Their complements and slopes at concentrations far above a small dimension
are given by Hankel's expansion. No branch depends on the data, so the functions can be compiled. The Bessel functions
themselves are never computed, so nothing overflows; concentrations whose squares would are reduced, see `bounded`.

Reference:
    NIST Digital Library of Mathematical Functions, 10.41.3 and 10.41.9 (uniform expansion), 10.29.1 (recurrence).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_floating, check_integer
from hf_sphere.geometry.coordinates import is_readable
from hf_sphere.geometry.decorators import differentiable_once
from hf_sphere.geometry.expansions import far_complement, far_derivative, is_far, series_for


def log_vmf_normalizer(concentration: Tensor, dim: int) -> Tensor:
    r"""Logarithm of the normalizing constant of the von Mises-Fisher distribution in `dim` dimensions.

    `C_d(kappa) = kappa^(d/2-1) / ((2 pi)^(d/2) I_{d/2-1}(kappa))`, so that the density `C_d(kappa) exp(kappa mu.x)`
    integrates to one. Its derivative is the negative mean resultant length. Twice differentiable.

    Args:
        concentration: Concentration kappa, at least 0 and finite, of any shape and floating-point dtype.
        dim: Number of coordinates d, at least 2.

    Returns:
        log C_d(kappa) in nats, with the shape and dtype of `concentration`; computed in at least float32. In float64
        the absolute error is below 1e-12 max(1, d, kappa).

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` does not have a floating-point dtype.

    Example:
        >>> log_vmf_normalizer(torch.tensor([0.0, 1e5]), dim=3)
        tensor([-2.5310e+00, -9.9990e+04])
    """
    wide = _check(concentration, dim)
    return (log_uniform_density(dim) - _LogPartition.apply(wide, dim)).to(concentration.dtype)


def log_vmf_partition(concentration: Tensor, dim: int) -> Tensor:
    """Log-partition function with respect to the uniform distribution, `log C_d(0) - log C_d(kappa)`.

    This is the logarithm of the mean of exp(kappa mu.x) over the sphere. Divergences are differences of it, in which
    the area of the sphere cancels. Twice differentiable. Arguments are those of `log_vmf_normalizer`.
    """
    return _LogPartition.apply(_check(concentration, dim), dim).to(concentration.dtype)


def log_vmf_peak(concentration: Tensor, dim: int) -> Tensor:
    """Logarithm of the ratio of the density at the mode to the uniform density, `log C_d(kappa) + kappa - log C_d(0)`.

    It grows like `(d - 1) / 2 log kappa`, and is evaluated without the cancellation of that sum. Its derivative is the
    complement of the mean resultant length. Twice differentiable. Arguments are those of `log_vmf_normalizer`.
    """
    return _LogPeak.apply(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length(concentration: Tensor, dim: int) -> Tensor:
    """Norm of the mean of a von Mises-Fisher distribution, `A_d(kappa) = I_{d/2}(kappa) / I_{d/2-1}(kappa)`.

    It increases from 0 (uniform distribution) to 1 (point mass). Twice differentiable.

    Args:
        concentration: Concentration kappa, at least 0 and finite, of any shape and floating-point dtype.
        dim: Number of coordinates d, at least 2.

    Returns:
        A_d(kappa) in [0, 1], with the shape and dtype of `concentration`.

    Raises:
        ValueError: If `dim` is below 2.
        TypeError: If `concentration` does not have a floating-point dtype.

    Example:
        >>> mean_resultant_length(torch.tensor(10.0), dim=3)
        tensor(0.9000)
    """
    return _Length.apply(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length_derivative(concentration: Tensor, dim: int) -> Tensor:
    """Derivative of the mean resultant length with respect to the concentration, the variance of mu.x, in (0, 1/d].

    Equal to `1 - A^2 - (d - 1) A / kappa`, evaluated without the cancellation of that formula at large concentrations.
    Arguments and errors are those of `mean_resultant_length`.
    """
    return _derivative(_check(concentration, dim), dim).to(concentration.dtype)


def mean_resultant_length_complement(concentration: Tensor, dim: int) -> Tensor:
    """Complement `1 - A_d(kappa)`, also accurate where A is close to 1; see `mean_resultant_length`."""
    return _Complement.apply(_check(concentration, dim), dim).to(concentration.dtype)


def means_from_natural_parameters(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Means of von Mises-Fisher distributions as functions of their natural parameters, also smooth at 0.

    The mean is the gradient of the log-partition function, and its Jacobian is the covariance matrix. Once
    differentiable.

    Args:
        *vectors: Natural parameters eta = kappa mu, each (N, d) with the same d, float32 or float64.

    Returns:
        A_d(|eta|) eta / |eta| for each, (N, d).
    """
    return _Means.apply(*vectors)


def concentration_from_mean_resultant_length(length: Tensor, dim: int) -> Tensor:
    """Inverse of `mean_resultant_length`: the maximum-likelihood concentration of points whose mean has this norm.

    Args:
        length: Mean resultant length in [0, 1], of any shape and floating-point dtype.
        dim: Number of coordinates d, at least 2.

    Returns:
        kappa, with the shape and dtype of `length`; infinite for a length of 1. Its relative accuracy is that of
        1 - length, which rounding limits for lengths close to 1.

    Raises:
        ValueError: If `dim` is below 2 or a length outside [0, 1]; on a GPU, compiled and in vmap the result is NaN.
        TypeError: If `length` does not have a floating-point dtype.

    Reference:
        Initial value: Banerjee, Dhillon, Ghosh and Sra, "Clustering on the unit hypersphere using von Mises-Fisher
        distributions", JMLR 2005, equation 4.4. Newton iteration: Sra, "A short note on parameter
        approximation for von Mises-Fisher distributions", Computational Statistics 2012.

    Example:
        >>> concentration_from_mean_resultant_length(torch.tensor(0.9), dim=3).round()
        tensor(10.)
    """
    wide = _check(length, dim)
    if is_readable(length) and ((length < 0) | (length > 1)).any():
        raise ValueError(f"lengths must be in [0, 1]; got {length.min():g} to {length.max():g}.")
    return _Concentration.apply(wide, dim).to(length.dtype)


def log_uniform_density(dim: int) -> float:
    """Log-density log C_d(0) of the uniform distribution on the unit sphere in `dim` dimensions."""
    check_integer("dim", dim, 2)
    return math.lgamma(dim / 2) - math.log(2.0) - dim / 2 * math.log(math.pi)


class PartitionAndRatio(NamedTuple):
    """The log-partition function, and A_d(kappa) / kappa, which is twice its derivative with respect to kappa^2."""

    log_partition: Tensor
    ratio: Tensor


def partition_and_ratio(square: Tensor, dim: int) -> PartitionAndRatio:
    """Log-partition function and `A_d(kappa) / kappa` as functions of the squared concentration, both smooth at 0.

    Not differentiable by autograd; losses that evaluate millions of values implement their own gradients.
    """
    rise, decrease, ratio = _partition_terms(square, dim)
    return PartitionAndRatio(rise.sub_(decrease), ratio)


def bounded(concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Return concentrations whose squares do not overflow, and their ratios to the given ones.

    The ratios are 1, unless concentrations are so large that `1 - A` is inversely proportional to them.
    """
    largest = 0.25 * torch.finfo(concentration.dtype).max ** 0.5
    return concentration.clamp(max=largest), largest / concentration.clamp(min=largest)


def _check(values: Tensor, dim: int) -> Tensor:
    """Check the arguments and return the values in at least float32."""
    check_integer("dim", dim, 2)
    check_floating("the argument", values)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _partition_terms(square: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two terms whose difference is the log-partition function, and A / kappa; the first is s - m of the series."""
    series = series_for(dim / 2 - 1, square.dtype)
    inverse_root = (square + series.order**2).rsqrt_()
    rise, decrease, ratio = series.partition_and_ratio(square, inverse_root)
    for step in range(series.steps):
        order = series.order - step
        factor = square * ratio
        decrease = decrease - (factor / (2 * order)).log1p_()
        ratio = (factor + 2 * order).reciprocal_()
    return rise, decrease, ratio


def _ratio(square: Tensor, dim: int) -> Tensor:
    """A / kappa as a function of kappa^2."""
    series = series_for(dim / 2 - 1, square.dtype)
    ratio = series.ratio((square + series.order**2).sqrt())
    for step in range(series.steps):
        ratio = 1 / (2 * (series.order - step) + square * ratio)
    return ratio


def _derivative(concentration: Tensor, dim: int) -> Tensor:
    """A', by differentiating the recurrence of the ratios, which are computed from their complements."""
    series = series_for(dim / 2 - 1, concentration.dtype)
    concentration, shrinkage = bounded(concentration)
    square = concentration.square()
    root = (square + series.order**2).sqrt()
    complement, derivative = series.complement(concentration, root), series.derivative(root)
    for step in range(series.steps):
        order = series.order - step
        ratio = 1 / (2 * order + concentration * (1 - complement))
        complement = (2 * order - concentration * complement) * ratio
        derivative = (2 * order - square * derivative) * ratio.square()
    if series.steps:
        far = is_far(concentration, dim)
        derivative = torch.where(far, far_derivative(concentration, dim), derivative)
    return derivative * shrinkage.square()


class _ConcentrationFunction(torch.autograd.Function):
    """An elementwise function with the dimension as parameter; its derivative is recomputed from the input."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.dim = inputs[1]


class _LogPartition(_ConcentrationFunction):
    """log C_d(0) - log C_d(kappa)."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        finite, shrinkage = bounded(concentration)
        log_partition = partition_and_ratio(finite.square(), dim).log_partition
        return log_partition + (concentration - finite) + 0.5 * (dim - 1) * shrinkage.log()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * _Length.apply(*ctx.saved_tensors, ctx.dim), None


class _LogPeak(_ConcentrationFunction):
    """kappa - (log C_d(0) - log C_d(kappa))."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        finite, shrinkage = bounded(concentration)
        rise, decrease, _ = _partition_terms(finite.square(), dim)
        order = series_for(dim / 2 - 1, finite.dtype).order
        gap = order * ((finite + rise) / (finite + rise + order))  # kappa - rise
        return gap + decrease - 0.5 * (dim - 1) * shrinkage.log()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * _Complement.apply(*ctx.saved_tensors, ctx.dim), None


class _Length(_ConcentrationFunction):
    """A_d(kappa)."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        concentration, _ = bounded(concentration)
        return (concentration * _ratio(concentration.square(), dim)).clamp(max=1.0)  # rounding may exceed 1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return grad_output * _derivative(concentration, ctx.dim), None


class _Means(torch.autograd.Function):
    """The means of several batches, which share one evaluation of the series."""

    @staticmethod
    def forward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        squares = torch.cat([batch.square().sum(-1) for batch in vectors])
        ratio = _ratio(squares, vectors[0].shape[-1])
        ctx.save_for_backward(squares, ratio, *vectors)
        ctx.sizes = [batch.shape[0] for batch in vectors]  # `len` would fix the batch size of an exported program
        return tuple(r[:, None] * batch for r, batch in zip(ratio.split(ctx.sizes), vectors, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_means: Tensor) -> tuple[Tensor, ...]:
        # The covariance has the eigenvalue A' along the direction and r = A / kappa orthogonal to it, so that its
        # product with g is r g + (A' - r) <g, eta> eta / |eta|^2.
        squares, ratio, *vectors = ctx.saved_tensors
        excess = _derivative(squares.sqrt(), vectors[0].shape[-1]) - ratio
        excess = excess / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        batches = zip(grad_means, vectors, ratio.split(ctx.sizes), excess.split(ctx.sizes), strict=True)
        return tuple(
            torch.addcmul(grad * r[:, None], ((grad * batch).sum(-1) * more)[:, None], batch)
            for grad, batch, r, more in batches
        )


class _Complement(_ConcentrationFunction):
    """1 - A_d(kappa), by the recurrence of the complements of the ratios."""

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        series = series_for(dim / 2 - 1, concentration.dtype)
        concentration, shrinkage = bounded(concentration)
        complement = series.complement(concentration, (concentration.square() + series.order**2).sqrt())
        for step in range(series.steps):
            order = series.order - step
            complement = (2 * order - concentration * complement) / (2 * order + concentration * (1 - complement))
        if series.steps:
            complement = torch.where(is_far(concentration, dim), far_complement(concentration, dim), complement)
        return complement * shrinkage

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return -grad_output * _derivative(concentration, ctx.dim), None


class _Concentration(_ConcentrationFunction):
    """The inverse of A_d."""

    @staticmethod
    def forward(length: Tensor, dim: int) -> Tensor:
        concentration = length * (dim - length.square()) / ((1 - length) * (1 + length))
        for _ in range(5 if length.dtype == torch.float64 else 3):
            # A Newton step in log kappa, which is well-behaved at both ends. Lengths close to 1 are compared by their
            # complements. A length of 1 has an infinite initial value, which is kept.
            value = concentration.clamp(1e-30, torch.finfo(length.dtype).max ** 0.25)
            above = torch.where(
                length < 0.5, _Length.apply(value, dim) - length, (1 - length) - _Complement.apply(value, dim)
            )
            step = concentration * (-above / (value * _derivative(value, dim))).exp()
            concentration = torch.where(concentration.isinf(), concentration, step)
        return torch.where((length >= 0) & (length <= 1), concentration, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # The concentration is recomputed, so that the second derivative includes its dependence on the length.
        concentration = _Concentration.apply(*ctx.saved_tensors, ctx.dim)
        return grad_output / _derivative(concentration, ctx.dim), None
