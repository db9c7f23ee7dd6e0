"""Cosine classification with an angular margin between the classes."""

import math
from typing import Any

import torch
from torch import Tensor

from hf_sphere.nn.heads.cosine import CosineHead


class ArcFaceHead(CosineHead):
    """Cosine head whose loss adds a margin m to the angle theta between embedding and target class.

    The margin affects the loss only; the logits are those of the cosine head. `cos(theta + m)` is computed as
    `cos(theta) cos(m) - sin(theta) sin(m)`, where the sine is the norm of the embedding's component orthogonal to the
    class weight, so that the gradient is correct and finite even at theta = 0. Beyond pi - m, where `cos(theta + m)`
    would increase again, `cos(theta) - m sin(m)` replaces it.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_classes: Number of classes K.
        margin: Angle m in radians, from 0 to pi / 2.
        margin_warmup_epochs: Number of initial epochs without a margin, for training loops that call `set_epoch` (the
            recipes do); without such calls the margin is active from the start.
        **options: See `TemperatureHead`; the paper has a fixed `scale` of 64.

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
        **options: Any,
    ) -> None:
        if not 0.0 <= margin <= math.pi / 2:
            raise ValueError(f"margin is an angle in radians from 0 to pi / 2; got {margin}.")
        super().__init__(embedding_dim, num_classes, **options)
        self.margin = margin
        self.margin_warmup_epochs = margin_warmup_epochs
        self.set_epoch(margin_warmup_epochs)

    def set_epoch(self, epoch: int) -> None:
        """Activate the margin once `margin_warmup_epochs` epochs have passed."""
        self.active_margin = self.margin if epoch >= self.margin_warmup_epochs else 0.0

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy of each example, with the margin in the logit of the target class: (B,)."""
        margin = self.active_margin
        target = self.class_directions(embeddings)[labels]
        cosine = (embeddings * target).sum(-1, keepdim=True)
        sine = torch.linalg.vector_norm(embeddings - cosine * target, dim=-1, keepdim=True)
        with_margin = torch.where(
            cosine > -math.cos(margin),
            cosine * math.cos(margin) - sine * math.sin(margin),
            cosine - margin * math.sin(margin),
        )
        logits = logits.scatter(1, labels[:, None], self.inverse_temperature() * with_margin)
        return super().compute_loss(embeddings, logits, labels)
