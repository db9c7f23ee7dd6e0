"""Softmax regression in hyperbolic space, in the Poincare ball."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.heads.base import Head

RIM = 1e-3
"""How close to the rim of the ball an embedding may come, as a share of its radius: float32 has no digits beyond."""


class HyperbolicHead(Head):
    """Embeddings are mapped into the Poincare ball, and classes are half-spaces bounded by its hyperplanes.

    A class has a point p on its hyperplane, mapped into the ball as the embeddings are, and a normal a there. Its logit
    is the signed hyperbolic distance to the hyperplane times `2 |a|`. As the curvature vanishes this becomes a linear
    classifier. All parameters are Euclidean, so that any optimiser may train them.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        curvature: c, positive, of the ball of radius 1 / sqrt(c) with sectional curvature -c.
        label_smoothing: See `Head`.

    Raises:
        ValueError: If `curvature` is not positive.

    Reference:
        Ganea, Becigneul and Hofmann, "Hyperbolic neural networks", NeurIPS 2018, equation 25; Khrulkov et al.,
        "Hyperbolic image embeddings", CVPR 2020.
    """

    name = "hyperbolic"
    distance = "hyperbolic"

    def __init__(
        self, embedding_dim: int, num_classes: int, *, curvature: float = 1e-5, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(embedding_dim, num_classes, label_smoothing=label_smoothing)
        if not curvature > 0:
            raise ValueError(f"curvature must be positive (the space has minus this curvature); got {curvature}.")
        self.curvature = curvature
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.offsets = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise normals and points of the hyperplanes."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.offsets)

    def parameter_options(self) -> dict[str, dict[str, float]]:
        """Neither normals nor points of the hyperplanes decay."""
        return {"weight": {}, "offsets": {}}

    def represent(self, embeddings: Tensor) -> Tensor:
        """Map into the ball by the exponential map at its centre: (B, d) -> (B, d), in float32 or better."""
        return self._into_ball(self.widen(embeddings))

    def classify(self, points: Tensor) -> Tensor:
        """Return the scaled signed distances to the hyperplanes, float32 or better.

        With products of matrices alone: -p (+) x, the Moebius sum, is never formed for all pairs.
        """
        c, root = self.curvature, math.sqrt(self.curvature)
        with torch.autocast(points.device.type, enabled=False):
            weight = self.weight.to(points.dtype)
            lengths = torch.linalg.vector_norm(weight, dim=1)
            normals = F.normalize(weight, dim=1)
            offsets = self._into_ball(self.offsets.to(points.dtype))
            at_points = 1 - c * points.square().sum(1, keepdim=True)
            at_offsets = 1 - c * offsets.square().sum(1)
            alpha = 2 - at_points - 2 * c * (points @ offsets.T)
            height = at_offsets * (points @ normals.T) - alpha * (offsets * normals).sum(1)
            return 2 / root * lengths * torch.asinh(2 * root * height / (at_offsets * at_points))

    def directions(self) -> Tensor:
        """Return the normalised normals of the hyperplanes."""
        return F.normalize(self.weight.detach(), dim=-1)

    def extra_repr(self) -> str:
        """Describe the head in a printed model."""
        return f"{self.embedding_dim} -> {self.num_classes} classes, curvature={self.curvature:g}"

    def _into_ball(self, vectors: Tensor) -> Tensor:
        root = math.sqrt(self.curvature)
        # tanh(r v) / (r v), written so that its gradient is finite at 0; at the rim it stops.
        scaled = root * torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(1e-12)
        return vectors * (scaled.tanh().clamp_max(1 - RIM) / scaled)
