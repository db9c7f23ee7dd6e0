"""Joint prediction: classes and a real value from one embedding."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_sphere import models
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task
from hf_sphere.training.tasks.classification import (
    CalibrationArguments,
    ImageDataArguments,
    ModelArguments,
    build_classifier,
    calibration,
    check_head,
    describe_head,
)
from hf_sphere.training.tasks.image import Setup, load_images, provide
from hf_sphere.training.tasks.regression import RegressionArguments, check_values, describe_regression, value_settings
from hf_sphere.utils.arguments import argument

if TYPE_CHECKING:
    from hf_sphere.training.run import Run


@dataclass
class JointArguments(CalibrationArguments, RegressionArguments):
    """Regression targets in addition to the classes."""

    task_weight: float | None = argument(
        None,
        "Weight w of the classification loss, 0 to 1; the regression loss has weight 1 - w. 0.25 if not set.",
        ge=0,
        le=1,
    )


def prepare(
    run: "Run", model_args: ModelArguments, data_args: ImageDataArguments, args: RecipeArguments, values: JointArguments
) -> Prepared:
    """Check the head, load the data, build the model, and check that the values are in its range."""
    from hf_sphere.training.evaluation import measure_joint

    check_head(model_args, data_args, args, "prototype")
    setup = load_images(run, model_args, data_args, "joint", targets=values, episodes=data_args.episodes)
    model = build_joint(setup, values)
    finish = calibration(run, setup, values.calibrate)
    check_values(model, setup.images)
    head, value = describe_head(model.config), describe_regression(model)
    predicts, properties = f"{head.predicts} and {value.predicts}", head.properties | value.properties
    head = replace(head, predicts=predicts, properties=properties)
    return provide(run, setup, model, head, measure=measure_joint, finish=finish)


def build_joint(setup: Setup, values: JointArguments) -> Any:
    """Build a model with a head and a regression for the data, or load the saved one; see `build_model`."""
    settings = value_settings(setup, values)
    return build_classifier(setup, models.SphereVisionForJointPrediction, default_head="prototype", **settings)


TASK = Task(
    summary="Train classification and regression on one sphere.",
    example="hf-sphere train joint --config digits-joint-slant",
    arguments=(ModelArguments, ImageDataArguments, RecipeArguments, JointArguments),
    prepare=prepare,
    metric="loss",
    higher_is_better=False,
    headline=("accuracy", "mean_absolute_error"),
    model_name="SphereVisionForJointPrediction",
)
