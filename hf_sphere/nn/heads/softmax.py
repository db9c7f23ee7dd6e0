"""Linear classification of the untransformed embeddings."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.nn.class_weights import ClassWeightHead


class SoftmaxHead(ClassWeightHead):
    """Linear classifier with cross-entropy: the baseline for the other heads.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        bias: Whether the classifier has a bias.
        **options: See `ClassWeightHead`.
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

    def directions(self) -> Tensor:
        """Return the normalized rows of W."""
        return F.normalize(self.linear.weight.detach(), dim=-1)
