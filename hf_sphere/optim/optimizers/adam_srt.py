"""Adam-SRT: Adam-S with rescaled and transported moments."""

from torch import Tensor

from hf_sphere.optim.optimizers.adam_s import AdamS
from hf_sphere.optim.rules import Block, Number, shrinks, transport_


class AdamSRT(AdamS):
    """Adam-S that rescales its second moment and transports its momentum to the new weights after each step.

    After the step from x to y: v = v <x, x> / <y, y> and m = (<x, y> m - <m, y> x) / <y, y>, so that both belong to
    the sphere at y. Arguments, groups and errors are those of `AdamS`.

    Source: Roburin et al., "A spherical perspective on learning with normalization layers", section 5, Adam SRT.

    Example:
        >>> optimizer = AdamSRT(radial_parameter_groups(network, images), lr=1e-3, betas=(0.9, 0.99))
    """

    def _transport(self, blocks: list[Block], moment: Tensor, length: Tensor, size: Tensor, shrink: Number) -> Tensor:
        new_length = transport_(blocks)
        if shrinks(shrink):
            for block in blocks:
                block.momentum.div_(shrink)
        return moment * (length / new_length).square_()
