"""Caching of constant tensors, such as coefficients and quadrature rules."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def cache_constants(build: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of hashable arguments that returns constant tensors, so that its results are cached.

    Results that contain fake tensors, as during `torch.export`, are not cached. `torch.compile` calls the function once
    and treats its result as a constant.
    """
    results: dict[Any, T] = {}

    @torch.compiler.assume_constant_result
    @functools.wraps(build)
    def get(*arguments: Any) -> T:
        if arguments in results:
            return results[arguments]
        with torch.inference_mode(False):  # the tensors may be used in training later
            result = build(*arguments)
        if all(type(leaf) is Tensor for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            results[arguments] = result
        return result

    return get
