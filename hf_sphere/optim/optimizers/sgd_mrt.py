"""SGD-MRT: SGD whose momentum is rescaled and transported along the sphere."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from hf_sphere.optim.fast_step import Number, RowMath
from hf_sphere.optim.layout import OpenParameter, inner
from hf_sphere.optim.sphere_optimizer import Group, SphereOptimizer


def sgd_mrt(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, *,
    momentum: float = 0.9, dampening: float = 0.0, shrink: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The rule of SGD-MRT: SGD, then the momentum is rescaled and transported to the new weights y; see `adam_s`."""
    m = momentum * m + (1 - dampening) * g
    y = shrink * x - lr * m
    m = (inner(x, y) * m - inner(m, y) * x) / inner(y, y)
    return y, m, v


class SGDMRT(SphereOptimizer, torch.optim.SGD):
    """SGD with momentum that is rescaled and transported to the new weights after each step.

    The rule is the function `sgd_mrt`. Meant for weights whose scale is removed by a normalization layer;
    `scale_invariant_groups(model)` finds them. Parameters in groups without `channel_dims` follow torch's SGD, bit for
    bit, and so do all parameters if `momentum` is 0, as there is nothing to transport. One difference: the momentum
    starts from zero, so dampening applies to the first gradient too, as in the paper; torch's SGD does not dampen it.

    Args:
        params: Parameters, or parameter groups with separate options.
        lr: Learning rate, a number or a tensor of one element.
        momentum: Factor of the momentum, nonnegative.
        dampening: Dampening of the gradient in the momentum.
        weight_decay: L2 penalty, added to the gradient (never to `.grad`), as in the paper.
        **options: `channel_dims`, `low_precision`, `decoupled_weight_decay`, `foreach`, `maximize`,
            `compile`, `capturable` and `fused`; see `AdamS`.

    Raises:
        ValueError: If an option is out of range, not supported (`nesterov`, `differentiable`) or does not fit.

    Reference:
        Roburin et al., "A spherical perspective on learning with normalization layers", section 5, SGD-MRT.

    Example:
        >>> optimizer = SGDMRT(scale_invariant_groups(network, images), lr=0.1, momentum=0.9, weight_decay=2.5e-4)
    """

    momentum_key = "momentum_buffer"
    has_second_moment = False
    own_defaults = {**SphereOptimizer.own_defaults, "decoupled_weight_decay": False, "capturable": False}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, **options)

    def _keeps_momentum(self, group: Group) -> bool:
        return group["momentum"] != 0

    def _numbers_of_rule(self, group: Group, t: Number, lr: Number, dim: Number) -> tuple[Number, ...]:
        return group["momentum"], 1 - group["dampening"], lr

    @classmethod
    def _accumulate(cls, rows: RowMath, g: Any, m: Any, v: Tensor, *numbers: Number) -> tuple[Any, Tensor, Number]:
        momentum, weight, lr = numbers
        return rows.accumulate(m, g, momentum, weight), v, lr

    @classmethod
    def _moved(cls, rows: RowMath, x: Any, y: Any, m: Any, v: Tensor, *about: Any) -> tuple[Any, Any, Tensor]:
        m, _ = rows.transport(x, y, m, *about)
        return y, m, v

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[OpenParameter]) -> None:
        torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)
        decay, shrink = self._decay(group)
        weights = [parameter.weight for parameter in opened]
        momenta: list[Tensor | None] = [parameter.momentum for parameter in opened]
        if self._flags(group).shrinks:
            torch._foreach_mul_(weights, shrink)
        lr = group["lr"]
        later = isinstance(lr, Tensor) and group["capturable"] and group["momentum"] != 0
        sgd(
            weights,
            [parameter.gradient.to(parameter.weight.dtype) for parameter in opened],
            # Zeros before the first step; torch expects None without momentum.
            momenta if group["momentum"] else [None] * len(weights),
            weight_decay=decay,
            lr=0.0 if later else lr,
            nesterov=False,
            **{name: group[name] for name in ("foreach", "fused", "momentum", "dampening", "maximize")},
        )
        if later:  # torch's SGD reads the learning rate on the host, which a captured graph cannot do
            steps = torch._foreach_mul([parameter.momentum for parameter in opened], lr.squeeze().to(weights[0].dtype))
            torch._foreach_sub_(weights, steps)
