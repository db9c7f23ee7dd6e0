"""Building blocks of the fast step, on matrices whose rows are groups.

A group is a set of weights that a normalization layer makes scale-invariant: one filter before BatchNorm, an entire
tensor before LayerNorm. Here the weights, the momentum and the gradient of K groups with D weights each are matrices
(K, D). The file of each optimizer begins with its rule as a formula, which the tests compare with the fast step.

Each optimizer describes its step once, by the operations of `RowMath` on matrices. It returns new tensors, which a
compiler fuses to one pass over memory. `Portion` changes several matrices in place, in few passes, and `PackedPortion`
launches few kernels on a GPU.

Reference:
    Roburin, de Mont-Marin, Bursuc, Marlet, Perez, Aubry, "A spherical perspective on learning with normalization
    layers" (Neurocomputing 2022), sections 4 and 5.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.optim.layout import inner

Number = float | Tensor

CPU_PORTION = 3 << 18
"""Weights per portion on the CPU: matrices and scratch stay in the cache while the rule reads them several times."""
DEVICE_PORTION = 1 << 25
"""Weights per portion on other devices, where packing takes 20 bytes per weight (0.7 GB); all of a ResNet-50."""
INDUCTOR: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
}
"""Options with which inductor computes a value again for each use, instead of storing a matrix."""


@dataclass(slots=True)
class Block:
    """Groups of one parameter."""

    weight: Tensor  # (K, D); changed by the step
    gradient: Tensor  # (K, D); only read
    momentum: Tensor  # (K, D); changed by the step
    second_moment: Tensor  # (K,), changed by the step; empty for rules without one
    step: Number  # number of steps that the parameter has taken, including this one

    def rows(self, start: int, stop: int) -> "Block":
        """Return the groups from `start` to `stop`."""
        if start == 0 and stop >= self.weight.shape[0]:
            return self
        rows = slice(start, stop)
        return Block(self.weight[rows], self.gradient[rows], self.momentum[rows], self.second_moment[rows], self.step)


class Flags(NamedTuple):
    """Whether the objective is maximized, and there is L2 or decoupled weight decay."""

    maximize: bool
    decays: bool
    shrinks: bool


def is_zero(length: Tensor) -> Tensor:
    """Return the mask of groups whose norm is 0; they have no direction and are not updated."""
    return length <= torch.finfo(length.dtype).tiny


def portions(blocks: Sequence[Block], foreach: bool | None) -> Iterator[list[Block]]:
    """Split and combine blocks of a device and dtype; into a single portion on the CPU, or one per parameter."""
    on_cpu = blocks[0].weight.device.type == "cpu"
    if foreach is False or (foreach and on_cpu):
        yield from ([block] for block in blocks) if foreach is False else [list(blocks)]
        return
    portion: list[Block] = []
    room = size = CPU_PORTION if on_cpu else DEVICE_PORTION
    for block in blocks:
        dim, start = block.weight.shape[1], 0
        while start < block.weight.shape[0]:
            count = max(1, room // dim)
            if portion and count * dim > room:
                yield portion
                portion, room = [], size
                continue
            rows = block.rows(start, start + count)
            portion.append(rows)
            start += rows.weight.shape[0]
            room -= rows.weight.numel()
    yield portion


class RowMath:
    """Operations on the groups of a matrix (K, D), for compilers; values per group are (K, 1)."""

    def __init__(self, g: Tensor) -> None:
        self._g = g

    def gradient(self, x: Any, g: Any, flags: Flags, decay: Any) -> Any:
        """Return the gradient to be minimized, with L2 weight decay and the dtype of x."""
        g = (-g if flags.maximize else g).to(x.dtype)
        return g + decay * x if flags.decays else g

    def lerp(self, a: Any, b: Any, weight: Any) -> Any:
        """Return (1 - weight) a + weight b."""
        return torch.lerp(a, b, weight)

    def accumulate(self, a: Any, b: Any, keep: Any, weight: Any) -> Any:
        """Return keep a + weight b."""
        return keep * a + weight * b

    def scale(self, a: Any, values: Number) -> Any:
        """Return a times a number, or values per group."""
        return a * (self.spread(values) if isinstance(values, Tensor) and values.ndim else values)

    def subtract(self, a: Any, values: Tensor, b: Any) -> Any:
        """Return a - values b with values per group."""
        return torch.addcmul(a, self.spread(values), b, value=-1)

    def inner(self, a: Any, b: Any) -> Tensor:
        """Return inner products of groups."""
        return inner(a, b)

    def norm(self, a: Any) -> Tensor:
        """Return the norms of groups; the smallest normal number instead of zero."""
        squares = self.inner(a, a)
        return squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny)

    def spread(self, values: Tensor) -> Tensor:
        """Return values per group as factors of matrices, so that inductor computes them once per group.

        It stores what `as_strided` reads. Two reads of the gradient with a stride keep the C++ backend from vectorizing
        over groups: it then updates one group after the other, while its weights are in the cache. Without such values
        it fails on matrices that are updated from each other (torch 2.14). A gradient of NaN makes the values NaN.
        """
        ends = self._g[:, :1] + self._g[:, -1:]
        return torch.where(ends.isnan(), ends, values).as_strided((len(ends), 1), (1, 1))

    def transport(
        self, x: Any, y: Any, m: Any, length: Tensor, size: Tensor, flags: Flags, shrink: Number
    ) -> tuple[Any, Tensor]:
        """Transport momenta m to the weights y = shrink x - size m; return them and the norms of y.

        Inner products with y follow from those of x, of norm `length`, and m, so that they do not take another pass. A
        step to less than sqrt(eps) of the norm, where they would be inexact, is treated as one to it; `Portion` has no
        such limit.
        """
        x_m, before = self.inner(x, m), length
        if flags.shrinks:
            x_m, before = shrink * x_m, shrink * length
        y_m = x_m - size * self.inner(m, m)
        before = before.square()
        squares = torch.maximum(before - size * (x_m + y_m), torch.finfo(m.dtype).eps * before)
        new_length = squares.sqrt().clamp_min(torch.finfo(m.dtype).tiny)
        m = self.subtract(m, y_m / new_length / new_length, y)
        return m / shrink if flags.shrinks else m, new_length


class Portion(RowMath):
    """Operations in place on lists of matrices; values per group are (sum K,).

    The temporary memory has at least one number per weight. An inner product overwrites the gradient in it.
    """

    def __init__(self, blocks: Sequence[Block], memory: Tensor) -> None:
        self.x, self.m = [block.weight for block in blocks], [block.momentum for block in blocks]
        self.g = [block.gradient for block in blocks]
        self._moments = [block.second_moment for block in blocks]
        self.v = torch.cat(self._moments)
        self.t = per_group([block.step for block in blocks], blocks)
        self._blocks, self._memory = blocks, memory

    @property
    def dim(self) -> Number:
        """The number of weights of each group."""
        return per_group([float(x.shape[1]) for x in self.x], self._blocks)

    @functools.cached_property
    def _scratch(self) -> list[Tensor]:
        parts = self._memory[: sum(x.numel() for x in self.x)].split([x.numel() for x in self.x])
        return [part.view(x.shape) for part, x in zip(parts, self.x, strict=True)]

    def close(self, v: Tensor) -> None:
        """Write the second moments, and what is not in place, to the blocks."""
        if len(v):
            torch._foreach_copy_(self._moments, list(v.split([len(moment) for moment in self._moments])))

    def _factors(self, values: Number) -> Iterable[Number]:
        """Return a factor of each matrix."""
        if not isinstance(values, Tensor) or not values.ndim:
            return itertools.repeat(values, len(self.x))
        return values.unsqueeze(1).split([len(x) for x in self.x])

    def gradient(self, x: Any, g: Any, flags: Flags, decay: Any) -> Any:
        """Return the gradients, in the temporary memory if they differ from those of the parameters."""
        if not (flags.maximize or flags.decays or g[0].dtype != x[0].dtype):
            return g
        for to, own, weight in zip(self._scratch, g, x, strict=True):
            torch.add(own, weight, alpha=-decay if flags.maximize else decay, out=to) if flags.decays else to.copy_(own)
        if flags.maximize:
            torch._foreach_neg_(self._scratch)
        return self._scratch

    def lerp(self, a: Any, b: Any, weight: Any) -> Any:
        """Change a to (1 - weight) a + weight b."""
        torch._foreach_lerp_(a, b, weight)
        return a

    def accumulate(self, a: Any, b: Any, keep: Any, weight: Any) -> Any:
        """Change a to keep a + weight b."""
        if weight == 1:
            for own, other in zip(a, b, strict=True):
                torch.add(other, own, alpha=keep, out=own)  # one pass
        else:
            torch._foreach_mul_(a, keep)
            torch._foreach_add_(a, b, alpha=weight)
        return a

    def scale(self, a: Any, values: Number) -> Any:
        """Multiply a by a number, or values per group."""
        for matrix, factor in zip(a, self._factors(values), strict=True):
            matrix.mul_(factor)
        return a

    def subtract(self, a: Any, values: Tensor, b: Any) -> Any:
        """Change a to a - values b with values per group."""
        for matrix, factor, other in zip(a, self._factors(values), b, strict=True):
            matrix.addcmul_(other, factor, value=-1)
        return a

    def inner(self, a: Any, b: Any) -> Tensor:
        """Return inner products of groups."""
        if a is b:
            return torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in a]).square_()
        products = (
            torch.mul(own, other, out=self._memory[: own.numel()].view(own.shape))  # stays in the cache
            for own, other in zip(a, b, strict=True)
        )
        return torch.cat([product.sum(1) for product in products])

    def norm(self, a: Any) -> Tensor:
        """Return the norms of groups, without squares that could underflow."""
        norms = torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in a])
        return norms.clamp_min_(torch.finfo(norms.dtype).tiny)

    def transport(
        self, x: Any, y: Any, m: Any, length: Tensor, size: Tensor, flags: Flags, shrink: Number
    ) -> tuple[Any, Tensor]:
        """Transport momenta to the weights after the step, m = m - <m, y> / <y, y> y; return them and the norms of y.

        The paper writes (<x, y> m - <m, y> x) / <y, y> with the weights x before the step. With y = x - a m this equals
        the projection above, which does not require x: m loses its component along y, and shrinks by |x| / |y| if it
        was orthogonal to x. A group at zero keeps its momentum.
        """
        new_length = self.norm(y)
        m = self.subtract(m, (self.inner(m, y) / new_length).div_(new_length), y)
        return self.scale(m, 1 / shrink) if flags.shrinks else m, new_length


class PackedPortion(Portion):
    """Operations on copies of several matrices in one vector: few kernels on a GPU."""

    def __init__(self, blocks: Sequence[Block], memory: Tensor) -> None:
        super().__init__(blocks, memory)
        self._kept = self.x, self.m
        self._sizes = row_sizes(tuple(tuple(matrix.shape) for matrix in self.x), self.x[0].device)
        kinds = (self.x, self.g, self.m)
        self.x, self.g, self.m = ([torch.cat([matrix.reshape(-1) for matrix in kind])] for kind in kinds)
        self.g = [self.g[0].to(self.x[0].dtype)]
        self._scratch = self.g  # copies, which can be overwritten
        self._index = torch.repeat_interleave(self._sizes, output_size=self.x[0].numel())

    @property
    def dim(self) -> Number:
        """The number of weights of each group."""
        return self._sizes.to(self.x[0].dtype)

    def close(self, v: Tensor) -> None:
        """Write the results to the blocks."""
        super().close(v)
        for targets, (values,) in zip(self._kept, (self.x, self.m), strict=True):
            parts = values.split([target.numel() for target in targets])
            torch._foreach_copy_(targets, [part.view_as(to) for part, to in zip(parts, targets, strict=True)])

    def _factors(self, values: Number) -> Iterable[Number]:
        return [values.index_select(0, self._index) if isinstance(values, Tensor) and values.ndim else values]

    def inner(self, a: Any, b: Any) -> Tensor:
        """Return inner products of groups."""
        product = torch.mul(a[0], b[0], out=self._scratch[0])
        return torch.segment_reduce(product, "sum", lengths=self._sizes, unsafe=True)

    def norm(self, a: Any) -> Tensor:
        """Return the norms of groups; the smallest normal number instead of zero."""
        return RowMath.norm(self, a)


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


@functools.lru_cache(maxsize=64)
def row_sizes(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the number of weights of each group of matrices of these shapes."""
    sizes = [size for count, size in shapes for _ in range(count)]
    return torch.tensor(sizes, dtype=torch.int32, device=device)


def update_all(update: Callable[..., tuple[Tensor, ...]], blocks: Sequence[Any], numbers: Any) -> None:
    """Update weights, momenta and second moments of blocks by a function of these, flags and numbers of each block."""
    for (x, g, m, v, flags), own in zip(
        blocks, numbers.unbind() if isinstance(numbers, Tensor) else numbers, strict=True
    ):
        rows = RowMath(g)
        y, new_m, new_v = update(rows, x, g, m, v.unsqueeze(1), flags, *own)
        x.copy_(y)
        m.copy_(new_m)
        if len(v):
            v.copy_(rows.spread(new_v).squeeze(1))
