"""Regression: a real value per image, computed from the angle to a pole."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_sphere import models
from hf_sphere.data.options import DataTask, ValueOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.measures import measure_regression
from hf_sphere.training.tasks.classification import ImageDataArguments, ModelArguments
from hf_sphere.training.tasks.image import HeadDescription, ImageTask
from hf_sphere.utils.arguments import argument

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.models import SphereVisionConfig


@dataclass
class RegressionArguments(ValueOptions):
    """Regression targets."""

    value_range: list[float] | None = argument(
        None, "Lowest and highest value; those of the training split if not set."
    )
    out_of_range: Literal["error", "clip"] | None = argument(
        None,
        "Raise an error for values outside the range, or clip them to it; if not set, `error` if value_range is set, "
        "else `clip`.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_range is not None and (len(self.value_range) != 2 or self.value_range[0] >= self.value_range[1]):
            raise ValueError(f"value_range must be two numbers, the lower one first; got {self.value_range}.")


class ImageRegression(ImageTask):
    """Train an image regression: a real value as the angle to a pole of the sphere."""

    name = "regression"
    data_task: ClassVar[DataTask] = "regression"
    arguments: ClassVar[tuple[type, ...]] = (ModelArguments, ImageDataArguments, TrainingArguments, RegressionArguments)
    model_name = "SphereVisionForRegression"
    metric = "mean_absolute_error"
    higher_is_better = False
    headline: ClassVar[tuple[str, ...]] = ("mean_absolute_error",)
    measure = staticmethod(measure_regression)

    def model_settings(self, image_data: "ImageData", saved: "SphereVisionConfig | None" = None) -> dict[str, Any]:
        """Return the range of the values and the options of the regression.

        Values that the arguments do not set are taken from the saved model, else from the data and the defaults.
        """
        settings = super().model_settings(image_data, saved)
        if self.data_task == "regression":
            self._refuse_head_arguments(new=saved is None)
        values = self.part(RegressionArguments)
        before = (saved.regression_kwargs or {}) if saved is not None else {}
        given = values.value_range or (saved.value_range if saved is not None else None)
        # The range of the training values does not bound other values.
        default = {"out_of_range": "error" if given is not None else "clip", "reduction": "mean"}
        requested = {"out_of_range": values.out_of_range, "reduction": self.args.loss_reduction}
        weight = getattr(values, "task_weight", None)
        if weight is None:
            weight = (models.SphereVisionConfig if saved is None else saved).task_weight
        return settings | {
            "value_range": list(given or image_data.value_range or ()),
            "regression_kwargs": default | before | {k: v for k, v in requested.items() if v is not None},
            "task_weight": weight,
        }

    def _refuse_head_arguments(self, *, new: bool) -> None:
        if self.args.label_smoothing_factor:
            raise ValueError("label smoothing is for classes, and a regression has none; leave it out.")
        heads = ("head", "head_kwargs", "prototypes_file") if new else ()
        for name in (*heads, "class_weights", "shard_classes"):
            if getattr(self.model_args, name):
                raise ValueError(f"{name} is for models with classes, and a regression has none; leave it out.")

    def check_data(self, model: Any, image_data: "ImageData") -> None:
        """Raise an error if a value is outside the model's range and values are not clipped."""
        super().check_data(model, image_data)
        regression = model.regression
        if regression.out_of_range == "clip":
            return
        splits = {
            "training": image_data.train,
            "evaluation": image_data.evaluation,
            "validation": image_data.validation,
        }
        for name, batches in splits.items():
            if batches is None:
                continue
            values = batches.labels if batches.regression_labels is None else batches.regression_labels
            outside = (values < regression.low) | (values > regression.high)
            if outside.any():
                raise ValueError(
                    f"{int(outside.sum())} of {len(values)} {name} values lie outside the range {regression.low:g} to "
                    f"{regression.high:g}, for instance {values[outside][0].item():g}. Widen --value_range, or clip "
                    "them with --out_of_range clip."
                )

    def targets(self, model: Any) -> list[str]:
        """Return the range of the values."""
        return [f"values {model.regression.low:g} to {model.regression.high:g}"]

    def heads(self, model: Any) -> list[str]:
        """Return the head, if any, and the regression."""
        return [*super().heads(model), "regression on a pole"]

    def describe_head(self, config: "SphereVisionConfig") -> HeadDescription:
        """Return the description of the regression for the model card."""
        ends = " to ".join(f"{end:g}" for end in config.value_range or ())
        values = {"values": f"{ends}, computed from the angle to a pole"}
        return HeadDescription(["a real value"], "regression", "regression", values)
