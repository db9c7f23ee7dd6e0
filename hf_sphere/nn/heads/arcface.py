"""Cosine classification with an angular margin between the classes."""

import math
from typing import Any

import torch
from torch import Tensor

from hf_sphere.nn.heads.cosine import MarginHead, cosine_and_sine


class ArcFaceHead(MarginHead):
    """Cosine head whose loss adds a margin m to the angle theta between embedding and target class.

    `cos(theta + m)` is computed as `cos(theta) cos(m) - sin(theta) sin(m)`. Beyond pi - m, where it would increase
    again, `cos(theta) - m sin(m)` replaces it.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_classes: Number of classes K.
        margin: Angle m in radians, from 0 to pi / 2.
        **options: See `MarginHead`; the paper has a fixed `scale` of 64.

    Reference:
        Deng, Guo, Xue and Zafeiriou, "ArcFace: additive angular margin loss for deep face recognition", CVPR 2019.
    """

    name = "arcface"
    max_margin = math.pi / 2

    def __init__(self, embedding_dim: int, num_classes: int, *, margin: float = 0.5, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, margin=margin, **options)

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute `scale * cos(theta + m)`: (B,)."""
        margin = self.active_margin
        cosine, sine = cosine_and_sine(embeddings, directions)
        with_margin = torch.where(
            cosine > -math.cos(margin),
            cosine * math.cos(margin) - sine * math.sin(margin),
            cosine - margin * math.sin(margin),
        )
        return self.inverse_temperature() * with_margin
