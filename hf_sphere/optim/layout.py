"""`channel_dims`, the axes of a weight that index its groups, the matrix of groups, and the precision of a step."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

ChannelDims = tuple[int, ...]
Matrices = tuple[int, ...]
"""Axis along which the matrices in a tensor lie, followed by their sizes along it: 1 each in a stack."""
Parts = dict[str, tuple[Matrices, str]]


def group_size(parameter: Tensor, dims: ChannelDims | None) -> int:
    """Count the weights D of one group: 1 for an ordinary parameter."""
    return 1 if dims is None else parameter.numel() // max(1, math.prod([parameter.shape[dim] for dim in dims]))


def check_shards(name: str, parameter: DTensor, dims: ChannelDims) -> None:
    """Raise a `RuntimeError` if a parameter is a partial sum, or sharded along an axis that is not in `dims`."""
    for placement in parameter.placements:
        if placement.is_partial() or (isinstance(placement, Shard) and placement.dim not in dims):
            what = f"channel_dims {list(dims)} is placed as {list(parameter.placements)}, which splits its groups"
            how = "Shard it along one of its channel_dims, replicate it, or make it ordinary (channel_dims=None)"
            raise RuntimeError(f"{name} of shape {list(parameter.shape)} with {what}. {how}.")


def check_axes(name: str, parameter: Tensor) -> None:
    """Raise a `RuntimeError` if a weight has a single axis."""
    if parameter.ndim < 2:
        what = f"{name} of shape {list(parameter.shape)} is no matrix or kernel; FSDP1 and DeepSpeed flatten weights"
        how = "Use FSDP2 (fully_shard), which keeps their shapes, or update this weight by the rule adamw"
        raise RuntimeError(f"{what}. {how}.")


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the entire tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of the rows of two matrices (K, D): (K, 1)."""
    return (a * b).sum(1, keepdim=True)


class Layout:
    """Converts a weight and tensors of its shape to a matrix (K, D) with a group per row, a view where possible."""

    def __init__(self, weight: Tensor, dims: ChannelDims) -> None:
        within = [dim for dim in range(weight.ndim) if dim not in dims]
        # The order of the weights within a group is arbitrary. With that in memory, the largest stride first, the axes
        # merge into one without a copy, whatever the memory format.
        self._order = [*dims, *sorted(within, key=weight.stride, reverse=True)]
        self._dims = dims
        self._natural = self._order == list(range(weight.ndim))
        self._permuted = [weight.shape[dim] for dim in self._order]
        self._shape = (math.prod(self._permuted[: len(dims)]), math.prod(self._permuted[len(dims) :]))

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix (K, D) of a tensor with the shape of the weight; a view where possible."""
        return (tensor if self._natural else tensor.permute(self._order)).reshape(self._shape)

    def write_back(self, tensor: Tensor, matrix: Tensor) -> None:
        """Copy a matrix to the tensor it was created from, unless it is a view of that tensor."""
        # It is a view if neighboring axes i, j of a side merge, as the stride of i is that of j times its size.
        axes = [axis for axis, size in zip(self._order, self._permuted, strict=True) if size != 1]
        pairs = [(i, j) for i, j in itertools.pairwise(axes) if (i in self._dims) == (j in self._dims)]
        is_view = all(tensor.stride(i) == tensor.stride(j) * tensor.shape[j] for i, j in pairs)
        if matrix.dtype != tensor.dtype or not is_view:
            tensor.permute(self._order).copy_(matrix.view(self._permuted))


class OpenParameter:
    """Weight, gradient and momentum (empty if there is none) of a parameter during one step, on its local shard.

    They are matrices (K, D) of groups, or tensors like the parameter if it is ordinary.
    """

    def __init__(
        self, parameter: Tensor, state: dict[str, Any], low_precision: str, momentum_key: str, dims: ChannelDims | None
    ) -> None:
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
        self._held = self._worked_on = local(parameter.detach())
        self._kept = local(state[momentum_key]) if momentum_key in state else self._held.new_empty(0)
        self._rounding = low_precision if parameter.dtype.itemsize < 4 else None
        if self._rounding == "master":
            self._worked_on = local(state["master"])
        elif self._rounding == "stochastic" or (self._rounding and dims is not None):
            self._worked_on = self._held.float()
        self.weight, self.gradient, self.momentum = self._worked_on, gradient, self._kept
        self._layout = None
        if dims is not None:
            self._layout = Layout(self._worked_on, dims)
            self.weight = self._layout.matrix(self._worked_on)
            self.gradient = self._layout.matrix(gradient).contiguous()
            self.momentum = self._layout.matrix(self._kept).to(self.weight.dtype)
        elif gradient.dtype != self.weight.dtype or gradient.stride() != self.weight.stride():
            self.gradient = torch.empty_like(self.weight).copy_(gradient)  # torch's fused kernels assume one layout

    def close(self, seed: int) -> None:
        """Write the updated values to the parameter and its state; the seed is that of stochastic rounding."""
        if self._layout is not None:
            self._layout.write_back(self._worked_on, self.weight)
            self._layout.write_back(self._kept, self.momentum)
        if self._rounding == "stochastic":
            generator = torch.Generator(self._held.device).manual_seed(seed)
            self._held.copy_(round_stochastically(self._worked_on, generator))
        elif self._worked_on is not self._held:
            self._held.copy_(self._worked_on)


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities that keep the mean; infinities and NaN are kept."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # bfloat16 is the upper half of float32: noise in the lower half carries with a probability proportional
    # to the remainder.
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).view(values.shape)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
