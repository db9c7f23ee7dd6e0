"""Classification by angles only: a spherization layer and a linear map."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.nn.class_weights import ClassWeightHead
from hf_sphere.nn.spherization import SphericalLinear


class SpherizedHead(ClassWeightHead):
    """Spherization of the embeddings, then a linear classifier without bias, with cross-entropy.

    Args:
        embedding_dim: Length d of the embeddings; on the sphere they have d + 1 coordinates.
        num_classes: Number of classes K.
        scaling: See `Spherization`.
        radius: See `Spherization`.
        delta: See `Spherization`.
        learn_scaling: See `Spherization`.
        learn_radius: See `Spherization`.
        **options: See `ClassWeightHead`.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022. Scaling 5 and radius 5 are
        the values of its image experiments.
    """

    name = "spherized"
    class_parameters = ("classifier.linear.weight",)

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        scaling: float = 5.0,
        radius: float = 5.0,
        delta: float = 1e-6,
        learn_scaling: bool = True,
        learn_radius: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.classifier = SphericalLinear(
            embedding_dim,
            num_classes,
            scaling=scaling,
            radius=radius,
            delta=delta,
            learn_scaling=learn_scaling,
            learn_radius=learn_radius,
        )
        self.keep_own_classes()

    def transform(self, embeddings: Tensor) -> Tensor:
        """Map the embeddings to the sphere: (B, d) -> (B, d + 1)."""
        return self.classifier.spherization(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `W x`."""
        linear = self.classifier.linear
        return linear(embeddings.to(torch.promote_types(embeddings.dtype, linear.weight.dtype)))

    def directions(self) -> Tensor:
        """Return the normalized rows of W."""
        return F.normalize(self.classifier.linear.weight.detach(), dim=-1)
