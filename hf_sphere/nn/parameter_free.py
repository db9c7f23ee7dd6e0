"""Predictions without trained weights: regression by the angle to a pole, few-shot classification by prototypes."""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED, check_class_labels, is_readable
from hf_sphere.nn.heads.base import Head
from hf_sphere.utils.checks import check_choice, check_integer, check_number


class PoleOutput(NamedTuple):
    """Output of `PoleRegression`."""

    predictions: Tensor  # (B,), in the unit of the targets
    loss: Tensor | None  # scalar, if targets were given
    embeddings: Tensor  # (B, d), normalized


class PoleRegression(nn.Module):
    """Regression by the cosine between an embedding and a pole: the pole is the highest value, its antipode the lowest.

    With the target scaled to r in [-1, 1], the loss of one example is (r - cos(z, pole))^2, and the prediction is
    `low + (high - low) (cos(z, pole) + 1) / 2`. The pole is the first axis, a persistent buffer.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        value_range: Lowest and highest value.
        out_of_range: Treatment of targets outside the range: `error` raises an error (on the CPU only, where checking
            costs no device synchronization), `clip` uses the nearest end of the range.
        reduction: `mean` of the losses of a batch, or their `sum` as in the paper.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.2 and equation 5.

    Example:
        >>> PoleRegression(4, (0.0, 10.0))(embeddings).predictions.shape
        torch.Size([60])
    """

    pole: Tensor

    def __init__(
        self,
        embedding_dim: int,
        value_range: tuple[float, float] | list[float],
        *,
        out_of_range: Literal["error", "clip"] = "error",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        self.low, self.high = map(float, value_range) if len(value_range) == 2 else (0.0, 0.0)
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"value_range must be two finite numbers, the lower one first; got {list(value_range)}.")
        self.out_of_range = check_choice("out_of_range", out_of_range, ("error", "clip"))
        self.reduction = check_choice("reduction", reduction, ("mean", "sum"))
        self.register_buffer("pole", torch.empty(check_integer("embedding_dim", embedding_dim, 2)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the pole to the first axis."""
        self.pole.zero_()
        self.pole[0] = 1.0

    def forward(self, embeddings: Tensor, targets: Tensor | None = None) -> PoleOutput:
        """Predict values for embeddings (B, d) and, if targets (B,) are given, compute the loss.

        Raises:
            ValueError: If a shape is wrong, or a target is outside the range and `out_of_range` is `error`.
        """
        if embeddings.shape[-1:] != self.pole.shape:  # a single coordinate would be broadcast
            raise ValueError(f"the pole has {len(self.pole)} coordinates, the embeddings {sum(embeddings.shape[-1:])}.")
        dtype = embeddings.dtype
        embeddings = Head.normalize(embeddings)
        # Elementwise, since autocast does not convert this: in bfloat16 a range of 900 years would have steps of 4.
        cosines = (embeddings * self.pole.to(embeddings.dtype)).sum(dim=-1)
        predictions = self.low + (self.high - self.low) * (cosines + 1) / 2
        if targets is None:
            return PoleOutput(predictions, None, embeddings.to(dtype))
        if targets.shape != cosines.shape:  # a single target would be broadcast
            raise ValueError(f"regression labels must have shape {tuple(cosines.shape)}; got {tuple(targets.shape)}.")
        targets = targets.to(torch.promote_types(targets.dtype, torch.float32))
        if self.out_of_range == "clip":
            targets = targets.clamp(self.low, self.high)
        elif is_readable(targets):  # elsewhere the recipes check the data before training
            outside = (targets < self.low) | (targets > self.high) | targets.isnan()
            if outside.any():
                got = f"{targets[outside][0].item():g} is outside the range {self.low:g} to {self.high:g} of the model"
                raise ValueError(f"target {got}. Set a value_range with all targets, or out_of_range to 'clip'.")
        scaled = 2 * (targets - self.low) / (self.high - self.low) - 1
        losses = (scaled.to(cosines.dtype) - cosines).square()
        loss = losses.sum() if self.reduction == "sum" else losses.sum() / max(losses.numel(), 1)
        return PoleOutput(predictions, loss, embeddings.to(dtype))


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
        queries, means, scale = query.to(dtype), prototypes, 1.0
        if self.metric == "cosine":
            # For unit vectors |q - p|^2 = 2 (1 - cos), without the cancellation in 1 - cos at small angles.
            queries, means, scale = Head.normalize(queries), Head.normalize(means), COSINE_SCALE / 2
        # |q|^2 - 2 q.p + |p|^2 would lose the digits of small distances; episodes have few classes.
        squares = (queries.unsqueeze(-2) - means.unsqueeze(-3)).square().sum(dim=-1)
        logits, loss = squares * (-scale / self.temperature), None
        if labels is not None:
            if labels.shape != query.shape[:-1]:
                raise ValueError(f"labels must be one per query, {tuple(query.shape[:-1])}; got {tuple(labels.shape)}.")
            advice = "The labels of an episode index the classes of its support, not of the dataset."
            check_class_labels(labels, support.shape[-3], owner="support", advice=advice)
            total = F.cross_entropy(logits.flatten(end_dim=-2), labels.flatten().long(), reduction="sum")
            loss = total / (labels.long() != IGNORED).sum().clamp_min(1)
        return PrototypicalOutput(logits, loss, prototypes.to(support.dtype))
