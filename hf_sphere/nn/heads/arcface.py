"""Cosine classification with an angular margin between the classes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.nn.heads.base import FIRST_LOG_TEMPERATURE
from hf_sphere.nn.heads.cosine import CosineHead


class ArcFaceHead(CosineHead):
    """Cosine head whose loss asks for the own class to be nearer by a margin: `cos(theta + m)` in its place.

    The margin acts on the loss alone; the logits are those of the cosine head. It is computed from cosine and sine of
    the angle, `cos(theta) cos(m) - sin(theta) sin(m)`, with the sine as the length of what the embedding has across its
    class: so the gradient is right and finite also where both coincide. For angles beyond pi - m, where the cosine of
    the sum would rise again, `cos(theta) - m sin(m)` takes its place.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_classes: Number of classes K.
        margin: Angle m in radians, from 0 to pi / 2.
        margin_warmup_epochs: Epochs without margin at the start, for training loops that call `set_epoch` (the
            recipes do); without such a call the margin is there from the start.
        log_temperature: See `TemperatureHead`. A fixed scale s of 64 is -4.16.
        temperature_lr: See `TemperatureHead`.
        label_smoothing: See `Head`.

    Reference:
        Deng, Guo, Xue and Zafeiriou, "ArcFace: additive angular margin loss for deep face recognition", CVPR 2019.
    """

    name = "arcface"

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        margin: float = 0.5,
        margin_warmup_epochs: int = 0,
        log_temperature: float = FIRST_LOG_TEMPERATURE,
        temperature_lr: float | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0.0 <= margin <= math.pi / 2:
            raise ValueError(f"margin is an angle in radians from 0 to pi / 2; got {margin}.")
        super().__init__(
            embedding_dim,
            num_classes,
            log_temperature=log_temperature,
            temperature_lr=temperature_lr,
            label_smoothing=label_smoothing,
        )
        self.margin = margin
        self.margin_warmup_epochs = margin_warmup_epochs
        self.set_epoch(margin_warmup_epochs)

    def set_epoch(self, epoch: int) -> None:
        """Let the margin act from epoch `margin_warmup_epochs` (from 0) on."""
        self.active_margin = self.margin if epoch >= self.margin_warmup_epochs else 0.0

    def compute_loss(self, points: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the logits, the own class with its margin."""
        margin = self.active_margin
        own = self.class_directions(points)[labels]
        cosine = (points * own).sum(-1, keepdim=True)
        sine = torch.linalg.vector_norm(points - cosine * own, dim=-1, keepdim=True)
        with_margin = torch.where(
            cosine > -math.cos(margin),
            cosine * math.cos(margin) - sine * math.sin(margin),
            cosine - margin * math.sin(margin),
        )
        logits = logits.scatter(1, labels[:, None], self.inverse_temperature() * with_margin)
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
