"""Operators that answer to the angle between an input and a weight, as functions of its cosine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHARPNESS = 0.3
"""k of the sigmoid operators: the smaller, the nearer they are to a step at the right angle."""

STEEPEST = 100.0
"""Largest slope of the arcsine of a free number, which may come as near to 1 as it likes: one that does must not throw
the weights away. The slope is below this up to 0.99995."""


@dataclass(frozen=True)
class Operator:
    """One of the operators.

    Attributes:
        normalizes_input: Whether it acts on the cosine of the angle between input and weight, which the length of the
            input does not change; otherwise on `x.w / |w|`.
        of_angle: What it makes of the angle that the input has beyond the weight's hyperplane, `asin(cosine)`; None for
            the cosine as it is.
    """

    normalizes_input: bool
    of_angle: Callable[[Tensor], Tensor] | None


def _linear(angle: Tensor) -> Tensor:
    return angle * (2 / math.pi)


def _sigmoid(angle: Tensor) -> Tensor:
    return torch.tanh(angle / (2 * SHARPNESS)) / math.tanh(math.pi / (4 * SHARPNESS))


OPERATORS: dict[str, Operator] = {
    prefix + name: Operator(not prefix, of_angle)
    for prefix in ("", "w_")
    for name, of_angle in (("cosine", None), ("linear", _linear), ("sigmoid", _sigmoid))
}
"""The operators by name; those that begin with `w_` act on `x.w / |w|`."""


def find_operator(name: str) -> Operator:
    """Return an operator by its name.

    Raises:
        ValueError: If there is none of that name; the message lists those that there are.
    """
    if name not in OPERATORS:
        raise ValueError(f"unknown operator {name!r}; the operators are: {', '.join(OPERATORS)}.")
    return OPERATORS[name]


def angular_response(values: Tensor, operator: str) -> Tensor:
    """Answer of an angular operator to the cosine c of the angle between input and weight.

    `cosine` is c; `linear` is `1 - 2 acos(c) / pi = 2 asin(c) / pi`; `sigmoid`, with k = 0.3, is `(1 + e^(-pi/2k)) /
    (1 - e^(-pi/2k)) (1 - e^(acos(c)/k - pi/2k)) / (1 + e^(acos(c)/k - pi/2k)) = coth(pi/4k) tanh(asin(c)/2k)`. All run
    from -1 to 1 and are odd; the forms with the arcsine are exact near 0 too. The operators named `w_` apply the same
    functions to `x.w / |w|`, which `w_linear` and `w_sigmoid` clip to [-1, 1] and `w_cosine` leaves as it is.

    The slope of the arcsine is infinite at -1 and 1. There the gradient, and never the value, is bounded: for cosines
    by the rounding of their dtype, since the true gradient by the input is finite; for the `w_` operators, where it is
    not, by a slope of 100. Beyond [-1, 1] it is 0. Twice differentiable.

    Args:
        values: Cosines, or `x.w / |w|` for the operators named `w_`; of any shape and a floating dtype.
        operator: A key of `OPERATORS`.

    Returns:
        Responses, of the shape and dtype of the values. Computed in float32 or better.

    Raises:
        TypeError: If the values are not of a floating dtype.
        ValueError: If the operator is unknown.

    Reference:
        Liu, Zhang, Li, Yu, Dai, Zhao and Song, "Deep hyperspherical learning", NeurIPS 2017, section 2.2.
    """
    found = find_operator(operator)
    if not values.is_floating_point():
        raise TypeError(f"expected a tensor of a floating dtype; got {values.dtype}. Convert it with .float().")
    if found.of_angle is None:
        return values
    steepest = torch.finfo(values.dtype).eps ** -0.5 if found.normalizes_input else STEEPEST
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return found.of_angle(_Arcsine.apply(wide, steepest)).to(values.dtype)


class _Arcsine(torch.autograd.Function):
    """`asin(values)` clipped to [-1, 1], with a slope of at most `steepest`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, steepest: float) -> Tensor:
        return values.clamp(-1, 1).asin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        values, ctx.steepest = inputs
        ctx.save_for_backward(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Of differentiable steps, so that autograd finds the second derivative by itself.
        (values,) = ctx.saved_tensors
        slope = ((1 - values) * (1 + values)).clamp_min(ctx.steepest**-2).rsqrt()
        return gradient * torch.where(values.abs() <= 1, slope, 0.0), None
