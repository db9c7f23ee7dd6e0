"""Cuts the matrices of several parameters into portions that a rule takes at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.optim.rules import Number

# Weights a portion on the CPU. Its weights, gradients, momenta and scratch then stay in the cache while the rule goes
# over them several times, and memory is read once.
CPU_PORTION = 3 << 18


@dataclass(slots=True)
class Block:
    """Some groups of one parameter.

    Attributes:
        weight: (K, D); changed by the step.
        gradient: (K, D); only read.
        momentum: (K, D); changed by the step.
        second_moment: (K,), changed by the step; empty where a rule has none.
        step: How many steps the parameter has taken, this one included.
    """

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    second_moment: Tensor
    step: Number

    def rows(self, start: int, stop: int) -> "Block":
        """Some of the groups."""
        if start == 0 and stop >= self.weight.shape[0]:
            return self
        here = slice(start, stop)
        return Block(self.weight[here], self.gradient[here], self.momentum[here], self.second_moment[here], self.step)


def portions(blocks: Sequence[Block], foreach: bool | None) -> Iterator[list[Block]]:
    """Group and cut blocks of one device and dtype.

    Args:
        blocks: One a parameter.
        foreach: True for a single portion, False for one a parameter; None for a single portion on a GPU and for
            portions that fit into the cache on a CPU.
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


def scratch_for(portion: Sequence[Block], memory: Tensor) -> Sequence[Tensor | None]:
    """The same memory, shaped like each block in turn: room for a matrix that is needed for a moment."""
    if torch.compiler.is_compiling():
        return [None] * len(portion)  # a compiler needs no room where it fuses, and finds it by itself
    return [memory[: block.weight.numel()].view(block.weight.shape) for block in portion]


def spread(values: Sequence[Number], blocks: Sequence[Block]) -> Number:
    """Numbers that belong to a block each, one a group: (sum K,); a number alone where all are the same."""
    first = values[0]
    if len(values) == 1 or not (isinstance(first, Tensor) or any(value != first for value in values)):
        return first
    parts = []
    for value, block in zip(values, blocks, strict=True):
        count = block.weight.shape[0]
        if isinstance(value, Tensor):
            parts.append(value.to(block.weight.dtype).expand(count))
        else:
            parts.append(block.weight.new_full((count,), value))
    return torch.cat(parts)
