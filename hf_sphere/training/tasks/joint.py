"""Joint prediction: classes and a real value from one embedding."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.measures import measure_joint
from hf_sphere.training.tasks.classification import (
    CalibrationArguments,
    ImageClassification,
    ImageDataArguments,
    ModelArguments,
)
from hf_sphere.training.tasks.image import HeadDescription
from hf_sphere.training.tasks.regression import ImageRegression, RegressionArguments
from hf_sphere.utils.arguments import argument

if TYPE_CHECKING:
    from hf_sphere.models import SphereVisionConfig


@dataclass
class JointArguments(CalibrationArguments, RegressionArguments):
    """Regression targets in addition to the classes."""

    task_weight: float | None = argument(
        None,
        "Weight w of the classification loss, 0 to 1; the regression loss has weight 1 - w. 0.25 if not set.",
        ge=0,
        le=1,
    )


class JointPrediction(ImageRegression, ImageClassification):
    """Train classification and regression on one sphere."""

    name = "joint"
    data_task = "joint"
    arguments: ClassVar[tuple[type, ...]] = (ModelArguments, ImageDataArguments, TrainingArguments, JointArguments)
    model_name = "SphereVisionForJointPrediction"
    metric = "loss"
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "mean_absolute_error")
    pipeline_tag = None
    default_head = "prototype"
    measure = staticmethod(measure_joint)

    def describe_head(self, config: "SphereVisionConfig") -> HeadDescription:
        """Return the description of head and regression for the model card."""
        head, values = ImageClassification.describe_head(self, config), ImageRegression.describe_head(self, config)
        return replace(
            head, predicts=[*head.predicts, *values.predicts], properties=head.properties | values.properties
        )
