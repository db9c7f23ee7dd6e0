"""What an image model may be trained for: its model class, its measures, and the measure that chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hf_sphere.models import (
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
)
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel

Batch = Mapping[str, Tensor]
Measure = Callable[[Any, Batch], dict[str, Tensor]]
"""Means over a batch, each a scalar tensor, from the model's output and the batch."""


@dataclass(frozen=True)
class ImageTask:
    """One kind of training.

    Attributes:
        name: As `load_image_data` knows it.
        model_class: What is trained.
        measure: What is measured beside the loss.
        metric: The measure that chooses the best epoch, without its prefix.
        higher_is_better: Whether larger values of `metric` are better.
        headline: The measures that the last line of a run and the card's index show.
        pipeline_tag: The pipeline of transformers that runs the model, if there is one.
    """

    name: Literal["classification", "regression", "joint"]
    model_class: type[SphereVisionPreTrainedModel]
    measure: Measure
    metric: str
    higher_is_better: bool
    headline: tuple[str, ...]
    pipeline_tag: str | None = None

    @property
    def has_classes(self) -> bool:
        """Whether the data must have class labels."""
        return self.name != "regression"

    @property
    def has_values(self) -> bool:
        """Whether the data must have values to predict."""
        return self.name != "classification"


def measure_classification(output: Any, batch: Batch) -> dict[str, Tensor]:
    """Share of images whose largest logit is that of their class."""
    return {"accuracy": _mean(output.logits.argmax(dim=-1) == batch["labels"])}


def measure_regression(output: Any, batch: Batch, values: str = "labels") -> dict[str, Tensor]:
    """Mean absolute error, in the unit of the values."""
    return {"mean_absolute_error": _mean((output.predictions - batch[values]).abs())}


def measure_joint(output: Any, batch: Batch) -> dict[str, Tensor]:
    """Accuracy of the classes and mean absolute error of the values."""
    return measure_classification(output, batch) | measure_regression(output, batch, "regression_labels")


def _mean(values: Tensor) -> Tensor:
    """Mean in float64, where the device has it: a share of 9,913 in 10,000 shall be 0.9913."""
    return values.float().mean() if values.device.type == "mps" else values.double().mean()


CLASSIFICATION = ImageTask(
    name="classification",
    model_class=SphereVisionForImageClassification,
    measure=measure_classification,
    metric="accuracy",
    higher_is_better=True,
    headline=("accuracy",),
    pipeline_tag="image-classification",
)
REGRESSION = ImageTask(
    name="regression",
    model_class=SphereVisionForRegression,
    measure=measure_regression,
    metric="mean_absolute_error",
    higher_is_better=False,
    headline=("mean_absolute_error",),
)
JOINT = ImageTask(
    name="joint",
    model_class=SphereVisionForJointPrediction,
    measure=measure_joint,
    metric="loss",
    higher_is_better=False,
    headline=("accuracy", "mean_absolute_error"),
)
