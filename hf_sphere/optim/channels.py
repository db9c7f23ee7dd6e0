"""`channel_dims`, the axes of a weight that index its groups, and the matrix of groups."""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, zeros

ChannelDims = tuple[int, ...]


def resolve_channel_dims(
    names: Sequence[str], parameters: Sequence[Tensor], channel_dims: Iterable[int] | None, channel_wise: bool
) -> ChannelDims | None:
    """Check `channel_dims` and `channel_wise` of a parameter group and merge them.

    Args:
        names: Names of the parameters, for messages.
        parameters: Parameters of the group.
        channel_dims: Axes that index the groups of weights; None for ordinary parameters.
        channel_wise: True is shorthand for `channel_dims=[0]`.

    Returns:
        The sorted axes, or None (ordinary parameters) if every group would have a single weight.

    Raises:
        ValueError: If an axis is out of range for a parameter or repeated, or the two options contradict each other.
    """
    if channel_wise:
        if channel_dims is not None and list(channel_dims) != [0]:
            raise ValueError(f"channel_wise=True means channel_dims=[0], but channel_dims is {list(channel_dims)}.")
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.ndim < 2:
                raise ValueError(
                    f"channel_wise=True requires weights with filters along axis 0; {name} has shape "
                    f"{list(parameter.shape)}. Put biases, norms and scalars in a group without it."
                )
        channel_dims = (0,)
    if channel_dims is None:
        return None
    if not isinstance(channel_dims, Iterable) or any(type(dim) is not int for dim in channel_dims):
        raise ValueError(f"channel_dims must be a list of axes such as [0], or None; got {channel_dims!r}.")
    dims = tuple(sorted(channel_dims))
    if len(set(dims)) != len(dims):
        raise ValueError(f"channel_dims repeats an axis: {list(dims)}.")
    for name, parameter in zip(names, parameters, strict=True):
        if dims and not 0 <= dims[0] <= dims[-1] < parameter.ndim:
            raise ValueError(
                f"channel_dims is {list(dims)}, but {name} has shape {list(parameter.shape)}: its axes are "
                f"{', '.join(map(str, range(parameter.ndim))) or 'none'}."
            )
    return None if parameters and all(len(dims) == parameter.ndim for parameter in parameters) else dims


def group_size(parameter: Tensor, dims: ChannelDims | None) -> int:
    """Count the weights D of one group: 1 for an ordinary parameter."""
    return 1 if dims is None else parameter.numel() // max(1, math.prod([parameter.shape[dim] for dim in dims]))


def zeros_per_group(parameter: Tensor, dims: ChannelDims, dtype: torch.dtype) -> Tensor:
    """Return one zero per group: the parameter's shape with 1 along all axes but `dims`, sharded like the parameter."""
    shape = [size if dim in dims else 1 for dim, size in enumerate(parameter.shape)]
    if isinstance(parameter, DTensor):
        return zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def check_shards(name: str, parameter: DTensor, dims: ChannelDims) -> None:
    """Check that a sharding keeps each group on a single process.

    Raises:
        RuntimeError: If the parameter is sharded along an axis that is not in `dims`, or is a partial sum.
    """
    for placement in parameter.placements:
        if placement.is_partial() or (isinstance(placement, Shard) and placement.dim not in dims):
            raise RuntimeError(
                f"{name} of shape {list(parameter.shape)} with channel_dims {list(dims)} is placed as "
                f"{list(parameter.placements)}, which splits its groups. Shard it along one of its channel_dims, "
                "replicate it, or make it ordinary (channel_dims=None)."
            )


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Layout:
    """Converts a weight and tensors of its shape to a matrix (K, D) of groups, a view where possible.

    Args:
        weight: The local shard of the weight.
        dims: Axes that index its groups.
    """

    def __init__(self, weight: Tensor, dims: ChannelDims) -> None:
        rest = [dim for dim in range(weight.ndim) if dim not in dims]
        # The order of the weights within a group is arbitrary; the order in memory makes the matrix a view.
        self._order = [*dims, *sorted(rest, key=weight.stride, reverse=True)]
        self._dims = dims
        self._natural = self._order == list(range(weight.ndim))
        self._permuted = [weight.shape[dim] for dim in self._order]
        self._shape = (math.prod(self._permuted[: len(dims)]), math.prod(self._permuted[len(dims) :]))

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix (K, D) of a tensor with the shape of the weight; a view where possible."""
        return (tensor if self._natural else tensor.permute(self._order)).reshape(self._shape)

    def write_back(self, tensor: Tensor, matrix: Tensor) -> None:
        """Copy a matrix to the tensor it was created from, unless it is a view of that tensor."""
        if matrix.dtype != tensor.dtype or not self._is_view(tensor):
            tensor.permute(self._order).copy_(matrix.view(self._permuted))

    def _is_view(self, tensor: Tensor) -> bool:
        axes = [axis for axis, size in zip(self._order, self._permuted, strict=True) if size != 1]
        pairs = [(i, j) for i, j in itertools.pairwise(axes) if (i in self._dims) == (j in self._dims)]
        return all(tensor.stride(i) == tensor.stride(j) * tensor.shape[j] for i, j in pairs)
