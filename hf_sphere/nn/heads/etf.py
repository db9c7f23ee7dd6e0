"""Classification by the cosine to the vertices of a regular simplex, which are not trained."""

from typing import Literal

from torch import Tensor

from hf_sphere.nn.heads.prototype import PrototypeHead


class ETFHead(PrototypeHead):
    """Fixed classifier with maximal angles between the classes, however imbalanced their numbers of examples.

    The class vectors are a simplex equiangular tight frame (ETF), all cosines between them are -1 / (K - 1), and the
    loss of one image is the dot regression `(1 - cos(z, p_y))^2 / 2`: it attracts an embedding to its own class and
    has no term that repels it from frequent ones. Otherwise the head is a `PrototypeHead`.

    Args:
        embedding_dim: Length d of the embeddings, at least K - 1.
        num_classes: Number of classes K, at least 2.
        reduction: See `PrototypeHead`.

    Raises:
        ValueError: If the embeddings are too short for a simplex.

    Reference:
        Yang et al., "Inducing neural collapse in imbalanced learning: do we really need a learnable classifier at the
        end of deep neural network?", NeurIPS 2022, with embeddings and class vectors of length 1.
    """

    name = "etf"

    def __init__(self, embedding_dim: int, num_classes: int, *, reduction: Literal["mean", "sum"] = "mean") -> None:
        if embedding_dim < num_classes - 1:
            raise ValueError(
                f"a simplex of {num_classes} classes needs embeddings of at least {num_classes - 1} dimensions; got "
                f"{embedding_dim}. Set embedding_dim, or use head 'prototype'."
            )
        super().__init__(embedding_dim, num_classes, method="closed_form", reduction=reduction)

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute half the squared distance of the cosine from 1, of each example: (B,)."""
        return super().compute_loss(embeddings, logits, labels) / 2
