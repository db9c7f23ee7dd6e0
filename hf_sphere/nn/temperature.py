"""Base class of the heads with a temperature."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hf_sphere.nn.heads.base import Head

INITIAL_LOG_TEMPERATURE = -2.773
"""Default initial value of a learned temperature: a scale of 16, which is the largest possible logit."""


class TemperatureHead(Head):
    """Base class of heads whose bounded logits are multiplied by a scale, the inverse of a temperature.

    The scale is learned by default, through the logarithm of the temperature.

    Args:
        embedding_dim: See `Head`.
        num_classes: See `Head`.
        log_temperature: Initial logarithm of a learned temperature, so that the initial scale is exp(-log_temperature);
            if None, that of `default_scale`, or -2.773, a scale of 16.
        scale: A positive number for a fixed scale; `learned` for a learned one; `default_scale` if None. To learn it
            from another initial value, set `log_temperature = -log(scale)` instead.
        temperature_lr: Learning rate of a learned `log_temperature`; that of the other parameters if None. The recipes
            and `SphereTrainer` train it without momentum and weight decay; the stock Trainer trains it like any other
            parameter.
        **options: See `Head`.

    Raises:
        ValueError: If both `log_temperature` and `scale` are given, a fixed scale has a learning rate, or a value is
            out of range.
    """

    log_temperature: Tensor
    default_scale: ClassVar[float | None] = None
    """Fixed scale if neither `scale` nor `log_temperature` is given; None for a learned one."""

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        log_temperature: float | None = None,
        scale: float | Literal["learned"] | None = None,
        temperature_lr: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        if log_temperature is not None and scale is not None:
            raise ValueError(
                f"log_temperature {log_temperature} and scale {scale!r} are mutually exclusive: the first is for a "
                "learned scale with the initial value exp(-log_temperature). Set only one of them."
            )
        if temperature_lr is not None and not temperature_lr >= 0.0:
            raise ValueError(f"temperature_lr must not be negative; got {temperature_lr}.")
        if log_temperature is None and scale is None:
            scale = self.default_scale
        if log_temperature is None:
            log_temperature = -math.log(self.default_scale) if self.default_scale else INITIAL_LOG_TEMPERATURE
        self.initial_log_temperature = float(log_temperature)
        self.temperature_lr = temperature_lr
        if scale is None or scale == "learned":
            self.log_temperature = nn.Parameter(torch.tensor(self.initial_log_temperature))
            return
        if isinstance(scale, str) or not 0.0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, which fixes it, or 'learned'; got {scale!r}.")
        if temperature_lr is not None:
            raise ValueError(f"temperature_lr {temperature_lr} needs a learned scale, but scale {scale} is fixed.")
        self.initial_log_temperature = -math.log(scale)
        self.register_buffer("log_temperature", torch.tensor(self.initial_log_temperature))

    def reset_parameters(self) -> None:
        """Set the temperature to its initial value."""
        nn.init.constant_(self.log_temperature, self.initial_log_temperature)

    def inverse_temperature(self) -> Tensor:
        """Return the scale `exp(-log_temperature)`, a scalar of float32 or better."""
        return self.upcast(self.log_temperature).neg().exp()

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """A learned temperature has its own learning rate and no momentum."""
        if not isinstance(self.log_temperature, nn.Parameter):
            return {}
        lr = {} if self.temperature_lr is None else {"lr": self.temperature_lr}
        return {"log_temperature": {"momentum": 0.0, **lr}}
