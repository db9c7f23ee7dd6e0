"""Cosine classification with an angular margin and several class weights per class."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.heads.arcface import ArcFaceHead


class SubCenterArcFaceHead(ArcFaceHead):
    """ArcFace with C weights (sub-centers) per class, of which the nearest one to an embedding counts.

    Noisy labels then gather at the sub-centers that are not dominant. A class has no single direction, so `directions`
    is None.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_classes: Number of classes K.
        sub_centers: Number C of weights per class.
        **options: See `ArcFaceHead`; `scale` is 64 by default, as in the paper.

    Raises:
        ValueError: If `sub_centers` is not positive.

    Reference:
        Deng, Guo, Liu, Gong and Zafeiriou, "Sub-center ArcFace: boosting face recognition by large-scale noisy web
        faces", ECCV 2020.
    """

    name = "subcenter_arcface"
    default_scale = 64.0

    def __init__(self, embedding_dim: int, num_classes: int, *, sub_centers: int = 3, **options: Any) -> None:
        if sub_centers < 1:
            raise ValueError(f"sub_centers must be at least 1; got {sub_centers}.")
        super().__init__(embedding_dim, num_classes, **options)
        self.weight = nn.Parameter(torch.empty(num_classes, sub_centers, embedding_dim))
        self.reset_parameters()
        self.keep_own_classes()

    def reset_parameters(self) -> None:
        """Initialize sub-centers and temperature."""
        super().reset_parameters()
        bound = math.sqrt(6.0 / (self.weight[..., 0].numel() + self.embedding_dim))
        nn.init.uniform_(self.weight, -bound, bound)  # as the matrix of all sub-centers would be

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `scale * cosine` to the nearest sub-center of each class, float32 or better."""
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.inverse_temperature() * embeddings @ self.class_directions(embeddings).flatten(0, 1).T
            return logits.unflatten(1, (-1, self.weight.shape[1])).max(-1).values

    def target_directions(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the nearest sub-centers (B, d) of the classes `labels` (B,) to embeddings (B, d)."""
        with torch.no_grad():
            centers = self.weight[labels].to(embeddings.dtype)
            norms = torch.linalg.vector_norm(centers, dim=-1).clamp_min(1e-12)
            nearest = ((centers * embeddings[:, None]).sum(-1) / norms).argmax(-1)
        return F.normalize(self.weight[labels, nearest].to(embeddings.dtype), dim=-1)

    def directions(self) -> None:  # type: ignore[override]  # one of the two types of the base class
        """Return None: a class has several directions."""
        return None
