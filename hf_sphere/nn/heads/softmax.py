"""A linear classifier on the embeddings as they are."""

import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.heads.base import Head


class SoftmaxHead(Head):
    """Linear classifier with cross-entropy: the plain head that the others are compared with.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        bias: Whether the classifier has a bias.
        label_smoothing: See `Head`.
    """

    name = "softmax"
    replaces_activation = False

    def __init__(
        self, embedding_dim: int, num_classes: int, *, bias: bool = True, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(embedding_dim, num_classes, label_smoothing=label_smoothing)
        self.linear = nn.Linear(embedding_dim, num_classes, bias=bias)

    def classify(self, points: Tensor) -> Tensor:
        """Return `W x + b`."""
        return self.linear(points)

    def directions(self) -> Tensor:
        """Return the normalised rows of W."""
        return F.normalize(self.linear.weight.detach(), dim=-1)
