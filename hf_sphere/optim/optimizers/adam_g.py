"""Adam-G: Adam on groups of scale-invariant weights with unit norm."""

from typing import Any

import torch
from torch import Tensor

from hf_sphere.optim.fast_step import RowMath
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
    norm to the sphere. For arguments, groups and errors, see `AdamS`.

    Reference:
        Cho and Lee, "Riemannian approach to batch normalization" (NeurIPS 2017), algorithm 4.

    Example:
        >>> optimizer = AdamG(scale_invariant_groups(network, images), lr=1e-2, betas=(0.9, 0.99))
    """

    scales_with_dim = False

    @classmethod
    def _moved(cls, rows: RowMath, x: Any, y: Any, m: Any, v: Tensor, *about: Any) -> tuple[Any, Any, Tensor]:
        m, new_length = rows.transport(x, y, m, *about)
        length, size, *_ = about
        # torch creates the state by a step with learning rate 0, which must not change the weights.
        y = rows.scale(y, torch.where(size == 0, 1.0, 1 / new_length))
        return y, rows.scale(m, new_length / length), v
