"""Adam-G: Adam on groups of scale-invariant weights with unit norm."""

from typing import Any

import torch
from torch import Tensor

from hf_sphere.optim.fast_step import Block, Number, Rows, split, transport_, transported
from hf_sphere.optim.layout import inner
from hf_sphere.optim.optimizers.adam_s import AdamS, Moments, adam_s


def adam_g(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, **options: Any) -> Moments:
    """The rule of Adam-G: Adam-S without the factor sqrt(D), a transported momentum, and weights of unit norm."""
    y, m, v = adam_s(x, g, m, v, t, lr / x.shape[1] ** 0.5, **options)
    m = (inner(x, y) * m - inner(m, y) * x) / (inner(x, x) * inner(y, y)).sqrt()
    return y / inner(y, y).sqrt(), m, v


class AdamG(AdamS):
    """Adam with groups on the unit sphere: every step ends at norm 1, and the momentum is transported.

    The rule is the function `adam_g`; a suitable learning rate is about 1e-2. The first step moves weights of another
    norm to the sphere. Arguments, groups and errors are those of `AdamS`.

    Reference:
        Cho and Lee, "Riemannian approach to batch normalization" (NeurIPS 2017), algorithm 4.

    Example:
        >>> optimizer = AdamG(radial_parameter_groups(network, images), lr=1e-2, betas=(0.9, 0.99))
    """

    scales_with_dim = False

    @classmethod
    def _moved(
        cls, rows: Rows, x: Tensor, y: Tensor, m: Tensor, v: Tensor, length: Tensor, size: Tensor, shrink: Number
    ) -> Moments:
        m, new_length = transported(rows, x, y, m, length, size, shrink)
        return (
            y / rows.spread(torch.where(size == 0, 1.0, new_length)),
            m * rows.spread(new_length / length),
            v,
        )

    def _transport(self, blocks: list[Block], moment: Tensor, length: Tensor, size: Tensor, shrink: Number) -> Tensor:
        new_length = transport_(blocks)
        scales = split((new_length / length).div_(shrink).unsqueeze(1), blocks)
        # torch creates the state by a step with learning rate 0, which must not change the weights.
        norms = split(new_length.masked_fill(size == 0, 1.0).unsqueeze(1), blocks)
        for block, scale, norm in zip(blocks, scales, norms, strict=True):
            block.momentum.mul_(scale)
            block.weight.div_(norm)
        return moment
