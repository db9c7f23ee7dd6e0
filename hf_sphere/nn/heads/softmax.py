"""Softmax regression: of the embeddings, of spherized ones, with an angular operator, and in hyperbolic space."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.angular import find_operator
from hf_sphere.geometry.manifold import divide_by_norms
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.heads.mixins import ClassVectorHead
from hf_sphere.nn.layers import AngularLinear, SphericalLinear
from hf_sphere.utils.checks import check_number


def _apply(linear: nn.Linear, embeddings: Tensor) -> Tensor:
    """Apply a linear map in the dtype of its weight; in a map that torch has quantized, `weight` is a method."""
    return linear(embeddings.to(getattr(linear.weight, "dtype", embeddings.dtype)))


class SoftmaxHead(ClassVectorHead):
    """Linear classifier with cross-entropy: the baseline for the other heads.

    Args:
        bias: Whether the classifier has a bias.
        **options: See `hf_sphere.nn.heads.mixins.ClassVectorHead`.

    Example:
        >>> SoftmaxHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
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
        return _apply(self.linear, embeddings)


class SpherizedHead(ClassVectorHead):
    """Spherization of the embeddings, then a linear classifier without bias, with cross-entropy.

    Args:
        embedding_dim: Length d of the embeddings; on the sphere they have d + 1 coordinates.
        **options: See `Spherization`, and `hf_sphere.nn.heads.mixins.ClassVectorHead`.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022. Scaling 5 and radius 5 are
        the values of its image experiments.

    Example:
        >>> SpherizedHead(4, 3, radius=5.0)(embeddings, labels).logits.shape
        torch.Size([60, 3])
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
        learned = {"learn_scaling": learn_scaling, "learn_radius": learn_radius}
        spherization = {"scaling": scaling, "radius": radius, "delta": delta, **learned}
        self.classifier = SphericalLinear(embedding_dim, num_classes, **spherization)
        self.keep_own_classes()

    def transform(self, embeddings: Tensor) -> Tensor:
        """Map the embeddings to the sphere: (B, d) -> (B, d + 1)."""
        return self.classifier.spherization(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `W x`."""
        return _apply(self.classifier.linear, embeddings)


class AngularHead(Head):
    """Cross-entropy of the values of an angular operator on embedding and class vectors.

    The values are the logits without a temperature, as in the published comparison of the operators. Except for
    `w_cosine` they lie within [-1, 1], so the loss stays well above 0. The head `cosine` is the operator `cosine` with
    a temperature. Direct operators ignore the norm of the embeddings, so `transform` normalizes them; for the `w_`
    forms it returns them unchanged.

    Args:
        operator: A key of `hf_sphere.geometry.OPERATORS`.
        **options: See `Head`.

    Raises:
        ValueError: If the operator is unknown.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with the
        operators of Liu et al., "Deep hyperspherical learning", NeurIPS 2017.

    Example:
        >>> AngularHead(4, 3, operator="cosine")(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "angular"
    class_parameters = without_decay = ("linear.weight",)

    def __init__(self, embedding_dim: int, num_classes: int, *, operator: str = "cosine", **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.operator = operator  # an adapter may wrap the map
        self.linear = AngularLinear(embedding_dim, num_classes, operator)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Normalize for a direct operator, in float32 or better: (B, d) -> (B, d)."""
        if find_operator(self.operator).normalizes_input:
            return self.normalize(embeddings)
        return self.upcast_embeddings(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return the values of the operator."""
        return self.linear(embeddings)


BOUNDARY_MARGIN = 1e-3
"""Smallest distance of an embedding from the boundary of the ball, relative to its radius; limited by float32."""


class HyperbolicHead(Head):
    """Multinomial logistic regression in the Poincare ball: classes are separated by hyperbolic hyperplanes.

    The hyperplane of a class is given by a point p on it, mapped into the ball like the embeddings, and a normal a at
    p. The logit is the signed hyperbolic distance to the hyperplane times `2 |a|`. In the limit of zero curvature this
    is a linear classifier. All parameters are Euclidean, so any optimizer can train them.

    Args:
        curvature: c > 0; the ball has the radius 1 / sqrt(c) and the sectional curvature -c.
        **options: See `Head`.

    Raises:
        ValueError: If `curvature` is not positive.

    Reference:
        Ganea, Becigneul and Hofmann, "Hyperbolic neural networks", NeurIPS 2018, equation 25; Khrulkov et al.,
        "Hyperbolic image embeddings", CVPR 2020.

    Example:
        >>> HyperbolicHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "hyperbolic"
    class_parameters = ("weight",)
    without_decay = ("weight", "offsets")  # normals and points of the hyperplanes

    def __init__(self, embedding_dim: int, num_classes: int, *, curvature: float = 1e-5, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.curvature = check_number("curvature", curvature, "(0, inf)")
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.offsets = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize normals and points of the hyperplanes."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.offsets)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Map into the ball by the exponential map at its center: (B, d) -> (B, d), in float32 or better."""
        directions, angles = self._polar(self.upcast_embeddings(embeddings))
        return directions * (angles.tanh() / math.sqrt(self.curvature))

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return the scaled signed distances to the hyperplanes, float32 or better.

        Computed with matrix products only, without the Moebius sums -p (+) x of all pairs: with c = 1, X = 2 x / (1 -
        |x|^2) and p = tanh(s) u, the sine of the distance is `X.a + u.a sinh(2 s) (X.p - (1 + |x|^2) / (1 - |x|^2))`.
        """
        root = math.sqrt(self.curvature)
        with torch.autocast(embeddings.device.type, enabled=False):
            normals, lengths = divide_by_norms(self.weight.to(embeddings.dtype), 1e-12)
            directions, distances = self._polar(self.offsets.to(embeddings.dtype))
            squares = (embeddings * embeddings).sum(1, keepdim=True)
            factors = torch.rsub(squares, 0.5 / root, alpha=0.5 * root).reciprocal()  # 2 sqrt(c) / (1 - c |x|^2)
            scaled = embeddings * factors
            offsets = directions * distances.tanh()
            products = torch.addmm(torch.rsub(factors, 1.0, alpha=1 / root), scaled, offsets.T)
            across = (directions * normals).sum(1) * (2 * distances).sinh().squeeze(1)
            return lengths.squeeze(1) * (2 / root) * torch.asinh(torch.addmm(across * products, scaled, normals.T))

    def metric(self) -> dict[str, Any]:
        """Return the hyperbolic distance and the curvature."""
        return {"distance": "hyperbolic", "curvature": float(self.curvature)}

    def _polar(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors (..., d) and norms times sqrt(c), whose tanh is limited at the boundary: (..., 1)."""
        directions, norms = divide_by_norms(vectors, 1e-12)
        return directions, F.hardtanh(norms * math.sqrt(self.curvature), 0.0, math.atanh(1 - BOUNDARY_MARGIN))
