"""What an image model may be trained for: its model class, its measures, and the measure that chooses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accelerate import Accelerator
from torch import nn

from hf_sphere.data.targets import OPEN_SETS
from hf_sphere.models import (
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
)
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
from hf_sphere.training.evaluation import evaluate, evaluate_few_shot, evaluate_retrieval
from hf_sphere.training.measures import Measure, measure_classification, measure_joint, measure_regression


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

    name: Literal["classification", "regression", "joint", "retrieval", "few_shot"]
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
        return self.name in ("regression", "joint")

    @property
    def is_open_set(self) -> bool:
        """Whether what is evaluated may have other classes than what is trained on."""
        return self.name in OPEN_SETS

    def evaluate(self, model: nn.Module, batches: Any, accelerator: Accelerator) -> dict[str, float]:
        """Measure a model over all processes' shares of a split."""
        if self.name == "few_shot":
            return evaluate_few_shot(model, batches, accelerator)
        if self.name == "retrieval":
            return evaluate_retrieval(model, batches, accelerator)
        return evaluate(model, batches, accelerator, self.measure)

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the means over an epoch: none."""
        return {}


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
RETRIEVAL = ImageTask(
    name="retrieval",
    model_class=SphereVisionForImageClassification,
    measure=measure_classification,
    metric="recall_at_1",
    higher_is_better=True,
    headline=("recall_at_1", "map_at_r"),
)
FEW_SHOT = ImageTask(
    name="few_shot",
    model_class=SphereVisionForFewShotClassification,
    measure=measure_classification,
    metric="accuracy",
    higher_is_better=True,
    headline=("accuracy",),
)
