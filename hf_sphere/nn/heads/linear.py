"""Linear classifiers: of the embeddings, of spherized embeddings, and with an angular operator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.angular import find_operator
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.heads.mixins import ClassVectorHead
from hf_sphere.nn.layers import AngularLinear, SphericalLinear


class SoftmaxHead(ClassVectorHead):
    """Linear classifier with cross-entropy: the baseline for the other heads.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        bias: Whether the classifier has a bias.
        **options: See `ClassVectorHead`.
    """

    name = "softmax"
    replaces_activation = False

    def __init__(self, embedding_dim: int, num_classes: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.linear = nn.Linear(embedding_dim, num_classes, bias=bias)
        self.class_parameters = ("linear.weight", "linear.bias")[: 1 + bias]
        self.keep_own_classes()

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `W x + b`."""
        return self.linear(embeddings.to(torch.promote_types(embeddings.dtype, self.linear.weight.dtype)))


class SpherizedHead(ClassVectorHead):
    """Spherization of the embeddings, then a linear classifier without bias, with cross-entropy.

    Args:
        embedding_dim: Length d of the embeddings; on the sphere they have d + 1 coordinates.
        num_classes: Number of classes K.
        scaling: See `Spherization`.
        radius: See `Spherization`.
        delta: See `Spherization`.
        learn_scaling: See `Spherization`.
        learn_radius: See `Spherization`.
        **options: See `ClassVectorHead`.

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


class AngularHead(Head):
    """Cross-entropy of the values of an angular operator on embedding and class vectors.

    The values are the logits without a temperature, as in the published comparison of the operators. Except for
    `w_cosine` they lie within [-1, 1], so the loss stays well above 0. The head `cosine` is the operator `cosine` with
    a temperature. Direct operators ignore the norm of the embeddings, so `transform` normalizes them; for the `w_`
    forms it returns them unchanged.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        operator: A key of `hf_sphere.geometry.OPERATORS`.
        **options: See `Head`.

    Raises:
        ValueError: If the operator is unknown.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with the
        operators of Liu et al., "Deep hyperspherical learning", NeurIPS 2017.
    """

    name = "angular"

    def __init__(self, embedding_dim: int, num_classes: int, *, operator: str = "cosine", **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.linear = AngularLinear(embedding_dim, num_classes, operator)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Normalize for a direct operator, in float32 or better: (B, d) -> (B, d)."""
        if find_operator(self.linear.operator).normalizes_input:
            return self.normalize(embeddings)
        return self.upcast_embeddings(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return the values of the operator."""
        return self.linear(embeddings)

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """No weight decay for class vectors: their norm has no effect."""
        return {"linear.weight": {}}

    def directions(self) -> Tensor:
        """Return the normalized class vectors."""
        return F.normalize(self.linear.weight.detach(), dim=-1)
