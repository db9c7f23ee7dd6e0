"""Cosine classification with a margin in the cosine between the classes."""

from typing import Any

from torch import Tensor

from hf_sphere.nn.heads.cosine import MarginHead


class CosFaceHead(MarginHead):
    """Cosine head whose loss subtracts a margin m from the cosine of the own class.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        margin: Cosine m, from 0 to 1.
        **options: See `MarginHead`; `scale` is 64 by default, as in the paper.

    Reference:
        Wang et al., "CosFace: large margin cosine loss for deep face recognition", CVPR 2018.
    """

    name = "cosface"
    default_scale = 64.0

    def __init__(self, embedding_dim: int, num_classes: int, *, margin: float = 0.35, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, margin=margin, **options)

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute `scale * (cos(theta) - m)`: (B,)."""
        return super().target_logits(embeddings, directions) - self.inverse_temperature() * self.active_margin
