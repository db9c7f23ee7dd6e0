"""Regression on the sphere by the angle to a pole."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_sphere.geometry.checks import is_readable
from hf_sphere.nn.heads.base import Head
from hf_sphere.utils.checks import check_choice, check_integer


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
        self.low, self.high = map(float, value_range)
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
        losses = (self.scale_targets(targets).to(cosines.dtype) - cosines).square()
        loss = losses.sum() if self.reduction == "sum" else losses.sum() / max(losses.numel(), 1)
        return PoleOutput(predictions, loss, embeddings.to(dtype))

    def scale_targets(self, targets: Tensor) -> Tensor:
        """Map targets (B,) from the range to [-1, 1]; see `out_of_range` for those outside it."""
        targets = targets.to(torch.promote_types(targets.dtype, torch.float32))
        if self.out_of_range == "clip":
            targets = targets.clamp(self.low, self.high)
        elif is_readable(targets):  # elsewhere the recipes check the data before training
            outside = (targets < self.low) | (targets > self.high) | targets.isnan()
            if outside.any():
                got = f"{targets[outside][0].item():g} is outside the range {self.low:g} to {self.high:g} of the model"
                raise ValueError(f"target {got}. Set a value_range with all targets, or out_of_range to 'clip'.")
        return 2 * (targets - self.low) / (self.high - self.low) - 1

    def extra_repr(self) -> str:
        """Describe the module in a printed model."""
        return f"{self.low:g} to {self.high:g} in {len(self.pole)} dimensions, out_of_range={self.out_of_range!r}"
