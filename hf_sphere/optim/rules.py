"""Building blocks of the update rules, on matrices whose rows are groups.

A group is a set of weights that a normalization layer makes radially invariant: one filter before BatchNorm, an entire
tensor before LayerNorm. Here the weights, the momentum and the gradient of K groups with D weights each are matrices
(K, D), and values per group are vectors (K,). Functions whose name ends in an underscore change their first arguments
in place. `tests/optim/update_rules.py` has the rules as formulas.

Each optimizer is built from these functions: `accumulate_` adds the gradient to the momentum, `adam_step_size` computes
the step size of each group, `step_` moves the weights, and `transport_` transports the momentum to the new weights.

Source: Roburin, de Mont-Marin, Bursuc, Marlet, Perez, Aubry, "A spherical perspective on learning with normalization
layers" (Neurocomputing 2022), sections 4 and 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor


def accumulate_(
    momentum: Tensor,
    gradient: Tensor,
    weight: Tensor,
    *,
    keep: float,
    decay: float = 0.0,
    maximize: bool = False,
    scratch: Tensor | None = None,
) -> Tensor:
    """Add a gradient to the running mean: g = +-gradient + decay x and m = keep m + (1 - keep) g.

    Args:
        momentum: m, (K, D); changed.
        gradient: (K, D), in any floating dtype; only read.
        weight: x, (K, D).
        keep: beta1.
        decay: L2 weight decay.
        maximize: Negate the gradient.
        scratch: Temporary memory (K, D) of the dtype of `momentum`; allocated if None.

    Returns:
        |g| of each group, (K,).
    """
    if maximize or decay or gradient.dtype != momentum.dtype:
        scratch = torch.empty_like(momentum) if scratch is None else scratch
        if decay and maximize:
            gradient = torch.mul(weight, decay, out=scratch).sub_(gradient)
        elif decay:
            gradient = torch.add(gradient, weight, alpha=decay, out=scratch)
        else:
            gradient = scratch.copy_(gradient)
            gradient = gradient.neg_() if maximize else gradient
    momentum.lerp_(gradient, 1 - keep)
    return torch.linalg.vector_norm(gradient, dim=1)


def adam_step_size(
    second_moment: Tensor, *, lr: Number, bias1: Number, bias2: Number, eps: float, dim: Number
) -> Tensor:
    """Return the length of the step in units of m: lr sqrt(D) / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).

    Args:
        second_moment: v, one number per group, (K,).
        lr: Learning rate.
        bias1: 1 - beta1^t with t counted from 1; a number, or (K,).
        bias2: 1 - beta2^t.
        eps: Added to the root.
        dim: D, the number of weights in a group; 1 omits the factor, as in Adam-G.

    Returns:
        (K,).
    """
    return lr / bias1 * dim**0.5 / (second_moment / bias2).sqrt_().add_(eps)


def step_(weight: Tensor, momentum: Tensor, step_size: Tensor, shrink: Number = 1.0) -> None:
    """Move the weights: y = shrink x - step_size m.

    Args:
        weight: x, (K, D); becomes y.
        momentum: m, (K, D).
        step_size: (K,).
        shrink: 1 - lr * decay for decoupled weight decay.
    """
    if shrinks(shrink):
        weight.mul_(shrink)
    weight.addcmul_(momentum, step_size.unsqueeze(1), value=-1)


def shrinks(shrink: Number) -> bool:
    """Return whether there is decoupled weight decay; true for tensors, which are not read to avoid synchronization."""
    return isinstance(shrink, Tensor) or shrink != 1.0


def transport_(
    momenta: Sequence[Tensor], weights: Sequence[Tensor], scratch: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Transport momenta to the weights after the step: m = m - <m, y> / <y, y> y.

    The paper writes (<x, y> m - <m, y> x) / <y, y> with the weights x before the step. With y = x - a m this equals the
    projection above, which does not require x: m loses its component along y, and shrinks by |x| / |y| if it was
    orthogonal to x. A group at zero keeps its momentum.

    Args:
        momenta: m, matrices (K_i, D_i); changed.
        weights: y, the weights after the step, of the same shapes.
        scratch: Temporary memory for each; allocated where it is None.

    Returns:
        |y| of each group, (sum K_i,).
    """
    rooms: Sequence[Tensor | None] = scratch or [None] * len(weights)
    length = lengths(weights)
    along = torch.cat([torch.mul(m, y, out=room).sum(1) for m, y, room in zip(momenta, weights, rooms, strict=True)])
    share = (along / length).div_(length).unsqueeze_(1).split([y.shape[0] for y in weights])
    for momentum, weight, part in zip(momenta, weights, share, strict=True):
        momentum.addcmul_(weight, part, value=-1)
    return length


def lengths(matrices: Sequence[Tensor]) -> Tensor:
    """Return the length of each row of all matrices, (sum K_i,); the smallest normal number instead of zero."""
    rows = torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in matrices])
    return rows.clamp_min_(torch.finfo(rows.dtype).tiny)


def is_zero(length: Tensor) -> Tensor:
    """Return the mask of the `lengths` of groups at zero, which have no direction and are not updated."""
    return length <= torch.finfo(length.dtype).tiny


# Weights per portion on the CPU: weights, gradients, momenta and scratch stay in the cache while the rule reads them
# several times.
CPU_PORTION = 3 << 18


@dataclass(slots=True)
class Block:
    """Groups of one parameter."""

    weight: Tensor  # (K, D); changed by the step
    gradient: Tensor  # (K, D); only read
    momentum: Tensor  # (K, D); changed by the step
    second_moment: Tensor  # (K,), changed by the step; empty for rules without one
    step: Number  # number of steps that the parameter has taken, including this one
    scratch: Tensor | None = None  # temporary memory for a matrix (K, D); None if functions allocate it

    def rows(self, start: int, stop: int) -> "Block":
        """Return the groups from `start` to `stop`."""
        if start == 0 and stop >= self.weight.shape[0]:
            return self
        here = slice(start, stop)
        return Block(self.weight[here], self.gradient[here], self.momentum[here], self.second_moment[here], self.step)


def portions(blocks: Sequence[Block], foreach: bool | None) -> Iterator[list[Block]]:
    """Split and combine blocks of the same device and dtype.

    Args:
        blocks: One per parameter.
        foreach: True for a single portion, False for one per parameter; None for a single portion on a GPU and portions
            that fit in the cache on a CPU.
    """
    if foreach is False:
        yield from ([block] for block in blocks)
        return
    if foreach or blocks[0].weight.device.type != "cpu":
        yield list(blocks)
        return
    portion: list[Block] = []
    room = CPU_PORTION
    for block in blocks:
        dim, start = block.weight.shape[1], 0
        while start < block.weight.shape[0]:
            count = max(1, room // dim)
            if portion and count * dim > room:
                yield portion
                portion, room = [], CPU_PORTION
                continue
            part = block.rows(start, start + count)
            portion.append(part)
            start += part.weight.shape[0]
            room -= part.weight.numel()
    yield portion


def split(values: Tensor, blocks: Sequence[Block]) -> Sequence[Tensor]:
    """Split values of all groups, (sum K, ...), into those of each block."""
    return values.split([block.weight.shape[0] for block in blocks])


def per_group(values: Sequence[Number], blocks: Sequence[Block]) -> Number:
    """Expand one number per block to one per group, (sum K,); a single number if all are equal."""
    first = values[0]
    if len(values) == 1 or not (isinstance(first, Tensor) or any(value != first for value in values)):
        return first
    rows = []
    for value, block in zip(values, blocks, strict=True):
        number = value if isinstance(value, Tensor) else block.weight.new_full((), value)
        rows.append(number.to(block.weight.dtype).expand(block.weight.shape[0]))
    return torch.cat(rows)


def transport_momenta(blocks: Sequence[Block]) -> Tensor:
    """Transport the momenta to the new weights; see `transport_`."""
    return transport_([b.momentum for b in blocks], [b.weight for b in blocks], [b.scratch for b in blocks])
