"""The interface of batches, metrics of batches, and their format on the console."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:  # so that arguments are parsed before torch is imported
    from accelerate import Accelerator, PartialState
    from torch import Tensor, nn

Batch: TypeAlias = "Mapping[str, Tensor]"
Measure: TypeAlias = "Callable[[Any, Batch], dict[str, Tensor]]"
"""Means over a batch, each a scalar tensor, from the model's output and the batch."""

INTERVAL = "_interval"
"""Suffix of the names of metrics that are the half-width of another metric's 95 % interval."""


class Batches(Protocol):
    """The interface that the training loop and the evaluation require.

    If the loss averages over something other than examples, such as the tokens of a language model, the class also has
    a method `num_targets(batch)` that returns their number. If processes get several examples at a time in turn, as
    with episodes, it has their number as `dealt_together`.
    """

    def __len__(self) -> int: ...

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, starting with batch `start`."""
        ...


def count_targets(batches: Batches, batch: Batch) -> "int | Tensor":
    """Return the number of targets that the loss of a batch averages over; by default, the number of examples."""
    num_targets: Any = getattr(batches, "num_targets", count_examples)
    return num_targets(batch)


def global_places(together: int, start: int, batch: Batch, accelerator: "Accelerator | PartialState") -> "Tensor":
    """Return the place of each example of a batch among all examples of an optimizer step, over all processes.

    Args:
        together: Examples that each process gets at a time, in turn.
        start: Examples in earlier batches of the same step, on this process.
        batch: The batch.
        accelerator: Device, index and number of processes.

    Returns:
        int64, (B,), on the device of the accelerator.
    """
    import torch

    own = torch.arange(start, start + count_examples(batch), device=accelerator.device)
    turn = (own // together) * accelerator.num_processes + accelerator.process_index
    return turn * together + own % together


def count_examples(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return len(next(iter(batch.values())))


def loss_is_sum(model: "nn.Module") -> bool:
    """Whether a model's loss is the sum over the batch instead of the mean: that of a head, or its `loss_reduction`."""
    from hf_sphere.nn import Head, PoleRegression

    parts = [module.reduction for module in model.modules() if isinstance(module, (Head, PoleRegression))]
    return "sum" in [*parts, getattr(model, "loss_reduction", "mean")]


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
    predictions, labels = output.logits.argmax(dim=-1).flatten(), batch["labels"].flatten()
    if len(predictions) < len(labels):  # those of the targets alone, as from ModernBERT with sparse_prediction
        labels = labels[labels >= 0]
    targets = labels >= 0
    right = (predictions == labels) & targets
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
