"""Tensors that are computed once: coefficients, quadrature rules."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def kept(make: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of hashable arguments so that what it makes of them is kept.

    While a model is exported tensors have no values; such ones are not kept. A compiler does not look into caches: call
    the result from a function that `torch.compiler.assume_constant_result` decorates.
    """
    results: dict[Any, T] = {}

    @functools.wraps(make)
    def get(*arguments: Any) -> T:
        if arguments in results:
            return results[arguments]
        with torch.inference_mode(False):  # what is kept may be needed in training
            result = make(*arguments)
        if all(type(leaf) is Tensor for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            results[arguments] = result
        return result

    return get
