"""Adam-SRT: Adam-S with rescaled and transported moments."""

from typing import Any

from torch import Tensor

from hf_sphere.optim.fast_step import RowMath
from hf_sphere.optim.layout import inner
from hf_sphere.optim.optimizers.adam_s import AdamS, Moments, adam_s


def adam_srt(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, **options: Any) -> Moments:
    """The rule of Adam-SRT: Adam-S, then the moments are rescaled and transported to the new weights y."""
    y, m, v = adam_s(x, g, m, v, t, lr, **options)
    v = v * inner(x, x) / inner(y, y)
    m = (inner(x, y) * m - inner(m, y) * x) / inner(y, y)
    return y, m, v


class AdamSRT(AdamS):
    """Adam-S that rescales its second moment and transports its momentum to the new weights after each step.

    Then both moments belong to the sphere at these weights; the rule is the function `adam_srt`. For arguments, groups
    and errors, see `AdamS`.

    Reference:
        Roburin et al., "A spherical perspective on learning with normalization layers", section 5, Adam SRT.

    Example:
        >>> optimizer = AdamSRT(scale_invariant_groups(network, images), lr=1e-3, betas=(0.9, 0.99))
    """

    @classmethod
    def _moved(cls, rows: RowMath, x: Any, y: Any, m: Any, v: Tensor, *about: Any) -> tuple[Any, Any, Tensor]:
        m, new_length = rows.transport(x, y, m, *about)
        return y, m, v * (about[0] / new_length).square()
