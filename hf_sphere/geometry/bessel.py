r"""The modified Bessel functions of the von Mises-Fisher distribution, in any dimension and at any concentration.

Everything follows from two functions of the concentration kappa in d dimensions, with nu = d/2 - 1:

- the log-partition function `G = log(Gamma(nu + 1) (2 / kappa)^nu I_nu(kappa)) = log C_d(0) - log C_d(kappa)`, and
- its derivative, the mean resultant length `A_d = I_{nu+1}(kappa) / I_nu(kappa)`.

Both are elementary functions minus corrections, for which `hf_sphere.geometry.expansions` has polynomials q and h. With
m = (d - 1) / 2, s = sqrt(m^2 + kappa^2) and e = m h / s^2,

- `G = s - m - m log((s + m) / 2m) - q (s - m) / s`, and
- `A = kappa / (s + m) - e kappa / s`; then `A' = 1 - A^2 - (d - 1) A / kappa` becomes `A' = e (2 - e kappa^2 / s^2)`.

Nothing cancels, also in 1 - A and kappa - G. No branch depends on the data, so the functions can be compiled. The
Bessel functions themselves are never computed, so nothing overflows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_floating, is_readable
from hf_sphere.geometry.decorators import differentiable_once, number
from hf_sphere.geometry.expansions import evaluate
from hf_sphere.utils.checks import check_integer


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
    return (log_uniform_density(dim) - _functions(wide, dim, "partition")[0]).to(concentration.dtype)


def log_vmf_peak(concentration: Tensor, dim: int) -> Tensor:
    """Logarithm of the density at the mode over the uniform one, `log C_d(kappa) + kappa - log C_d(0)`, accurate."""
    return _functions(_check(concentration, dim), dim, "peak")[0].to(concentration.dtype)


def log_vmf_peak_and_complement(concentration: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return `log_vmf_peak` and `mean_resultant_length_complement`, evaluated together with their gradients."""
    values = _functions(_check(concentration, dim), dim, "peak", "complement")
    return tuple(value.to(concentration.dtype) for value in values)


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
    return _functions(_check(concentration, dim), dim, "length")[0].to(concentration.dtype)


def mean_resultant_length_derivative(concentration: Tensor, dim: int) -> Tensor:
    """Derivative of the mean resultant length, `1 - A^2 - (d - 1) A / kappa`, the variance of mu.x; accurate."""
    return _functions(_check(concentration, dim), dim, "derivative")[0].to(concentration.dtype)


def mean_resultant_length_complement(concentration: Tensor, dim: int) -> Tensor:
    """Complement `1 - A_d(kappa)`, also accurate where A is close to 1; see `mean_resultant_length`."""
    return _functions(_check(concentration, dim), dim, "complement")[0].to(concentration.dtype)


def means_from_natural_parameters(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Means A_d(|eta|) eta / |eta| of distributions with natural parameters eta = kappa mu, (N, d)."""
    return _Means.apply(*vectors)


def concentration_from_mean_resultant_length(length: Tensor, dim: int) -> Tensor:
    """Inverse of `mean_resultant_length`: the maximum-likelihood concentration of points whose mean has this norm.

    Args:
        length: Mean resultant length in [0, 1], of any shape and floating-point dtype.
        dim: Number of coordinates d, at least 2.

    Returns:
        kappa, with the shape and dtype of `length`; infinite for a length of 1. Its relative accuracy equals
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


def partition_and_ratio(square: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Log-partition function, and twice its derivative, A_d(kappa) / kappa, as functions of the squared concentration.

    Both are smooth at 0. Not differentiable by autograd: losses of millions of values have their own gradients.
    """
    half = (dim - 1) / 2
    root, inverse, rise, fraction = _from_square(square, dim)
    quotient, error = evaluate(rise, fraction, dim, both=True)
    log_partition = torch.addcmul(rise, quotient, fraction, value=-1)
    log_partition.add_(rise.mul_(0.5 / half).log1p_(), alpha=-half)
    return log_partition, inverse.addcdiv_(error, root.pow_(3), value=-1)


def bounded_root(concentration: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return kappa, limited to finite numbers, and `s + m`."""
    half, largest = (dim - 1) / 2, torch.finfo(concentration.dtype).max
    kappa = concentration.clamp(max=0.25 * largest)
    if torch.compiler.is_compiling():  # ONNX has no `hypot`; m is negligible where the square overflows
        root = torch.maximum(kappa.square().add_(half**2).clamp_max_(largest).sqrt_(), kappa)
    else:
        root = torch.hypot(kappa, number(half, kappa.dtype, kappa.device))
    return kappa, root.add_(half)


def complement_from_root(kappa: Tensor, root: Tensor, dim: int) -> Tensor:
    """Return `1 - A` at the results of `bounded_root`, in few kernels; not differentiable by autograd."""
    rise, root_alone = kappa * (kappa / root), root - (dim - 1) / 2
    error = evaluate(rise, rise / root_alone, dim)[0]
    at_least = number(dim - 1, kappa.dtype, kappa.device) / (kappa + root)
    return torch.addcdiv(at_least, error, root_alone.pow_(3).div_(kappa))


def _check(values: Tensor, dim: int) -> Tensor:
    check_integer("dim", dim, 2)
    check_floating("the argument", values)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _from_square(square: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s, 1 / (s + m), s - m and (s - m) / s as functions of kappa^2."""
    half = (dim - 1) / 2
    root = (square + half**2).sqrt_()
    inverse = (root + half).reciprocal_()
    rise = square * inverse
    return root, inverse, rise, rise / root


SLOPES = {
    "partition": ("length", 1),
    "peak": ("complement", 1),
    "length": ("derivative", 1),
    "complement": ("derivative", -1),
}
"""Derivative of each function with respect to the concentration, and its sign."""


def _functions(concentration: Tensor, dim: int, *names: str) -> tuple[Tensor, ...]:
    """Evaluate functions together, differentiable any number of times."""
    if names == ("derivative",) or not torch.is_grad_enabled():
        return tuple(_evaluate(concentration, dim, names).values())
    return _Functions.apply(concentration, dim, names)[: len(names)]


def _evaluate(concentration: Tensor, dim: int, names: Sequence[str]) -> dict[str, Tensor]:
    """Evaluate G as `partition`, kappa - G as `peak`, A as `length`, 1 - A as `complement` and A' as `derivative`."""
    half = (dim - 1) / 2
    concentration = concentration.clamp(max=torch.finfo(concentration.dtype).max)  # a length of 1 has an infinite one
    root = torch.hypot(concentration, number(half, concentration.dtype, concentration.device))
    total = root + half
    bound, cosine = concentration / total, concentration / root
    rise, fraction = concentration * bound, cosine * bound
    with_log = "partition" in names or "peak" in names
    *quotient, error = evaluate(rise, fraction, dim, with_log)
    excess = error / root / root
    values = {}
    if with_log:
        decrease = half * (rise / (2 * half)).log1p() + quotient[0] * fraction
        values["partition"] = rise - decrease
        values["peak"] = 2 * half * bound / (1 + bound) + decrease
    if "length" in names:
        values["length"] = (bound - cosine * excess).clamp(max=1.0)  # rounding may exceed 1
    if "complement" in names:
        values["complement"] = torch.addcmul((total / (2 * half)).reciprocal() / (1 + bound), cosine, excess)
    if "derivative" in names:
        values["derivative"] = excess * (2 - cosine.square() * excess)
    return {name: values[name] for name in names}


class _Functions(torch.autograd.Function):
    """Functions by name, followed by those of their derivatives that are not among them.

    The names are one argument, since dynamo counts `*names` as one: it would pass a context before the concentration.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, dim: int, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        return tuple(_evaluate(concentration, dim, _with_slopes(names)).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        concentration, ctx.dim, ctx.names = inputs
        ctx.mark_non_differentiable(*output[len(ctx.names) :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(concentration, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        concentration, *saved = ctx.saved_tensors
        values = dict(zip(_with_slopes(ctx.names), saved, strict=True))
        grad = None
        for name, gradient in zip(ctx.names, gradients, strict=False):
            if gradient is not None:
                slope, sign = SLOPES[name]
                value = _functions(concentration, ctx.dim, slope)[0] if torch.is_grad_enabled() else values[slope]
                term = sign * gradient * value
                grad = term if grad is None else grad + term
        return grad, None, None


def _with_slopes(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*names, *(SLOPES[name][0] for name in names)]))


class _Means(torch.autograd.Function):
    """The means of one or two batches, which share one evaluation of the polynomials."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, ...]:
        vectors = (first,) if second is None else (first, second)  # not `*vectors`, see `_Functions`
        parts, dim = [batch.square().sum(-1) for batch in vectors], vectors[0].shape[-1]
        squares = torch.cat(parts) if len(parts) > 1 else parts[0]
        root, inverse, rise, fraction = _from_square(squares, dim)
        root_square = root.square()
        excess = evaluate(rise, fraction, dim)[0] / root_square
        ratio = inverse.addcdiv_(excess, root, value=-1)
        ctx.save_for_backward(squares, root_square, excess, ratio, *vectors)
        ctx.sizes = [batch.shape[0] for batch in vectors]  # `len` would fix the batch size of an exported program
        return tuple(r[:, None] * batch for r, batch in zip(ratio.split(ctx.sizes), vectors, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_means: Tensor) -> tuple[Tensor, ...]:
        # The covariance has the eigenvalue A' along the direction and r = A / kappa orthogonal to it, so that its
        # product with g is r g + (A' - r) <g, eta> eta / |eta|^2.
        squares, root_square, excess, ratio, *vectors = ctx.saved_tensors
        slope = torch.addcdiv(number(2.0, squares.dtype, squares.device), excess * squares, root_square, value=-1)
        less = torch.addcmul(ratio, excess, slope, value=-1).div_(squares.clamp_min(torch.finfo(squares.dtype).tiny))
        batches = zip(grad_means, vectors, ratio.split(ctx.sizes), less.split(ctx.sizes), strict=True)
        return tuple(
            torch.addcmul(grad * r[:, None], ((grad * batch).sum(-1) * less)[:, None], batch, value=-1)
            for grad, batch, r, less in batches
        )


class _Concentration(torch.autograd.Function):
    """The inverse of A_d."""

    generate_vmap_rule = True

    @staticmethod
    def forward(length: Tensor, dim: int) -> Tensor:
        gap = 1 - length
        concentration = length * (dim - length.square()) / (gap * (1 + length))
        for _ in range(2):
            # Halley's iteration for log kappa, where the initial value has an error of at most 6 %. Lengths close to 1
            # are compared by their complements. A length of 1 has an infinite initial value, which is kept.
            value = concentration.clamp(1e-30, torch.finfo(length.dtype).max ** 0.4)
            found = _evaluate(value, dim, ("length", "complement", "derivative"))
            above = torch.where(length < 0.5, found["length"] - length, gap - found["complement"])
            slope = value * found["derivative"]
            # Second derivative of A with respect to log kappa, divided by the first: from 1 to about -1.
            curvature = 2 - dim - 2 * value * found["length"] + (dim - 1) * found["length"] / slope
            step = above / slope
            concentration = concentration * (-step / (1 - 0.5 * step * curvature.clamp(-2, 2))).exp()
        return torch.where((length >= 0) & (length <= 1), concentration, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return grad_output / _functions(concentration, ctx.dim, "derivative")[0], None
