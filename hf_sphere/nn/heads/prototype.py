"""Classification by nearness to class prototypes that are placed before training and never move."""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.coordinates import is_batched
from hf_sphere.nn.heads.base import Head
from hf_sphere.prototypes import Placement, place_prototypes

FIRST_CONCENTRATION = 10.0
"""Concentration of a new head, until there are images to learn it from."""


class PrototypeHead(Head):
    """Pulls embeddings to the prototype of their class: the loss of one image is (1 - cos(z, p_y))^2.

    The prototypes are a persistent buffer, so they travel with the model; nothing of the head is trained. The logits
    are `class_concentration * cosines`, whose softmax is the posterior of von Mises-Fisher classes of equal weight and
    concentration round the prototypes. That number has no part in the loss and in the prediction. It is a buffer that
    follows its maximum-likelihood value on the training batches, so that the softmax is a confidence;
    `fit_concentration` fits it to held-out images, which a network that has learned its training images by heart needs
    (the recipes do that where they hold out images by `validation_fraction`).

    Args:
        embedding_dim: Dimension d of the sphere's space, at least 2.
        num_classes: Number of classes K, at least 2.
        method: How a new model's prototypes are placed, see `place_prototypes`; `set_prototypes` puts others in place.
        seed: Seed of the placement.
        reduction: `mean` of the losses of a batch, or their `sum` as in the paper, which ties the learning rate to the
            batch size.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, equation 1. The concentration
        is the inverse temperature of Guo et al., "On calibration of modern neural networks", ICML 2017.
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
        super().__init__(embedding_dim, num_classes)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}.")
        self.method = method
        self.seed = seed
        self.reduction = reduction
        self.register_buffer("prototypes", torch.empty(num_classes, embedding_dim))
        self.register_buffer("class_concentration", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Place the prototypes as a new head has them."""
        if self.prototypes.is_meta:
            return  # a checkpoint will fill them: nothing to place
        self.set_prototypes(_place(self.num_classes, self.embedding_dim, self.method, self.seed))

    @torch.no_grad()
    def set_prototypes(self, prototypes: Tensor | Placement) -> None:
        """Put other prototypes (K, d) in place, for instance `Placement.load(...)`; they are normalised.

        Raises:
            ValueError: If there are not as many as classes and coordinates, or one has no direction.
        """
        if isinstance(prototypes, Placement):
            prototypes = prototypes.prototypes
        if prototypes.shape != self.prototypes.shape:
            given = " x ".join(map(str, prototypes.shape))
            raise ValueError(
                f"the prototypes are {given}, but the model has {self.num_classes} classes and {self.embedding_dim} "
                f"coordinates for them. Place {self.num_classes} prototypes in {self.embedding_dim} dimensions."
            )
        points = prototypes.double()
        norms = torch.linalg.vector_norm(points, dim=1, keepdim=True)
        if not norms.isfinite().all() or not norms.all():
            raise ValueError("prototypes must be finite and not zero.")
        self.prototypes.copy_(points / norms)
        self.class_concentration.fill_(FIRST_CONCENTRATION)

    @torch.no_grad()
    def fit_concentration(self, embeddings: Tensor, labels: Tensor) -> None:
        """Fit the concentration to embeddings (N, d) of held-out images and their labels (N,): temperature scaling."""
        self.check_labels(labels)
        cosines = self._cosines(self.represent(embeddings))
        for _ in range(200):
            self._step_concentration(cosines, labels, rate=0.5)

    def represent(self, embeddings: Tensor) -> Tensor:
        """Normalise: (B, d) -> (B, d), in float32 or better."""
        return F.normalize(self.widen(embeddings), dim=-1)

    def classify(self, points: Tensor) -> Tensor:
        """Return the cosines to the prototypes, times the concentration; float32 or better."""
        return self.class_concentration.to(points.dtype) * self._cosines(points)

    def compute_loss(self, points: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean or sum over the batch of (1 - cosine to the own prototype)^2."""
        own = (points * self.prototypes.to(points.dtype)[labels]).sum(dim=-1)
        if self.training and (torch.compiler.is_compiling() or not is_batched(own)):
            with torch.no_grad():
                self._step_concentration(self._cosines(points.detach()), labels, rate=0.05)
        losses = (1.0 - own).square()
        return losses.sum() if self.reduction == "sum" else losses.mean()

    def _cosines(self, points: Tensor) -> Tensor:
        """Cosines of unit vectors (B, d) to the prototypes: (B, K)."""
        with torch.autocast(points.device.type, enabled=False):
            return points @ self.prototypes.to(points.dtype).T

    def _step_concentration(self, cosines: Tensor, labels: Tensor, rate: float) -> None:
        """One damped Newton step on the cross-entropy of `class_concentration * cosines` (B, K), taken as a factor."""
        before = self.class_concentration.to(cosines.dtype)
        shares = (before * cosines).softmax(dim=-1)
        expected = (shares * cosines).sum(dim=-1)
        spread = (shares * (cosines - expected[:, None]).square()).sum(dim=-1).mean()
        # One label in a thousand is replaced by any class, or classes without any error would have no finite value.
        own = cosines.gather(1, labels[:, None])[:, 0].lerp(cosines.mean(dim=-1), 1e-3)
        slope = (expected - own).mean()
        step = (-slope / (before * spread + 1e-6)).clamp(-1.0, 1.0)
        after = (before * (rate * step).exp()).clamp(1e-2, 1e4)
        # An empty batch, or one that overflowed and whose step is skipped, has no slope and must not stay in it.
        self.class_concentration.copy_(torch.where(after.isfinite(), after, before))

    def directions(self) -> Tensor:
        """Return the prototypes."""
        return self.prototypes.detach()

    def extra_repr(self) -> str:
        """Describe the head in a printed model."""
        return f"{self.num_classes} prototypes in {self.embedding_dim} dimensions, reduction={self.reduction!r}"


@functools.lru_cache(maxsize=16)
def _place(num_classes: int, dim: int, method: str, seed: int) -> Tensor:
    """Placements of late, so that building a model twice does not search twice."""
    with torch.inference_mode(False):  # the tensor is kept, also for models that will be trained
        placement = place_prototypes(num_classes, dim, method=method, seed=seed)
    if placement.interrupted:
        raise KeyboardInterrupt  # it was meant for the training, which shall not go on with what there was so far
    return placement.prototypes
