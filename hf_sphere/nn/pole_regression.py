"""Regression on the sphere: the angle to a pole is the value."""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.coordinates import is_batched


class PoleOutput(NamedTuple):
    """What `PoleRegression` answers.

    Attributes:
        predictions: (B,), in the unit of the targets.
        loss: Scalar, if targets were given.
        points: (B, d), the embeddings on the sphere.
    """

    predictions: Tensor
    loss: Tensor | None
    points: Tensor


class PoleRegression(nn.Module):
    """Reads a value off the angle between an embedding and a pole: the lowest value opposite to it, the highest at it.

    With r in [-1, 1] the place of a target in the range, the loss of one example is (r - cos(z, pole))^2, and the
    prediction is `low + (high - low) (cos(z, pole) + 1) / 2`. The pole is the first axis, a persistent buffer.

    Args:
        embedding_dim: Dimension d of the sphere's space, at least 2.
        value_range: Lowest and highest value.
        out_of_range: What to do with targets outside of the range: `error` refuses them (where looking at them costs
            no wait for a device, that is on the CPU), `clip` takes the nearest end.
        reduction: `mean` of the losses of a batch, or their `sum` as in the paper.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.2 and equation 5.
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
        if embedding_dim < 2:
            raise ValueError(f"a pole needs embeddings of at least 2 coordinates; got {embedding_dim}.")
        ends = [float(value) for value in value_range]
        if len(ends) != 2 or not all(map(math.isfinite, ends)) or not ends[0] < ends[1]:
            raise ValueError(f"value_range must be two finite numbers, the lower one first; got {list(value_range)}.")
        if out_of_range not in ("error", "clip"):
            raise ValueError(f"out_of_range must be 'error' or 'clip'; got {out_of_range!r}.")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}.")
        self.low, self.high = ends
        self.out_of_range = out_of_range
        self.reduction = reduction
        self.register_buffer("pole", torch.empty(embedding_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put the pole on the first axis."""
        self.pole.zero_()
        self.pole[0] = 1.0

    def forward(self, embeddings: Tensor, targets: Tensor | None = None) -> PoleOutput:
        """Predict values for embeddings (B, d) and, where targets (B,) are given, compare with them.

        Raises:
            ValueError: If a shape is another one, or a target is outside of the range and is to be refused.
        """
        if embeddings.shape[-1] != len(self.pole):  # a single coordinate would be broadcast
            raise ValueError(f"the pole has {len(self.pole)} coordinates, the embeddings {embeddings.shape[-1]}.")
        points = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1)
        # Elementwise, which autocast leaves alone: in bfloat16 a range of 900 years would have steps of 4.
        cosines = (points * self.pole.to(points.dtype)).sum(dim=-1)
        predictions = self.low + (self.high - self.low) * (cosines + 1) / 2
        if targets is None:
            return PoleOutput(predictions, None, points.to(embeddings.dtype))
        if targets.ndim == 1 and targets.shape != cosines.shape:  # a single target would be broadcast
            raise ValueError(f"there are {len(targets)} targets for embeddings of shape {tuple(embeddings.shape)}.")
        losses = (self.place_in_range(targets).to(cosines.dtype) - cosines).square()
        loss = losses.sum() if self.reduction == "sum" else losses.mean()
        return PoleOutput(predictions, loss, points.to(embeddings.dtype))

    def place_in_range(self, targets: Tensor) -> Tensor:
        """Map targets (B,) from the range to [-1, 1], and treat those outside of it as `out_of_range` says.

        Raises:
            ValueError: If the shape is another one, or a target is outside of the range and is to be refused.
        """
        if targets.ndim != 1:
            raise ValueError(
                "labels of a regression must have the shape (batch,), as `labels.squeeze(-1)` has; got "
                f"{tuple(targets.shape)}."
            )
        targets = targets.to(torch.promote_types(targets.dtype, torch.float32))
        if self.out_of_range == "clip":
            targets = targets.clamp(self.low, self.high)
        elif targets.device.type == "cpu" and not torch.compiler.is_compiling() and not is_batched(targets):
            # On an accelerator this would make the device wait; there the data have been looked at before training.
            outside = (targets < self.low) | (targets > self.high) | targets.isnan()
            if outside.any():
                raise ValueError(
                    f"target {targets[outside][0].item():g} is outside the range {self.low:g} to {self.high:g} of the "
                    "model. Give it a value_range that holds all targets, or set out_of_range to 'clip'."
                )
        return 2 * (targets - self.low) / (self.high - self.low) - 1

    def extra_repr(self) -> str:
        """Describe the module in a printed model."""
        return f"{self.low:g} to {self.high:g} in {len(self.pole)} dimensions, out_of_range={self.out_of_range!r}"
