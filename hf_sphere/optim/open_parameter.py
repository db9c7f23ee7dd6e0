"""A parameter prepared for one step: its local shard, in the precision and shape for the computation."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_sphere.optim.channels import ChannelDims, Layout, local

LowPrecision = Literal["nearest", "stochastic", "master"]
LOW_PRECISION: tuple[str, ...] = get_args(LowPrecision)


class OpenParameter:
    """Weight, gradient and momentum of a parameter during one step.

    Args:
        parameter: A parameter with a gradient, which is only read.
        state: The optimizer's state of the parameter.
        low_precision: Rounding of the steps of low-precision weights.
        momentum_key: Key of the momentum in `state`.
        dims: The channel axes of a radial parameter; None for an ordinary one.

    Attributes:
        weight: Changed by the step: a matrix (K, D) of groups, or a tensor like the parameter if it is ordinary.
        gradient: With the shape of `weight`.
        momentum: With the shape and dtype of `weight`; empty if there is none.
    """

    def __init__(
        self, parameter: Tensor, state: dict[str, Any], low_precision: str, momentum_key: str, dims: ChannelDims | None
    ) -> None:
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
        self._held = self._worked_on = local(parameter.detach())
        self._kept = local(state[momentum_key]) if momentum_key in state else self._held.new_empty(0)
        self._rounding = low_precision if is_low(parameter.dtype) else None
        if self._rounding == "master":
            self._worked_on = local(state["master"])
        elif self._rounding == "stochastic" or (self._rounding and dims is not None):
            self._worked_on = self._held.to(at_least_float32(parameter.dtype))
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
        """Write the updated values to the parameter and its state.

        Args:
            seed: Seed of stochastic rounding; equal on all processes that hold the same weights.
        """
        if self._layout is not None:
            self._layout.write_back(self._worked_on, self.weight)
            self._layout.write_back(self._kept, self.momentum)
        if self._rounding == "stochastic":
            generator = torch.Generator(self._held.device).manual_seed(seed)
            self._held.copy_(round_stochastically(self._worked_on, generator))
        elif self._worked_on is not self._held:
            self._held.copy_(self._worked_on)


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype has fewer bits than float32."""
    return dtype.itemsize < 4


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float32 if is_low(dtype) else dtype


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities that keep the mean.

    Rounding to nearest loses every step below half the spacing of bfloat16 (1/256 of the value); stochastic rounding
    keeps it on average. Infinities and NaN are kept.

    Args:
        values: float32, any shape.
        generator: On the device of `values`.

    Returns:
        bfloat16, the same shape.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # bfloat16 is the upper half of float32: noise in the lower half carries with a probability proportional
    # to the remainder.
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).view(values.shape)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
