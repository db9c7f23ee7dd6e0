"""Regression: a real value per image, computed from the angle to a pole."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import models
from hf_sphere.data.options import ValueOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task
from hf_sphere.training.tasks.classification import ImageDataArguments, ModelArguments
from hf_sphere.training.tasks.image import Setup, build_model, load_images, provide
from hf_sphere.utils.arguments import argument

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.training.run import Run


@dataclass
class RegressionArguments(ValueOptions):
    """Regression targets."""

    value_range: list[float] | None = argument(None, "Lowest and highest value; by default of the training split.")
    out_of_range: Literal["error", "clip"] | None = argument(
        None, "What to do with values outside the range; if not set, `error` if value_range is set, else `clip`."
    )


def prepare(
    run: "Run",
    model_args: ModelArguments,
    data_args: ImageDataArguments,
    args: RecipeArguments,
    values: RegressionArguments,
) -> Prepared:
    """Load the data, build the model, and check that the values are in its range."""
    setup = load_images(run, model_args, data_args, "regression", targets=values, episodes=data_args.episodes)
    model = build_model(setup, value_settings(setup, values))
    check_values(model, setup.images)
    return provide(run, setup, model, "a real value")


def value_settings(setup: Setup, values: RegressionArguments) -> dict[str, Any]:
    """Return the range of the values and the options of the regression; see `settings` of `build_model`.

    Values that the arguments do not set are taken from the saved model, else from the data and the defaults.
    """
    saved: Any = setup.saved or models.SphereVisionConfig()
    limits, weight = values.value_range or saved.value_range, getattr(values, "task_weight", None)
    # The range of the training values does not bound other values.
    options = {"out_of_range": "error" if limits else "clip", "reduction": "mean"} | (saved.regression_kwargs or {})
    requested = {"out_of_range": values.out_of_range, "reduction": setup.args.loss_reduction}
    return {
        "value_range": list(limits or setup.images.value_range or ()),
        "regression_kwargs": options | {k: v for k, v in requested.items() if v is not None},
        "task_weight": saved.task_weight if weight is None else weight,
    }


def check_values(model: Any, images: "ImageData") -> None:
    """Raise an error if a value is outside the model's range and values are not clipped."""
    regression = model.regression
    splits: dict[str, Any] = {"training": images.train, "evaluation": images.evaluation}
    splits |= {} if images.validation is None else {"validation": images.validation}
    for name, batches in splits.items() if regression.out_of_range != "clip" else ():
        values = batches.labels if batches.regression_labels is None else batches.regression_labels
        outside = values[(values < regression.low) | (values > regression.high)]
        if len(outside):
            raise ValueError(
                f"{len(outside)} of {len(values)} {name} values lie outside the range {regression.low:g} to "
                f"{regression.high:g}, for instance {outside[0].item():g}. Widen --value_range, or clip them with "
                "--out_of_range clip."
            )


TASK = Task(
    summary="Train an image regression: a real value as the angle to a pole of the sphere.",
    example="hf-sphere train regression --config digits-regression-slant",
    arguments=(ModelArguments, ImageDataArguments, RecipeArguments, RegressionArguments),
    prepare=prepare,
    metric="mean_absolute_error",
    headline=("mean_absolute_error",),
    model_name="SphereVisionForRegression",
    unused=("head", "head_kwargs", "prototypes_file", "class_weights", "shard_classes", "label_smoothing_factor"),
)
