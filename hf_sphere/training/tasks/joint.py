"""Joint prediction: classes and a real value from one embedding."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task, classification, image, regression
from hf_sphere.utils.arguments import argument

if TYPE_CHECKING:
    from hf_sphere.training.run import Run


@dataclass
class JointArguments(classification.CalibrationArguments, regression.RegressionArguments):
    """Regression targets in addition to the classes."""

    task_weight: float | None = argument(
        None, "Weight w of the classification loss; 1 - w is that of the regression. 0.25 if not set.", ge=0, le=1
    )


def prepare(
    run: "Run",
    model_args: classification.ModelArguments,
    data_args: classification.ImageDataArguments,
    args: RecipeArguments,
    values: JointArguments,
) -> Prepared:
    """Check the head, load the data, build the model, and check that the values are in its range."""
    classification.check_head(model_args, data_args, args, "prototype")
    setup = image.load_images(run, model_args, data_args, "joint", targets=values, episodes=data_args.episodes)
    model = classification.build_classifier(setup, **regression.value_settings(setup, values))
    finish = None if values.calibrate is None else classification.calibration(run, setup, values.calibrate)
    regression.check_values(model, setup.images)
    predicts = f"{model.config.num_labels} classes and a real value"
    return image.provide(run, setup, model, predicts, finish=finish)


TASK = Task(
    summary="Train classification and regression on one sphere.",
    example="hf-sphere train joint --config digits-joint-slant",
    arguments=(classification.ModelArguments, classification.ImageDataArguments, RecipeArguments, JointArguments),
    prepare=prepare,
    metric="loss",
    headline=("accuracy", "mean_absolute_error"),
    model_name="SphereVisionForJointPrediction",
)
