"""Adam-S: Adam with one second moment per group of scale-invariant weights."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from hf_sphere.optim.fast_step import Number, RowMath
from hf_sphere.optim.layout import OpenParameter, inner, local
from hf_sphere.optim.sphere_optimizer import Group, SphereOptimizer

Moments = tuple[Tensor, Tensor, Tensor]


def adam_s(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, *,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, shrink: float = 1.0,
) -> Moments:  # fmt: skip
    """The rule of Adam-S: one second moment per group, so that the step keeps the direction of the momentum.

    Like every rule, it maps the weights x, (K, D) with a group per row, and the moments m, (K, D), and v, (K, 1), which
    are zero before step t = 1, to new ones. L2 weight decay is part of the gradient g, (K, D), as g + weight_decay x,
    and `shrink` is 1 - lr weight_decay for decoupled weight decay. Other options are those of `AdamS`.
    """
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * inner(g, g)
    step = x.shape[1] ** 0.5 * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return shrink * x - lr * step, m, v


class AdamS(SphereOptimizer, torch.optim.Adam):
    """Adam with one second moment per group, so that the step keeps the direction of the momentum.

    The rule is the function `adam_s`. Meant for weights whose scale is removed by a normalization layer;
    `scale_invariant_groups(model)` finds them. Parameters in groups without `channel_dims` (the last layer,
    embeddings, norms, biases) follow torch's Adam, bit for bit. The state of a scale-invariant weight is one
    number per weight and one per group.

    Args:
        params: Parameters, or parameter groups with separate options.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root of the second moment, which for a group is a sum of D squares.
        weight_decay: L2 penalty, added to the gradient (never to `.grad`), as in the paper.
        channel_dims: Axes that index the groups: `[0]` for each filter (before BatchNorm), `[]` for the entire tensor
            (before LayerNorm); None for ordinary parameters. Usually given per parameter group.
        low_precision: For weights in bfloat16 or float16: `nearest` rounds each step (as torch does), `stochastic`
            (bfloat16) rounds at random so that small steps are kept on average, `master` keeps a float32 copy as the
            actual weight: values written into the parameter from outside are lost at the next step.
        decoupled_weight_decay: Shrink the weights by `lr * weight_decay` instead, as AdamW does.
        foreach: Update the groups of all tensors at once (True) or tensor by tensor (False); by default in portions
            that fit the cache on a CPU. On a GPU, portions of at most 33.6 million weights limit the temporary memory.
        maximize: Maximize the objective.
        compile: Compile the update of the scale-invariant weights; see `SphereOptimizer`.
        capturable: For CUDA graphs: keep the step count on the device. A learning rate that changes between replays
            must be a tensor on the device; a Python number is constant in the graph.
        fused: Use torch's fused kernel for ordinary parameters.

    Raises:
        ValueError: If an option is out of range, not supported (`amsgrad`, `differentiable`) or does not fit.

    Reference:
        Roburin et al., "A spherical perspective on learning with normalization layers", section 5.

    Example:
        >>> optimizer = AdamS(scale_invariant_groups(network, images), lr=1e-3, weight_decay=1e-4)
    """

    momentum_key = "exp_avg"
    has_second_moment = True
    scales_with_dim: ClassVar[bool] = True
    """Whether the step has the factor sqrt(D)."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)

    def _numbers_of_rule(self, group: Group, t: Number, lr: Number, dim: Number) -> tuple[Number, ...]:
        beta1, beta2 = group["betas"]
        size = lr / (1 - beta1**t) * (dim**0.5 if self.scales_with_dim else 1.0)
        return 1 - beta1, 1 - beta2, size, 1 - beta2**t, group["eps"]

    @classmethod
    def _accumulate(cls, rows: RowMath, g: Any, m: Any, v: Tensor, *numbers: Number) -> tuple[Any, Tensor, Number]:
        weight1, weight2, size, bias2, eps = numbers
        m, v = rows.lerp(m, g, weight1), torch.lerp(v, rows.inner(g, g), weight2)
        return m, v, size / ((v / bias2).sqrt() + eps)

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[OpenParameter]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        same = ("foreach", "capturable", "fused", "decoupled_weight_decay", "lr", "weight_decay", "eps", "maximize")
        adam(
            [parameter.weight for parameter in opened],
            [parameter.gradient for parameter in opened],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in same},
        )
