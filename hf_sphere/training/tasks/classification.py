"""Image classification."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_sphere import data
from hf_sphere.data.options import DataTask, ImageDataOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.measures import measure_classification, show_metrics
from hf_sphere.training.tasks.base import Prepared
from hf_sphere.training.tasks.image import EncoderArguments, HeadDescription, ImageTask
from hf_sphere.utils.arguments import Arguments, Options, argument

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from hf_sphere.data import Episodes, ImageData
    from hf_sphere.models import SphereVisionConfig
    from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)

HEAD_NAMES = (  # those of `hf_sphere.nn.HEADS`, which would import torch
    "adaface", "angular", "arcface", "cosface", "cosine", "etf", "hyperbolic", "prototype", "proxy_anchor", "softmax",
    "spherized", "subcenter_arcface", "vmf",
)  # fmt: skip


@dataclass
class ModelArguments(EncoderArguments):
    """Head."""

    head: str | None = argument(
        None, f"Head: {', '.join(HEAD_NAMES)}; if not set, `spherized`, or `prototype` in joint prediction."
    )
    head_kwargs: Options = argument(Options, "Options of the head, a mapping.")
    class_weights: Literal["balanced"] | None = argument(
        None, "Weight the loss of each class by the inverse of its number of training images; not weighted if not set."
    )
    shard_classes: bool = argument(
        False, "Spread the class vectors over the processes; the head must have this option."
    )
    prototypes_file: str | None = argument(
        None, "Prototypes of the head `prototype`, written by recipes/place_prototypes.py; computed if not set."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_classes |= bool(self.head_kwargs and self.head_kwargs.get("shard_classes"))


@dataclass
class ImageDataArguments(ImageDataOptions):
    """Batches of a fixed number of classes."""

    episode_classes: int | None = argument(
        None, "P x K sampling: classes per training batch, instead of a batch size.", ge=1
    )
    episode_examples: int | None = argument(None, "P x K sampling: images per class.", ge=1)
    episodes_per_epoch: int | None = argument(None, "P x K sampling: batches per epoch, over all processes.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("episode_classes", "episode_examples", "episodes_per_epoch")
        given = [name for name in names if getattr(self, name) is not None]
        if given and len(given) < len(names):
            missing = ", ".join(name for name in names if name not in given)
            raise ValueError(f"{', '.join(given)} is given without {missing}; P x K sampling needs all three.")

    @property
    def episodes(self) -> "Episodes | None":
        """The episodes of P x K sampling, if requested."""
        if self.episode_classes is None or self.episode_examples is None or self.episodes_per_epoch is None:
            return None
        return data.Episodes(self.episode_classes, self.episode_examples, self.episodes_per_epoch)


@dataclass
class CalibrationArguments(Arguments):
    """Calibration."""

    calibrate: Literal["temperature", "vector"] | None = argument(
        None, "Fit a temperature, or a temperature and a shift of each class, to the logits of validation images."
    )


@dataclass
class EvaluationArguments(CalibrationArguments):
    """Evaluation."""

    test_time_flips: bool = argument(
        False, "Also report accuracy_with_flips: that of logits averaged over each image and its mirror image."
    )


class ImageClassification(ImageTask):
    """Train an image classifier on the sphere."""

    name = "classification"
    data_task: ClassVar[DataTask] = "classification"
    arguments: ClassVar[tuple[type, ...]] = (ModelArguments, ImageDataArguments, TrainingArguments, EvaluationArguments)
    model_name = "SphereVisionForImageClassification"
    metric = "accuracy"
    higher_is_better = True
    headline: ClassVar[tuple[str, ...]] = ("accuracy",)
    pipeline_tag: ClassVar[str | None] = "image-classification"
    measure = staticmethod(measure_classification)
    default_head: ClassVar[str] = "spherized"

    def prepare(self, run: "Run") -> Prepared:
        """Check the head, then load the data and build the model."""
        from hf_sphere.nn.heads.base import check_options

        if self.model_args.model_name_or_path is None:
            check_options(self.model_args.head or self.default_head, self.model_args.head_kwargs)
        return super().prepare(run)

    def model_settings(self, image_data: "ImageData", saved: "SphereVisionConfig | None" = None) -> dict[str, Any]:
        """Return head, its options and the names of the classes."""
        settings = super().model_settings(image_data, saved)
        if saved is not None:
            loss = self._loss_options(saved.head, image_data)
            if saved.head_kwargs or loss:
                # Settings of the run, so those of the saved model are not kept.
                own = ("label_smoothing", "class_weights", "shard_classes")
                kept = {k: v for k, v in (saved.head_kwargs or {}).items() if k not in own}
                settings["head_kwargs"] = kept | loss
            if self.args.num_train_epochs:  # training changes the logits
                settings["calibration"] = None
        else:
            head = self.model_args.head or self.default_head
            settings["head"] = head
            settings["head_kwargs"] = self.model_args.head_kwargs | self._loss_options(head, image_data)
        names = dict(enumerate(image_data.class_names))
        return settings | {"id2label": names, "label2id": {name: index for index, name in names.items()}}

    def build_model(self, image_data: "ImageData") -> "SphereVisionPreTrainedModel":
        """Build a new model for the data, or load the saved one, and set the prototypes of a file if requested."""
        model = super().build_model(image_data)
        if self.model_args.prototypes_file is not None:
            _set_prototypes(model, self.model_args.prototypes_file, image_data.class_names)
        return model

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Evaluate a model on a split, also with mirrored images if requested."""
        options = self.part(EvaluationArguments)
        if options is None or not options.test_time_flips:  # joint prediction does not have these arguments
            return super().evaluate(model, batches, accelerator)
        from hf_sphere.training.evaluation import evaluate

        def measure(output: Any, batch: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
            with accelerator.autocast():
                mirrored = model(pixel_values=batch["pixel_values"].flip(-1))
            metrics = self.measure(output, batch)
            output.logits = output.logits + mirrored.logits
            return metrics | {"accuracy_with_flips": self.measure(output, batch)["accuracy"]}

        return evaluate(model, batches, accelerator, measure)

    def check_data(self, model: Any, image_data: "ImageData") -> None:
        """Check that the requested calibration can be fitted."""
        from hf_sphere.utils.shared_rows import Rows, check_disjoint

        super().check_data(model, image_data)
        held_out, kind = image_data.validation, getattr(self.part(CalibrationArguments), "calibrate", None)
        found = 0 if held_out is None else len(held_out.labels.unique())
        enough = found == len(image_data.class_names) if kind == "vector" else found > 0
        if kind is not None and (not enough or self.model_args.shard_classes):
            whose = " of all classes" if kind == "vector" else ""
            raise ValueError(
                f"calibrate {kind} needs validation images{whose} (set validation_split or validation_fraction), and "
                "class vectors that are not spread over processes by shard_classes."
            )
        if kind is not None and image_data.record is not None:
            rows = {key: Rows(ids, ids) for key, ids in image_data.record.ids.items()}
            check_disjoint(rows["validation"], rows["train"], "validation images", "training images")
            check_disjoint(rows["eval"], rows["validation"], "evaluation images", f"images for calibrate {kind}")

    def finish(self, prepared: Prepared, accelerator: "Accelerator") -> dict[str, float]:
        """Fit the requested calibration to held-out images.

        Returns the scores of the probabilities on the evaluation split without and with the calibration. One that
        increases the loss of the images that it is fitted to is not kept; the evaluation split does not decide.
        """
        from hf_sphere.metrics import probability_scores
        from hf_sphere.nn.calibration import calibrate, fit_calibration, is_harmful
        from hf_sphere.training.evaluation import gather_logits

        model, held_out = prepared.model, prepared.data.validation
        results: dict[str, float] = {}
        if (kind := getattr(self.part(CalibrationArguments), "calibrate", None)) is not None:
            model.config.calibration = None
            logits, labels = gather_logits(model, held_out, accelerator)
            fitted: dict[str, Any] = fit_calibration(logits, labels, kind)  # warns if there are few images
            if is_harmful(logits, labels, fitted):
                logger.warning("The calibration is not kept: the probabilities remain those of the training.")
                fitted = {}
            logits, labels = gather_logits(model, prepared.data.evaluation, accelerator)
            calibrated = calibrate(logits, **fitted) if fitted else logits
            for name, values in {"uncalibrated_": logits, "": calibrated}.items():
                scores = probability_scores(values, labels)
                results |= {f"eval_{name}{score}": value for score, value in scores.items()}
            if fitted and is_harmful(logits, labels, fitted):
                drop = "remove `calibration` from config.json"
                logger.warning(f"The calibration, fitted to other images, increases eval_nll; to drop it, {drop}.")
            model.config.calibration = fitted or None
            accelerator.print("\n".join(show_metrics(results)))
        return results

    def heads(self, model: Any) -> list[str]:
        """Return the name of the head."""
        return [f"{model.config.head} head"]

    def describe_head(self, config: "SphereVisionConfig") -> HeadDescription:
        """Return the head's description for the model card."""
        predicts = ["retrieval"] if self.is_open_set else [f"{config.num_labels} classes"]
        properties = {"head": f"`{config.head}` {config.head_kwargs or ''}"}
        return HeadDescription(predicts, f"{config.head} head", str(config.head), properties)

    def needs_new_head(self, saved: "SphereVisionConfig", image_data: "ImageData") -> bool:
        """Return whether the data has other classes than a saved model, and log it."""
        before, now = [saved.id2label[index] for index in range(saved.num_labels)], image_data.class_names
        unnamed = before == [f"LABEL_{index}" for index in range(len(now))]
        if before == now or unnamed:
            return False
        name, evaluates = self.model_args.model_name_or_path, self.args.num_train_epochs == 0
        if evaluates and not self.is_open_set:
            raise ValueError(
                f"the data has {shorten(now)} but {name} was trained on {shorten(before)}, and num_train_epochs 0 "
                "trains no new head for them; choose data with the model's classes, or train."
            )
        if not evaluates:
            logger.info("New head for %s; %s was trained on %s.", shorten(now), name, shorten(before))
        return not evaluates

    def _loss_options(self, head: str | None, image_data: "ImageData") -> dict[str, Any]:
        """Return the options of a head that are set by training arguments."""
        from hf_sphere.nn.heads import HEADS
        from hf_sphere.utils.options import keyword_options

        options: dict[str, Any] = {}
        if self.args.label_smoothing_factor:
            options["label_smoothing"] = self.args.label_smoothing_factor
        if self.model_args.class_weights == "balanced":
            counts = image_data.train.labels.bincount(minlength=len(image_data.class_names))
            # Their mean over the training images is 1, as in scikit-learn.
            mean_count = counts.sum() / (counts > 0).sum()
            options["class_weights"] = (mean_count / counts.clamp_min(1)).tolist()
        if self.model_args.shard_classes:
            options["shard_classes"] = True
        if self.args.loss_reduction is not None and head in HEADS:
            if "reduction" in keyword_options(HEADS[head]):
                options["reduction"] = self.args.loss_reduction
            elif self.args.loss_reduction == "sum":
                raise ValueError(f"head {head} does not support loss_reduction sum: its loss is a mean; leave it out.")
        return options


def shorten(names: list[str]) -> str:
    """Return the number of classes, and the names of the first ones."""
    return f"{len(names)} class{'es' * (len(names) > 1)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _set_prototypes(model: "SphereVisionPreTrainedModel", path: str, class_names: list[str]) -> None:
    """Load the prototypes of a file into the head, and check that they were placed for these classes."""
    from hf_sphere.prototypes import Placement

    head: Any = getattr(model, "head", None)
    if not hasattr(head, "set_prototypes"):
        raise ValueError(f"prototypes_file needs the head prototype; the model has {model.config.head or 'no head'}.")
    placement = Placement.load(path)
    if placement.class_names is not None and list(placement.class_names) != class_names:
        raise ValueError(
            f"{path} was placed for other classes: {_difference(list(placement.class_names), class_names)}. Place "
            "prototypes for the classes of the data, in their order."
        )
    try:
        head.set_prototypes(placement)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error


def _difference(theirs: list[str], ours: list[str]) -> str:
    """Describe how the class names of a file differ from those of the data."""
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} and the data has {len(ours)}"
    first = next(index for index, names in enumerate(zip(theirs, ours, strict=True)) if names[0] != names[1])
    return f"class {first} is {theirs[first]!r} in the file and {ours[first]!r} in the data"
