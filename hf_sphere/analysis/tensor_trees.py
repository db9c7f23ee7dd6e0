"""The tensors in what a module is given and gives: seen, copied, replaced by others of their shape."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

_PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device, torch.Size)


def taken_apart(value: Any) -> tuple[list[Tensor], tuple]:
    """Return the tensors in a value, in lists, tuples, mappings and dataclasses, one in another, and all the rest.

    Returns:
        The tensors, and what can be compared: where they were, their dtypes and numbers of axes, and everything else.

    Raises:
        TypeError: If there is something else in it that may hold tensors.
    """
    found: list[Tensor] = []
    rest: list[Any] = []
    leaves, places = tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(leaf)
            rest.append((Tensor, leaf.dtype, leaf.ndim))
        elif isinstance(leaf, Mapping) or is_dataclass(leaf):
            inner = dict(leaf) if isinstance(leaf, Mapping) else {f.name: getattr(leaf, f.name) for f in fields(leaf)}
            inside, around = taken_apart(inner)
            found += inside
            rest.append((type(leaf), around))
        elif isinstance(leaf, _PLAIN):
            rest.append(leaf)
        else:
            raise TypeError(f"a {type(leaf).__name__} may hold tensors.")
    return found, (places, rest)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors that `taken_apart` finds.

    Raises:
        TypeError: If there is something else in it that may hold tensors.
    """
    return taken_apart(value)[0]


def copied(value: Any) -> Any:
    """Copy the tensors in a value; what was one tensor stays one, for attention looks whether its inputs are."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return tree_map_only(Tensor, copy, value)


def first_examples(count: int, value: Any) -> Any:
    """Copy the first examples of a batch: of all tensors whose first axis is as long as that of the first tensor."""
    length = next((leaf.shape[0] for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim), 0)

    def take(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.ndim and tensor.shape[0] == length else tensor

    return copied(tree_map_only(Tensor, take, value))


def flipped(value: Any) -> Any:
    """Make other examples, of which everything is as allowed as it was: the last axis turned, real numbers smaller."""

    def flip(tensor: Tensor) -> Tensor:
        tensor = tensor.flip(-1) if tensor.ndim else tensor
        return 0.9 * tensor if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, flip, value)


def filled(like: Tensor, value: float) -> Tensor:
    """Make a tensor of one number, which takes no memory; of 0 where it cannot be NaN."""
    fits = like.is_floating_point() or like.is_complex()
    return torch.full((), value if fits else 0, dtype=like.dtype, device=like.device).expand(like.shape)


def noise(like: Tensor) -> Tensor:
    """Draw a tensor, the same for the same shape; of 1 where it cannot be any number."""
    if not like.is_floating_point():
        return torch.ones_like(like)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


def other_values(like: Tensor) -> Tensor:
    """Draw values that a parameter or buffer might have: of the same size, positive where all are."""
    if not like.is_floating_point() or not like.numel():
        return like
    generator = torch.Generator().manual_seed(0)
    factors = (0.5 + torch.rand(like.shape, generator=generator)).to(like)
    values = like.detach().flatten().flip(0).view(like.shape) * factors
    return values if values.any() else 0.01 * factors


def close(new: Tensor, old: Tensor, tolerance: float | None = None) -> bool:
    """Tell whether tensors are equal up to a part of the largest number, by default the rounding of their dtype."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    if not (old.is_floating_point() and old.numel()):
        return torch.equal(new, old)
    part = 16 * torch.finfo(old.dtype).eps if tolerance is None else tolerance
    scale = old.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(new, old, rtol=part, atol=part * scale)
