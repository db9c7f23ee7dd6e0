"""Few-shot classification by class prototypes, the means of the embeddings of a class's examples."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED, check_class_labels
from hf_sphere.nn.heads.base import Head
from hf_sphere.utils.checks import check_choice, check_number

COSINE_SCALE = 1000.0
"""Factor of `cosine - 1` in the logits of the cosine metric; large, since spherized embeddings are close together."""


class PrototypicalOutput(NamedTuple):
    """Output of `PrototypicalClassifier`."""

    logits: Tensor  # (..., Q, way), 0 for a query at the prototype and negative elsewhere; float32 or better
    loss: Tensor | None  # scalar, if labels were given
    prototypes: Tensor  # (..., way, d), of the support's dtype


class PrototypicalClassifier(nn.Module):
    """Parameter-free classifier that compares each query with the mean embedding of each class of its episode.

    With q a query and p a prototype, the logits are `-|q - p|^2 / temperature` for the `euclidean` metric and
    `1000 (cos(q, p) - 1) / temperature` for the `cosine` one. The loss is the mean cross-entropy. The cosine of a zero
    vector, which has no direction, is taken as 1/2.

    Args:
        metric: `euclidean` or `cosine`.
        temperature: Positive number; larger values lower the confidences.

    Raises:
        ValueError: If the metric is unknown or the temperature is not positive.

    Reference:
        Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, equations 1 and 2; the
        cosine metric is from Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.

    Example:
        >>> classifier = PrototypicalClassifier("cosine")
        >>> queries, support = torch.randn(75, 64), torch.randn(5, 1, 64)  # 5 classes with one example each
        >>> classifier(queries, support).logits.shape
        torch.Size([75, 5])
    """

    def __init__(self, metric: Literal["euclidean", "cosine"] = "euclidean", temperature: float = 1.0) -> None:
        super().__init__()
        self.metric = check_choice("metric", metric, ("euclidean", "cosine"))
        self.temperature = check_number("temperature", temperature, "(0, inf)")

    def forward(self, query: Tensor, support: Tensor, labels: Tensor | None = None) -> PrototypicalOutput:
        """Classify queries by the examples of their episode.

        Args:
            query: (..., Q, d), embeddings to classify; leading axes are episodes.
            support: (..., way, shot, d), embeddings of the examples of each class.
            labels: (..., Q), integers from 0 to way - 1, in the order of the support's classes, or -100 for queries
                that the loss ignores.

        Raises:
            ValueError: If the shapes do not match, or a label is out of range (checked on the CPU only, where it costs
                no device synchronization).
        """
        fits = query.ndim >= 2 and support.ndim == query.ndim + 1 and support.numel()
        if not fits or (query.shape[:-2], query.shape[-1]) != (support.shape[:-3], support.shape[-1]):
            shapes = f"{tuple(query.shape)} and {tuple(support.shape)}"
            raise ValueError(f"expected the shapes (..., queries, d) and (..., way, shot, d); got {shapes}.")
        dtype = torch.promote_types(torch.promote_types(query.dtype, support.dtype), torch.float32)
        prototypes = support.to(dtype).mean(dim=-2)
        logits = self._compare(query.to(dtype), prototypes)
        loss = None
        if labels is not None:
            if labels.shape != query.shape[:-1]:
                raise ValueError(f"labels must be one per query, {tuple(query.shape[:-1])}; got {tuple(labels.shape)}.")
            advice = "The labels of an episode index the classes of its support, not of the dataset."
            check_class_labels(labels, support.shape[-3], owner="support", advice=advice)
            total = F.cross_entropy(logits.flatten(end_dim=-2), labels.flatten().long(), reduction="sum")
            loss = total / (labels != IGNORED).sum().clamp_min(1)
        return PrototypicalOutput(logits, loss, prototypes.to(support.dtype))

    def _compare(self, query: Tensor, prototypes: Tensor) -> Tensor:
        scale = 1.0
        if self.metric == "cosine":
            # For unit vectors |q - p|^2 = 2 (1 - cos), without the cancellation in 1 - cos at small angles.
            query, prototypes, scale = Head.normalize(query), Head.normalize(prototypes), COSINE_SCALE / 2
        # |q|^2 - 2 q.p + |p|^2 would lose the digits of small distances; episodes have few classes.
        squares = (query.unsqueeze(-2) - prototypes.unsqueeze(-3)).square().sum(dim=-1)
        return squares * (-scale / self.temperature)

    def extra_repr(self) -> str:
        """Describe the module in a printed model."""
        return f"metric={self.metric!r}, temperature={self.temperature:g}"
