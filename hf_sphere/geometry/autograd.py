"""Support for autograd functions that are differentiable only once."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate the `backward` of an autograd function so that a second derivative raises an error.

    torch's `once_differentiable` silently treats the gradient as a constant if the incoming gradient does not require
    a gradient.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        sources = [t for t in (*ctx.saved_tensors, *gradients) if t is not None and t.requires_grad]
        if not sources:
            return results
        return tuple(None if result is None else _NoSecondDerivative.apply(result, *sources) for result in results)

    return wrapped


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of its first argument; raises an error when differentiated with respect to any argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *sources: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "samples of a von Mises-Fisher distribution, its softmax loss, and losses in blocks of classes can be "
            "differentiated once, but a second derivative was requested (create_graph=True?)."
        )
