"""Check of saved optimizer states."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_sphere.optim.base import SphereOptimizer


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Check a state before an optimizer loads it; a pre-hook of `Optimizer.load_state_dict`.

    The fused kernels of torch check neither shapes nor strides, and write beyond a tensor that is too small. Tensors
    are copied if their strides are not those of the parameter.

    Raises:
        ValueError: If a tensor does not fit its parameter; the message includes the name of both.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    owners = [(group, n, parameter) for group in optimizer.param_groups for n, parameter in enumerate(group["params"])]
    for index, (group, number, parameter) in zip(indices, owners, strict=False):  # torch compares the groups
        state = state_dict["state"].get(index, {})
        for key, value in state.items():
            name = group["param_names"][number] if group.get("param_names") else f"parameter {index}"
            if value is None:  # the momentum of SGD before its first step
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"{key} of {name} in the optimizer state is no tensor but {value!r:.50}")
            shape, dtype = _layout(optimizer, key, parameter, group)
            if value.shape != shape or value.dtype not in dtype:
                raise ValueError(
                    f"{key} of {name} in the optimizer state is {value.dtype} of shape {list(value.shape)}, which does "
                    f"not fit the parameter: {dtype[0]} of shape {list(shape)} expected"
                )
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _layout(
    optimizer: Optimizer, key: str, parameter: Tensor, group: dict[str, Any]
) -> tuple[torch.Size, tuple[torch.dtype, ...]]:
    """Return the shape and the possible dtypes of a tensor of the state."""
    if key == "step":
        return torch.Size(), (torch.float32, torch.float64)
    if isinstance(optimizer, SphereOptimizer):
        like = optimizer.initial_state(key, parameter, group)
        return like.shape, (like.dtype,)
    return parameter.shape, (parameter.dtype,)
