"""Classification by the cosine to fixed class prototypes that are placed before training."""

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import IGNORED
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.heads.mixins import RunningStatistics
from hf_sphere.prototypes import Placement, place_prototypes
from hf_sphere.utils.checks import check_choice, check_integer

INITIAL_CONCENTRATION = 10.0

RATE = 0.05
"""Damping of the updates of the concentration in training."""

SMOOTHING = 1e-3
"""Label smoothing of these updates."""

_place = functools.lru_cache(maxsize=16)(place_prototypes)  # building a model twice does not repeat the search


class PrototypeHead(RunningStatistics, Head):
    """Attracts embeddings to the prototype of their class: the loss of one image is (1 - cos(z, p_y))^2.

    The prototypes are a persistent buffer, saved with the model; the head has no trained parameters. The logits are
    `class_concentration * cosines`, whose softmax is the posterior of von Mises-Fisher classes around the prototypes
    with equal weights and concentrations. The concentration affects neither the loss nor the predicted class. It is a
    buffer that tracks its maximum-likelihood value on the training batches, so that the softmax is a confidence. In the
    recipes there is one update per optimizer step, from the images of all its batches on all processes. In a loop that
    does not call `before_forward` and `after_step`, each process makes an update per batch. An overfitted network needs
    a temperature fitted to held-out images: `fit_calibration`, or `--calibrate temperature` in the recipes.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_classes: Number of classes K, at least 2.
        method: Placement method of a new model's prototypes, see `place_prototypes`; `set_prototypes` replaces them.
        seed: Seed of the placement.
        reduction: `mean` of the losses of a batch, or their `sum` as in the paper, where the learning rate depends on
            the batch size.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, equation 1.

    Example:
        >>> PrototypeHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "prototype"
    prototypes: Tensor
    class_concentration: Tensor

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        method: str = "auto",
        seed: int = 0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(check_integer("embedding_dim", embedding_dim, 2), num_classes)
        self.method = method
        self.seed = seed
        self.reduction = check_choice("reduction", reduction, ("mean", "sum"))
        self.register_buffer("prototypes", torch.empty(num_classes, embedding_dim))
        self.register_buffer("class_concentration", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Place the prototypes of a new head."""
        if self.prototypes.is_meta:
            return  # they will be loaded from a checkpoint
        self.set_prototypes(_place(self.num_classes, self.embedding_dim, method=self.method, seed=self.seed))

    @torch.no_grad()
    def set_prototypes(self, prototypes: Tensor | Placement) -> None:
        """Replace the prototypes (K, d), for instance by `Placement.load(...)`; they are normalized.

        Raises:
            ValueError: If the shape is wrong, or a prototype is zero or not finite.
        """
        if isinstance(prototypes, Placement):
            prototypes = prototypes.prototypes
        if prototypes.shape != self.prototypes.shape:
            shapes = f"{tuple(self.prototypes.shape)}; got {tuple(prototypes.shape)}"
            raise ValueError(f"the prototypes must have the shape (num_classes, embedding_dim), {shapes}.")
        norms = torch.linalg.vector_norm(prototypes.double(), dim=1, keepdim=True)
        if not ((norms > 0) & norms.isfinite()).all():
            raise ValueError("prototypes must be finite and not zero.")
        self.prototypes.copy_(prototypes.double() / norms)
        self.class_concentration.fill_(INITIAL_CONCENTRATION)

    def measure(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return number, slope and curvature of the cross-entropies of `class_concentration * cosines`: (3,)."""
        cosines = self._cosines(embeddings)
        probabilities = (self.class_concentration.to(cosines.dtype) * cosines).softmax(dim=-1)
        # Label smoothing, since without any errors the maximum-likelihood value would be infinite.
        target = F.nll_loss(cosines, labels, reduction="none")  # negative, 0 for the label -100
        target = torch.sub(target, cosines.mean(dim=-1), alpha=SMOOTHING / (1 - SMOOTHING))
        used = labels != IGNORED
        deviations = torch.add(cosines, target[:, None], alpha=1 - SMOOTHING) * used[:, None]
        centered = torch.ops.aten._softmax_backward_data(deviations, probabilities, 1, deviations.dtype)
        slope, curvature = (torch.dot(factor.flatten(), deviations.flatten()) for factor in (probabilities, centered))
        return torch.stack([used.sum(dtype=slope.dtype), slope, curvature])

    def update_statistics(self, sums: Tensor) -> None:
        """Take a damped multiplicative Newton step on the mean cross-entropy, given the sums of `measure`."""
        before = self.class_concentration.to(sums.dtype)
        count, slope, curvature = sums.unbind()
        step = slope / torch.addcmul(1e-6 * count, before, curvature)
        # The slope of an empty or overflowed batch is not finite; skip it.
        factor = math.exp(-RATE) ** step.clamp(-1.0, 1.0).nan_to_num(0.0)
        self.class_concentration.mul_(factor).clamp_(1e-2, 1e4)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Normalize: (B, d) -> (B, d), in float32 or better."""
        return self.normalize(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return the cosines to the prototypes, times the concentration; float32 or better."""
        # A copy, since the next training batch may change the concentration before this one's backward pass.
        return self.class_concentration.to(embeddings.dtype, copy=True) * self._cosines(embeddings)

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute (1 - cosine to the prototype of the label)^2 of each example: (B,)."""
        cosines = (embeddings * self.prototypes.to(embeddings.dtype)[labels]).sum(dim=-1)
        return F.mse_loss(cosines, torch.ones_like(cosines), reduction="none")

    def _cosines(self, embeddings: Tensor) -> Tensor:
        """Return the cosines of unit vectors (B, d) to the prototypes: (B, K)."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return embeddings @ self.prototypes.to(embeddings.dtype).T

    def directions(self) -> Tensor:
        """Return the prototypes."""
        return self.prototypes.detach()


class ETFHead(PrototypeHead):
    """Fixed classifier with maximal angles between the classes, however imbalanced their numbers of examples.

    The class vectors are a simplex equiangular tight frame (ETF), all cosines between them are -1 / (K - 1), and the
    loss of one image is the dot regression `(1 - cos(z, p_y))^2 / 2`: it attracts an embedding to its own class and
    has no term that repels it from frequent ones. Otherwise the head is a `PrototypeHead`.

    Args:
        embedding_dim: Length d of the embeddings, at least K - 1.
        num_classes: Number of classes K, at least 2.
        reduction: See `PrototypeHead`.

    Reference:
        Yang et al., "Inducing neural collapse in imbalanced learning: do we really need a learnable classifier at the
        end of deep neural network?", NeurIPS 2022, with embeddings and class vectors of length 1.

    Example:
        >>> ETFHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "etf"

    def __init__(self, embedding_dim: int, num_classes: int, *, reduction: Literal["mean", "sum"] = "mean") -> None:
        if embedding_dim < (least := num_classes - 1):  # where another arrangement may have a closed form
            raise ValueError(f"embedding_dim must be at least num_classes - 1, {least}; got {embedding_dim}.")
        super().__init__(embedding_dim, num_classes, method="closed_form", reduction=reduction)

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute half the squared distance of the cosine from 1, of each example: (B,)."""
        return super().compute_loss(embeddings, logits, labels) / 2
