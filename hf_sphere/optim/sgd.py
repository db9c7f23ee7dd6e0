"""SGD-MRT: SGD whose momentum is rescaled and transported along the sphere."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from hf_sphere.optim.base import Group, SphereOptimizer
from hf_sphere.optim.blocks import Block
from hf_sphere.optim.open_parameter import OpenParameter
from hf_sphere.optim.precision import LowPrecision
from hf_sphere.optim.rules import Number, is_zero, lengths, shrinks, transport_


class SGDMRT(SphereOptimizer, torch.optim.SGD):
    """SGD with momentum that is rescaled and transported to where each step leads.

    b = momentum b + (1 - dampening) g; y = x - lr b; b = (<x, y> b - <b, y> x) / <y, y>

    with <., .> over the weights of a group. Meant for weights whose scale a normalisation layer takes away;
    `radial_parameter_groups(model)` finds them. Parameters in groups without `channel_dims` get torch's SGD, bit for
    bit, and so do all where `momentum` is 0, as there is nothing to transport. One thing differs: b starts from
    zero, so dampening acts on the first gradient too, as in the paper; torch's SGD lets the first gradient in whole.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: Learning rate, a number or a tensor of one element.
        momentum: Factor of the momentum, not negative.
        dampening: Share of the gradient that is kept out of the momentum.
        weight_decay: L2 penalty, added to the gradient (never to `.grad`), as in the paper.
        channel_dims: See `AdamS`.
        channel_wise: Short for `channel_dims=[0]`.
        decoupled_weight_decay: Shrink the weights by `lr * weight_decay` instead.
        low_precision: See `AdamS`.
        foreach: See `AdamS`.
        maximize: Climb instead of descending.
        capturable: For CUDA graphs.
        differentiable: Refused.
        fused: Use torch's fused kernel for ordinary parameters.

    Raises:
        ValueError: If a setting is out of range or does not fit a parameter.

    Source: Roburin et al., "A spherical perspective on learning with normalization layers", section 5, SGD-MRT.

    Example:
        >>> optimizer = SGDMRT(radial_parameter_groups(model), lr=0.1, momentum=0.9, weight_decay=2.5e-4)
    """

    momentum_key = "momentum_buffer"
    has_second_moment = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        channel_dims: Sequence[int] | None = None,
        channel_wise: bool = False,
        decoupled_weight_decay: bool = False,
        low_precision: LowPrecision = "nearest",
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        own = {
            "channel_dims": channel_dims,
            "channel_wise": channel_wise,
            "low_precision": low_precision,
            "decoupled_weight_decay": decoupled_weight_decay,
            "capturable": capturable,
        }
        super().__init__(
            params,
            own,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )

    def check_settings(self, settings: Group) -> None:
        """Refuse settings out of range; see the base class."""
        super().check_settings(settings)
        for name in ("momentum", "dampening"):
            if not isinstance(settings[name], (int, float)) or not settings[name] >= 0.0:
                raise ValueError(f"{name} must be a number that is not negative; got {settings[name]!r}.")

    def _keeps_momentum(self, group: Group) -> bool:
        return group["momentum"] != 0

    def _rule(
        self, blocks: list[Block], scratch: Sequence[Tensor | None], group: Group, decay: float, shrink: Number
    ) -> None:
        weights, momenta = [block.weight for block in blocks], [block.momentum for block in blocks]
        stay = [_at_zero(weight) for weight in weights]
        self._sgd(weights, [block.gradient for block in blocks], momenta, group, decay, shrink)
        for weight, rows in zip(weights, stay, strict=True):
            if rows is not None:
                weight.masked_fill_(rows.unsqueeze(1), 0.0)
        transport_(momenta, weights, scratch)
        if shrinks(shrink):
            torch._foreach_div_(momenta, shrink)

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[OpenParameter]) -> None:
        for parameter in parameters:
            self.state[parameter]["step"] += 1
        decay, shrink = self._decay(group)
        momenta = [part.momentum for part in opened]
        self._sgd([part.weight for part in opened], [part.gradient for part in opened], momenta, group, decay, shrink)

    def _sgd(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        momenta: Sequence[Tensor],
        group: Group,
        decay: float,
        shrink: Number,
    ) -> None:
        if shrinks(shrink):
            torch._foreach_mul_(weights, shrink)
        lr = group["lr"]
        later = isinstance(lr, Tensor) and group["capturable"] and group["momentum"] != 0
        sgd(
            weights,
            [g.to(w.dtype) for g, w in zip(gradients, weights, strict=True)],
            # Zeros before the first step; torch takes None for no momentum at all.
            list(momenta) if group["momentum"] else [None] * len(weights),
            foreach=group["foreach"],
            fused=group["fused"],
            weight_decay=decay,
            momentum=group["momentum"],
            lr=0.0 if later else lr,
            dampening=group["dampening"],
            nesterov=False,
            maximize=group["maximize"],
        )
        if later:  # torch's SGD reads the learning rate on the host, which a captured graph cannot
            for weight, momentum in zip(weights, momenta, strict=True):
                weight.addcmul_(momentum, lr.to(weight.dtype), value=-1)


def _at_zero(weight: Tensor) -> Tensor | None:
    """Which groups are at zero; None where none is, which the first weights mostly tell at no cost on a CPU."""
    if weight.device.type == "cpu" and not torch.compiler.is_compiling() and weight[:, 0].all():
        return None
    return is_zero(lengths([weight]))
