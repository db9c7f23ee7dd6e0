"""Classification by an operator on the angle between an embedding and each class weight."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.angular import find_operator
from hf_sphere.nn.angular import AngularLinear
from hf_sphere.nn.heads.base import Head


class AngularHead(Head):
    """Cross-entropy of the values of an angular operator on embedding and class weights.

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
        """No weight decay for class weights: their norm has no effect."""
        return {"linear.weight": {}}

    def directions(self) -> Tensor:
        """Return the normalized class weights."""
        return F.normalize(self.linear.weight.detach(), dim=-1)
