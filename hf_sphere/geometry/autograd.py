"""Gradients written by hand that have no gradient of their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate `backward` of an autograd function so that a second derivative raises instead of being wrong.

    torch's own `once_differentiable` lets a gradient pass as a constant where the incoming one is a constant.
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
    """The identity of its first argument, as far as one does not ask how it depends on the others."""

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
            "samples of a von Mises-Fisher distribution and its softmax loss can be differentiated once, but a second "
            "derivative was asked for (create_graph=True?)."
        )
