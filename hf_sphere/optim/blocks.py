"""Splitting of the matrices of several parameters into portions that a rule updates at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.optim.rules import Number, transport_

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
