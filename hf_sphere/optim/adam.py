"""Adam-S, Adam-SRT and Adam-G: Adam whose second moment is one number a group of scale-invariant weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from hf_sphere.optim.base import Group, SphereOptimizer
from hf_sphere.optim.blocks import Block, spread
from hf_sphere.optim.channels import local
from hf_sphere.optim.open_parameter import OpenParameter
from hf_sphere.optim.precision import LowPrecision
from hf_sphere.optim.rules import Number, accumulate_, adam_step_size, is_zero, lengths, shrinks, step_, transport_


class AdamS(SphereOptimizer, torch.optim.Adam):
    """Adam on the sphere: the second moment is one number a group, so that it cannot bend the direction of the step.

    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) <g, g>;
    x = x - lr sqrt(D) (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    with <., .> over the D weights of a group. Meant for weights whose scale a normalisation layer takes away;
    `radial_parameter_groups(model)` finds them. Parameters in groups without `channel_dims` (the last layer,
    embeddings, norms, biases) get torch's Adam, bit for bit. The state of a radial weight is one number a weight and
    one a group.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root of the second moment, which for a group is a sum of D squares.
        weight_decay: L2 penalty, added to the gradient (never to `.grad`), as in the paper.
        channel_dims: Axes that number the groups: `[0]` for each filter (before BatchNorm), `[]` for the whole tensor
            (before LayerNorm); None for ordinary parameters. Usually given by parameter group.
        channel_wise: Short for `channel_dims=[0]`.
        decoupled_weight_decay: Shrink the weights by `lr * weight_decay` instead, as AdamW does.
        low_precision: For weights in bfloat16 or float16: `nearest` rounds each step (as torch does), `stochastic`
            (bfloat16) rounds at random so that small steps count on average, `master` keeps a float32 copy, which
            then is the weight: what is written into the parameter from outside is lost at the next step.
        foreach: Take the numbers of all groups of a tensor list through the rule at once (True) or tensor by tensor
            (False); by default at once on a GPU and in portions that fit the cache on a CPU.
        maximize: Climb instead of descending.
        capturable: For CUDA graphs: keep the step count on the device. A learning rate that is to change between
            replays is a tensor on the device; a number is captured as it is.
        differentiable: Refused.
        fused: Use torch's fused kernel for ordinary parameters.

    Raises:
        ValueError: If a setting is out of range or does not fit a parameter.

    Source: Roburin et al., "A spherical perspective on learning with normalization layers", section 5.

    Example:
        >>> optimizer = AdamS(radial_parameter_groups(model), lr=1e-3, weight_decay=1e-4)
    """

    momentum_key = "exp_avg"
    has_second_moment = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
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
        own = {"channel_dims": channel_dims, "channel_wise": channel_wise, "low_precision": low_precision}
        super().__init__(
            params,
            own,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def check_settings(self, settings: Group) -> None:
        """Refuse settings out of range; see the base class."""
        super().check_settings(settings)
        betas, eps = settings["betas"], settings["eps"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(_is_rate, betas)):
            raise ValueError(f"betas must be two numbers in [0, 1); got {betas!r}.")
        if not isinstance(eps, (int, float)) or not eps >= 0.0:
            raise ValueError(f"eps must be a number that is not negative; got {eps!r}.")

    def _rule(
        self, blocks: list[Block], scratch: Sequence[Tensor | None], group: Group, decay: float, shrink: Number
    ) -> None:
        beta1, beta2 = group["betas"]
        options = {"keep": beta1, "decay": decay, "maximize": group["maximize"]}
        gradient = torch.cat(
            [
                accumulate_(b.momentum, b.gradient, b.weight, scratch=room, **options)
                for b, room in zip(blocks, scratch, strict=True)
            ]
        )
        length = lengths([block.weight for block in blocks])
        moment = torch.cat([block.second_moment for block in blocks]).lerp_(gradient.square_(), 1 - beta2)
        step_size = adam_step_size(
            moment,
            lr=group["lr"],
            bias1=spread([1 - beta1**block.step for block in blocks], blocks),
            bias2=spread([1 - beta2**block.step for block in blocks], blocks),
            eps=group["eps"],
            dim=self._dim(blocks),
        ).masked_fill_(is_zero(length), 0.0)
        counts = [block.weight.shape[0] for block in blocks]
        for block, size in zip(blocks, step_size.split(counts), strict=True):
            step_(block.weight, block.momentum, size, shrink)
        moment = self._carry_over(blocks, scratch, moment, length, step_size, shrink)
        for block, part in zip(blocks, moment.split(counts), strict=True):
            block.second_moment.copy_(part)

    def _dim(self, blocks: list[Block]) -> Number:
        return spread([float(block.weight.shape[1]) for block in blocks], blocks)

    def _carry_over(
        self,
        blocks: list[Block],
        scratch: Sequence[Tensor | None],
        second_moment: Tensor,
        length: Tensor,
        step_size: Tensor,
        shrink: Number,
    ) -> Tensor:
        """Carry the moments over to the new weights.

        Args:
            blocks: After the step.
            scratch: Room for a matrix like each block's.
            second_moment: Of all groups, (K,).
            length: |x| of the weights before the step, (K,).
            step_size: Of the step, (K,).
            shrink: Factor of decoupled weight decay, else 1.

        Returns:
            The new second moment.
        """
        return second_moment

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[OpenParameter]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adam(
            [part.weight for part in opened],
            [part.gradient for part in opened],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class AdamSRT(AdamS):
    """Adam-S that rescales its second moment and transports its momentum to where each step leads.

    After the step from x to y: v = v <x, x> / <y, y> and m = (<x, y> m - <m, y> x) / <y, y>, so that both belong to
    the sphere at y. Arguments, groups and errors are those of `AdamS`.

    Source: Roburin et al., "A spherical perspective on learning with normalization layers", section 5, Adam SRT.

    Example:
        >>> optimizer = AdamSRT(radial_parameter_groups(model), lr=1e-3, betas=(0.9, 0.99))
    """

    def _carry_over(
        self,
        blocks: list[Block],
        scratch: Sequence[Tensor | None],
        second_moment: Tensor,
        length: Tensor,
        step_size: Tensor,
        shrink: Number,
    ) -> Tensor:
        new_length = transport_([b.momentum for b in blocks], [b.weight for b in blocks], scratch)
        if shrinks(shrink):
            for block in blocks:
                block.momentum.div_(shrink)
        return second_moment * (length / new_length).square_()


class AdamG(AdamS):
    """Adam with groups on the unit sphere: every step returns to norm 1, and the momentum is transported along.

    The step is Adam-S's without sqrt(D) (so a learning rate of about 1e-2 suits it), the weights are divided by their
    norm, and m = (<x, y> m - <m, y> x) / (|x| |y|). The first step brings weights of another norm to the sphere.
    Arguments, groups and errors are those of `AdamS`.

    Source: Cho and Lee, "Riemannian approach to batch normalization" (NeurIPS 2017), algorithm 4.

    Example:
        >>> optimizer = AdamG(radial_parameter_groups(model), lr=1e-2, betas=(0.9, 0.99))
    """

    def _dim(self, blocks: list[Block]) -> Number:
        return 1.0

    def _carry_over(
        self,
        blocks: list[Block],
        scratch: Sequence[Tensor | None],
        second_moment: Tensor,
        length: Tensor,
        step_size: Tensor,
        shrink: Number,
    ) -> Tensor:
        new_length = transport_([b.momentum for b in blocks], [b.weight for b in blocks], scratch)
        counts = [block.weight.shape[0] for block in blocks]
        scale = (new_length / length).div_(shrink).unsqueeze(1).split(counts)
        # A step of size 0 (torch makes one to learn what the state is like) is none.
        new_length = new_length.masked_fill(step_size == 0, 1.0)
        for block, own_scale, own_length in zip(blocks, scale, new_length.unsqueeze(1).split(counts), strict=True):
            block.momentum.mul_(own_scale)
            block.weight.div_(own_length)
        return second_moment


def _is_rate(beta: Any) -> bool:
    return isinstance(beta, (int, float)) and 0.0 <= beta < 1.0
