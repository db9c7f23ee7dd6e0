"""Classification by scaled cosines to class weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.temperature import TemperatureHead


class CosineHead(TemperatureHead):
    """Cross-entropy of `scale * cosine` between embedding and class weights; the scale is learned by default.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        **options: See `TemperatureHead`.

    Reference:
        Zhai and Wu, "Classification is a strong baseline for deep metric learning", BMVC 2019; the learned temperature
        as in Scott, Gallagher and Mozer, "von Mises-Fisher loss", ICCV 2021.
    """

    name = "cosine"

    def __init__(self, embedding_dim: int, num_classes: int, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize class weights and temperature."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Normalize: (B, d) -> (B, d), in float32 or better."""
        return self.normalize(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `scale * cosine`, float32 or better."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.inverse_temperature() * embeddings @ self.class_directions(embeddings).T

    def class_directions(self, embeddings: Tensor) -> Tensor:
        """Return the normalized class weights (K, d) in the dtype of the embeddings."""
        return F.normalize(self.weight.to(embeddings.dtype), dim=-1)

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """No weight decay for class weights: their norm has no effect."""
        return {"weight": {}, **super().parameter_options()}

    def directions(self) -> Tensor:
        """Return the normalized class weights."""
        return F.normalize(self.weight.detach(), dim=-1)
