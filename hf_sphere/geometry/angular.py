"""Angular operators: functions of the angle between an input and a weight, evaluated from its cosine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_floating
from hf_sphere.utils.checks import check_choice

SHARPNESS = 0.3
"""Parameter k of the sigmoid operators; smaller values approach a step function at a right angle."""

STEEPEST = 100.0
"""Maximum slope of the arcsine for the `w_` operators, whose argument can be arbitrarily close to 1, where the gradient
would explode. The limit is active above 0.99995."""


@dataclass(frozen=True)
class Operator:
    """An angular operator."""

    normalizes_input: bool  # applied to the cosine of the angle between input and weight, otherwise to `x.w / |w|`
    of_angle: Callable[[Tensor], Tensor] | None  # of the angle to the hyperplane, `asin(cosine)`; None keeps the cosine


OPERATORS: dict[str, Operator] = {
    prefix + name: Operator(not prefix, of_angle)
    for prefix in ("", "w_")
    for name, of_angle in (
        ("cosine", None),
        ("linear", lambda angle: angle * (2 / math.pi)),
        ("sigmoid", lambda angle: torch.tanh(angle / (2 * SHARPNESS)) / math.tanh(math.pi / (4 * SHARPNESS))),
    )
}
"""Operators by name; those with the prefix `w_` are applied to `x.w / |w|`."""


def find_operator(name: str) -> Operator:
    """Return an operator by its name."""
    return OPERATORS[check_choice("operator", name, OPERATORS)]


def angular_response(values: Tensor, operator: str) -> Tensor:
    """Response of an angular operator to the cosine c of the angle between input and weight.

    `cosine` is c; `linear` is `1 - 2 acos(c) / pi = 2 asin(c) / pi`; `sigmoid`, with k = 0.3, is `(1 + e^(-pi/2k)) /
    (1 - e^(-pi/2k)) (1 - e^(acos(c)/k - pi/2k)) / (1 + e^(acos(c)/k - pi/2k)) = coth(pi/4k) tanh(asin(c)/2k)`. All
    are odd and range from -1 to 1; the forms with the arcsine are also accurate near 0. The `w_` operators apply the
    same functions to `x.w / |w|`, which `w_linear` and `w_sigmoid` clip to [-1, 1] and `w_cosine` does not.

    The slope of the arcsine is infinite at -1 and 1. There the gradient is clipped, but not the value. For cosines, the
    limit depends on the precision of their dtype, since the true gradient with respect to the input is finite. For the
    `w_` operators, whose true gradient is infinite, the limit is a slope of 100. Outside [-1, 1] the gradient is 0.
    Twice differentiable.

    Args:
        values: Cosines, or `x.w / |w|` for the `w_` operators, of any shape and floating-point dtype.
        operator: A key of `OPERATORS`.

    Returns:
        Responses, with the shape and dtype of `values`; computed in at least float32.

    Raises:
        TypeError: If `values` does not have a floating-point dtype.
        ValueError: If the operator is unknown.

    Reference:
        Liu, Zhang, Li, Yu, Dai, Zhao and Song, "Deep hyperspherical learning", NeurIPS 2017, section 2.2.

    Example:
        >>> angular_response(torch.tensor([-1.0, 0.0, 1.0]), "linear")
        tensor([-1.,  0.,  1.])
    """
    function = find_operator(operator)
    check_floating("values", values)
    if function.of_angle is None:
        return values
    steepest = torch.finfo(values.dtype).eps ** -0.5 if function.normalizes_input else STEEPEST
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return function.of_angle(_Arcsine.apply(wide, steepest)).to(values.dtype)


class _Arcsine(torch.autograd.Function):
    """Arcsine of the values clipped to [-1, 1], with a slope of at most `steepest`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, steepest: float) -> Tensor:
        return values.clamp(-1, 1).asin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        values, ctx.steepest = inputs
        ctx.save_for_backward(values)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Differentiable operations, so that autograd derives the second derivative.
        (values,) = ctx.saved_tensors
        slope = ((1 - values) * (1 + values)).clamp_min(ctx.steepest**-2).rsqrt()
        return grad_output * torch.where(values.abs() <= 1, slope, 0.0), None
