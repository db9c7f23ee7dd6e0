"""Metrics of a batch, and their format on the console."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Batch: TypeAlias = "Mapping[str, Tensor]"
Measure: TypeAlias = "Callable[[Any, Batch], dict[str, Tensor]]"
"""Means over a batch, each a scalar tensor, from the model's output and the batch."""

INTERVAL = "_interval"
"""Suffix of the names of metrics that are the half-width of another metric's 95 % interval."""


def measure_classification(output: Any, batch: Batch) -> "dict[str, Tensor]":
    """Return the accuracy: the fraction of images whose largest logit is that of their class, if there are logits."""
    if output.logits is None:  # the loss was computed in blocks of classes
        return {}
    return {"accuracy": _mean(output.logits.argmax(dim=-1) == batch["labels"])}


def measure_regression(output: Any, batch: Batch) -> "dict[str, Tensor]":
    """Return the mean absolute error, in the unit of the values."""
    values = batch.get("regression_labels", batch["labels"])  # beside classes, in joint prediction
    return {"mean_absolute_error": _mean((output.predictions - values).abs())}


def measure_joint(output: Any, batch: Batch) -> "dict[str, Tensor]":
    """Return the accuracy of the classes and the mean absolute error of the values."""
    return measure_classification(output, batch) | measure_regression(output, batch)


def measure_tokens(output: Any, batch: Batch) -> "dict[str, Tensor]":
    """Return the accuracy: the fraction of target tokens whose logit is the largest."""
    targets = batch["labels"] >= 0
    right = (output.logits.argmax(dim=-1) == batch["labels"]) & targets
    return {"accuracy": _mean(right) / _mean(targets)}


def perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexity, the exponential of the mean loss per token."""
    return {"perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}


def _mean(values: "Tensor") -> "Tensor":
    """Mean in float64 if the device supports it, so that 9,913 of 10,000 is exactly 0.9913."""
    return values.float().mean() if values.device.type == "mps" else values.double().mean()


def show_metrics(metrics: Mapping[str, float]) -> Iterator[str]:
    """Format metrics for the console, each with its interval if there is one; counts are left out."""
    for name, value in metrics.items():
        if not name.endswith(INTERVAL) and "_num_" not in name:
            yield f"{name} {show_metric(name, value, metrics.get(f'{name}{INTERVAL}'))}"


def show_metric(name: str, value: float, interval: float | None = None) -> str:
    """Format a metric for the console: accuracy and recall in percent, counts as integers, others with four digits.

    The half-width of an interval follows its metric: `95.31 ± 0.22 %`.
    """
    if any(share in name for share in ("accuracy", "recall", "precision", "map_at_r")):
        around = "" if interval is None else f" ± {100 * interval:.2f}"
        return f"{100 * value:.2f}{around} %"
    if "num_" in name:
        return f"{value:g}"
    return f"{value:.3g}" if "rate" in name else f"{value:.4g}"
