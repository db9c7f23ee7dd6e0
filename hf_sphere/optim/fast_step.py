"""Building blocks of the fast step, on matrices whose rows are groups.

A group is a set of weights that a normalization layer makes radially invariant: one filter before BatchNorm, an entire
tensor before LayerNorm. Here the weights, the momentum and the gradient of K groups with D weights each are matrices
(K, D), and values per group are vectors (K,). Functions whose name ends in an underscore change their first arguments
in place, in few passes over memory. The file of each optimizer begins with its rule as a formula, which the tests
compare with the fast step.

Each optimizer is built from these functions: `accumulate_` adds the gradient to the momentum, `step_` moves the
weights, and `transport_` transports the momentum to the new weights. `update_all` is the form without operations in
place, which a compiler fuses to one pass over memory.

Reference:
    Roburin, de Mont-Marin, Bursuc, Marlet, Perez, Aubry, "A spherical perspective on learning with normalization
    layers" (Neurocomputing 2022), sections 4 and 5.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.optim.layout import inner

Number = float | Tensor

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
        rows = slice(start, stop)
        return Block(self.weight[rows], self.gradient[rows], self.momentum[rows], self.second_moment[rows], self.step)


def accumulate_(block: Block, keep: float, decay: float, maximize: bool) -> Tensor:
    """Add a gradient to the running mean: g = +-gradient + decay x and m = keep m + (1 - keep) g; return |g|, (K,)."""
    gradient, momentum = block.gradient, block.momentum
    if maximize or decay or gradient.dtype != momentum.dtype:
        scratch = torch.empty_like(momentum) if block.scratch is None else block.scratch
        if decay and maximize:
            gradient = torch.mul(block.weight, decay, out=scratch).sub_(gradient)
        elif decay:
            gradient = torch.add(gradient, block.weight, alpha=decay, out=scratch)
        else:
            gradient = scratch.copy_(gradient)
            gradient = gradient.neg_() if maximize else gradient
    momentum.lerp_(gradient, 1 - keep)
    return torch.linalg.vector_norm(gradient, dim=1)


def step_(block: Block, step_size: Tensor, shrink: Number) -> None:
    """Move the weights: y = shrink x - step_size m, with a step size per group, (K,)."""
    if shrinks(shrink):
        block.weight.mul_(shrink)
    block.weight.addcmul_(block.momentum, step_size.unsqueeze(1), value=-1)


def shrinks(shrink: Number) -> bool:
    """Return whether there is decoupled weight decay; true for tensors, which are not read to avoid synchronization."""
    return isinstance(shrink, Tensor) or shrink != 1.0


def transport_(blocks: Sequence[Block]) -> Tensor:
    """Transport momenta to the weights after the step: m = m - <m, y> / <y, y> y; return |y| of each group, (sum K,).

    The paper writes (<x, y> m - <m, y> x) / <y, y> with the weights x before the step. With y = x - a m this equals the
    projection above, which does not require x: m loses its component along y, and shrinks by |x| / |y| if it was
    orthogonal to x. A group at zero keeps its momentum.
    """
    length = lengths([block.weight for block in blocks])
    along = torch.cat([torch.mul(block.momentum, block.weight, out=block.scratch).sum(1) for block in blocks])
    factors = (along / length).div_(length).unsqueeze_(1)
    for block, factor in zip(blocks, split(factors, blocks), strict=True):
        block.momentum.addcmul_(block.weight, factor, value=-1)
    return length


def lengths(matrices: Sequence[Tensor]) -> Tensor:
    """Return the length of each row of all matrices, (sum K_i,); the smallest normal number instead of zero."""
    rows = torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in matrices])
    return rows.clamp_min_(torch.finfo(rows.dtype).tiny)


def is_zero(length: Tensor) -> Tensor:
    """Return the mask of the `lengths` of groups at zero, which have no direction and are not updated."""
    return length <= torch.finfo(length.dtype).tiny


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
            rows = block.rows(start, start + count)
            portion.append(rows)
            start += rows.weight.shape[0]
            room -= rows.weight.numel()
    yield portion


def split(values: Tensor, blocks: Sequence[Block]) -> Sequence[Tensor]:
    """Split values of all groups, (sum K, ...), into those of each block."""
    return values.split([block.weight.shape[0] for block in blocks])


def per_group(values: Sequence[Number], blocks: Sequence[Block]) -> Number:
    """Expand one number per block to one per group, (sum K,); a single number if all are equal."""
    first = values[0]
    if len(values) == 1 or not (isinstance(first, Tensor) or any(value != first for value in values)):
        return first
    expanded = []
    for value, block in zip(values, blocks, strict=True):
        scalar = value if isinstance(value, Tensor) else block.weight.new_full((), value)
        expanded.append(scalar.to(block.weight.dtype).expand(block.weight.shape[0]))
    return torch.cat(expanded)


INDUCTOR: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
}
"""Options with which inductor computes a value again for each use, instead of storing a matrix."""


class Flags(NamedTuple):
    """Whether the objective is maximized, and there is L2 or decoupled weight decay."""

    maximize: bool
    decays: bool
    shrinks: bool


class Rows:
    """Operations on the groups of a matrix (K, D), for compilers.

    Args:
        g: Gradient, which the step does not change.
    """

    def __init__(self, g: Tensor) -> None:
        self._g = g

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Return inner products of groups."""
        return inner(a, b)

    def norm(self, a: Tensor) -> Tensor:
        """Return the norms of groups; the smallest normal number instead of zero."""
        return self.inner(a, a).sqrt().clamp_min(torch.finfo(a.dtype).tiny)

    def spread(self, values: Tensor) -> Tensor:
        """Return values per group as factors of matrices, so that inductor computes them once per group.

        It stores what `as_strided` reads. Two reads of the gradient with a stride keep the C++ backend from vectorizing
        over groups: it then updates one group after the other, while its weights are in the cache. Without such values
        it fails on matrices that are updated from each other (torch 2.14). A gradient of NaN makes the values NaN.
        """
        ends = self._g[:, :1] + self._g[:, -1:]
        return torch.where(ends.isnan(), ends, values).as_strided((len(ends), 1), (1, 1))


class PackedRows(Rows):
    """Operations on the groups of several matrices, which follow each other in one vector; few kernels on a GPU."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.sizes = row_sizes(tuple(tuple(matrix.shape) for matrix in matrices), matrices[0].device)
        self._index = torch.repeat_interleave(self.sizes, output_size=sum(matrix.numel() for matrix in matrices))

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Return inner products of groups."""
        return torch.segment_reduce(a * b, "sum", lengths=self.sizes, unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values per group for each of their weights."""
        return values.index_select(0, self._index)


@functools.lru_cache(maxsize=64)
def row_sizes(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the number of weights of each group of matrices of these shapes."""
    return torch.tensor([size for count, size in shapes for _ in range(count)], device=device)


def check_compiler() -> None:
    """Raise a `ValueError` if inductor finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ValueError(
            "compile=True requires a C++ compiler for parameters on the CPU, but none is installed: install g++, set "
            "CXX to another one, or omit compile."
        ) from error


def update_all(update: Callable[..., tuple[Tensor, ...]], blocks: Sequence[Any], numbers: Any) -> None:
    """Update weights, momenta and second moments of blocks.

    Args:
        update: Maps `Rows`, the weight, gradient, momentum, second moment, flags and numbers of a block to a new
            weight, momentum and second moment.
        blocks: Weight, gradient and momentum, (K, D), second moment, (K,) or empty, and flags of each block.
        numbers: Numbers of each block.
    """
    for (x, g, m, v, flags), own in zip(
        blocks, numbers.unbind() if isinstance(numbers, Tensor) else numbers, strict=True
    ):
        rows = Rows(g)
        y, new_m, new_v = update(rows, x, g, m, v.unsqueeze(1), flags, *own)
        x.copy_(y)
        m.copy_(new_m)
        if len(v):
            v.copy_(rows.spread(new_v).squeeze(1))


def transported(
    rows: Rows, x: Tensor, y: Tensor, m: Tensor, length: Tensor, size: Tensor, shrink: Number
) -> tuple[Tensor, Tensor]:
    """Transport momenta m to the weights y = shrink x - size m; return them and the norms of y.

    See `transport_`. Inner products with y follow from those of x, of norm `length`, and m, so that they do not take
    another pass. A step to less than sqrt(eps) of the norm, where they would be inexact, is treated as one to it.
    """
    x_m, before = rows.inner(x, m), length
    if shrinks(shrink):
        x_m, before = shrink * x_m, shrink * length
    y_m = x_m - size * rows.inner(m, m)
    before = before.square()
    squares = torch.maximum(before - size * (x_m + y_m), torch.finfo(m.dtype).eps * before)
    new_length = squares.sqrt().clamp_min(torch.finfo(m.dtype).tiny)
    m = torch.addcmul(m, rows.spread(y_m / new_length / new_length), y, value=-1)
    return m / shrink if shrinks(shrink) else m, new_length
