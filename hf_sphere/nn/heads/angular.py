"""Classification by an operator on the angle between embedding and class weights."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.angular import find_operator
from hf_sphere.nn.angular import AngularLinear
from hf_sphere.nn.heads.base import Head


class AngularHead(Head):
    """Cross-entropy of what an angular operator answers to embedding and class weights.

    The logits are the operator's answers as they are, within [-1, 1] but for `w_cosine`, so that the loss cannot come
    near 0: the operators were compared without a temperature. The head `cosine` is the first of them with one.
    The points of the direct operators are the normalised embeddings, since their length has no meaning; those of the
    `w_` forms are the embeddings.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        operator: A key of `hf_sphere.geometry.OPERATORS`.
        label_smoothing: See `Head`.

    Raises:
        ValueError: If the operator is unknown.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with the
        operators of Liu et al., "Deep hyperspherical learning", NeurIPS 2017.
    """

    name = "angular"

    def __init__(
        self, embedding_dim: int, num_classes: int, *, operator: str = "cosine", label_smoothing: float = 0.0
    ) -> None:
        super().__init__(embedding_dim, num_classes, label_smoothing=label_smoothing)
        self.linear = AngularLinear(embedding_dim, num_classes, operator)

    def represent(self, embeddings: Tensor) -> Tensor:
        """Normalise for a direct operator, in float32 or better: (B, d) -> (B, d)."""
        points = self.widen(embeddings)
        return F.normalize(points, dim=-1) if find_operator(self.linear.operator).normalizes_input else points

    def classify(self, points: Tensor) -> Tensor:
        """Return the operator's answers."""
        return self.linear(points)

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """Class weights do not decay: their length has no meaning."""
        return {"linear.weight": {}}

    def directions(self) -> Tensor:
        """Return the normalised class weights."""
        return F.normalize(self.linear.weight.detach(), dim=-1)
