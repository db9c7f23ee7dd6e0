"""Classification by cosines to class weights, sharpened by a learned temperature."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.heads.base import FIRST_LOG_TEMPERATURE, TemperatureHead


class CosineHead(TemperatureHead):
    """Cross-entropy of `beta * cosine` between embedding and class weights, beta = exp(-log_temperature) learned.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        log_temperature: See `TemperatureHead`.
        temperature_lr: See `TemperatureHead`.
        label_smoothing: See `Head`.

    Reference:
        Zhai and Wu, "Classification is a strong baseline for deep metric learning", BMVC 2019; the learned temperature
        as in Scott, Gallagher and Mozer, "von Mises-Fisher loss", ICCV 2021.
    """

    name = "cosine"

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        log_temperature: float = FIRST_LOG_TEMPERATURE,
        temperature_lr: float | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            embedding_dim,
            num_classes,
            log_temperature=log_temperature,
            temperature_lr=temperature_lr,
            label_smoothing=label_smoothing,
        )
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise class weights and temperature."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)

    def represent(self, embeddings: Tensor) -> Tensor:
        """Normalise: (B, d) -> (B, d), in float32 or better."""
        return F.normalize(self.widen(embeddings), dim=-1)

    def classify(self, points: Tensor) -> Tensor:
        """Return `beta * cosine`, float32 or better."""
        with torch.autocast(points.device.type, enabled=False):
            return self.inverse_temperature() * points @ self.class_directions(points).T

    def class_directions(self, points: Tensor) -> Tensor:
        """Return the normalised class weights (K, d) in the dtype of the points."""
        return F.normalize(self.weight.to(points.dtype), dim=-1)

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """Class weights do not decay: their length has no meaning."""
        return {"weight": {}, **super().parameter_options()}

    def directions(self) -> Tensor:
        """Return the normalised class weights."""
        return F.normalize(self.weight.detach(), dim=-1)
