"""Decorators of functions of tensors: cached constants, opaque loops, and gradients that are differentiable once."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from hf_sphere.utils.modules import assume_constant_result

T = TypeVar("T")


def cache_constants(build: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of hashable arguments that returns constant tensors, so that its results are cached."""
    results: dict[Any, T] = {}

    @assume_constant_result
    @functools.wraps(build)
    def get(*arguments: Any) -> T:
        if arguments in results:
            return results[arguments]
        with torch.inference_mode(False):  # the tensors may be used in training later
            result = build(*arguments)
        if not any(map(is_fake, tree_leaves(result))):  # as during `torch.export`
            results[arguments] = result
        return result

    return get


def cache_outside_graphs(build: Callable[..., T]) -> Callable[..., T]:
    """Like `cache_constants`, but compiled where it is used: a compiled function may then call it several times."""
    cached = cache_constants(build)

    @functools.wraps(build)
    def get(*arguments: Any) -> T:
        return (build if torch.compiler.is_compiling() else cached)(*arguments)

    return get


@cache_outside_graphs
def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor, for operations that take no Python numbers or determine their dtype by it."""
    return torch.full((), value, dtype=dtype, device=device)


def with_gradient(gradient: Callable[..., tuple[Tensor, ...]]) -> Callable[[T], T]:
    """Decorate a function of tensors, then constants, that returns several tensors, with a formula of its gradient.

    The formula takes the tensors, the results and the gradients of the results, None where there are none. It needs
    fewer kernels than autograd, which derives the second derivative from it. A compiler fuses kernels without it, and
    on the CPU the time of kernels is small compared with that of Python.
    """

    def decorate(function: Any) -> Any:
        class WithGradient(torch.autograd.Function):
            generate_vmap_rule = True
            forward = staticmethod(function)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
                tensors = [value for value in inputs if isinstance(value, Tensor)]
                ctx.constants = (None,) * (len(inputs) - len(tensors))
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*tensors, *outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                return *gradient(*ctx.saved_tensors, *gradients), *ctx.constants

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            is_plain = torch.compiler.is_compiling() or arguments[0].device.type == "cpu"
            return function(*arguments) if is_plain else WithGradient.apply(*arguments)

        call.on_devices = WithGradient.apply  # type: ignore[attr-defined]  # for tests
        return call

    return decorate


def opaque(shapes: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function so that a compiler calls it; `shapes` returns empty tensors like the results."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        operator = torch.library.custom_op(f"hf_sphere::{function.__name__.strip('_')}", function, mutates_args=())
        operator.register_fake(shapes)

        @functools.wraps(function)
        def run(*arguments: Any) -> T:
            return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return run

    return decorate


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate the `backward` of an autograd function so that a second derivative raises an error; without autocast.

    torch's `once_differentiable` silently treats the gradient as a constant if the incoming gradient does not require
    a gradient.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        device = next((g.device.type for g in gradients if g is not None and not g.is_meta), "cpu")
        with torch.no_grad(), torch.autocast(device, enabled=False):  # products in half precision would not fit
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        sources = [t for t in (*ctx.saved_tensors, *gradients) if t is not None and t.requires_grad]
        if not sources:
            return results
        return tuple(None if result is None else _NoSecondDerivative.apply(result, *sources) for result in results)

    return wrapped


class WithGradients(torch.autograd.Function):
    """A number that was computed with its gradients by some tensors; called with it, the gradients and the tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # noqa: D102
        value, *tensors = inputs  # of `value, *tensors`, dynamo would omit the context before a single pair
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        saved = ctx.saved_tensors  # a checkpoint allows reading them once
        count = len(saved) // 2
        return *(None,) * (1 + count), *(grad_value * gradient for gradient in saved[:count])


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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "this function can be differentiated once, but a second derivative was requested. A loss in blocks of "
            "classes has one with blockwise=False, except that of head 'vmf'."
        )
