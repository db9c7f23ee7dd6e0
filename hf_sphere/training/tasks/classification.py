"""Image classification."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import data
from hf_sphere.data.options import ImageDataOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task, image
from hf_sphere.utils.arguments import Arguments, Options, argument
from hf_sphere.utils.checks import check_exclusive
from hf_sphere.utils.texts import INTERVAL, show_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from hf_sphere.data import Episodes, ImageData
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)

HEAD_NAMES = (  # those of `hf_sphere.nn.HEADS`, which would import torch
    "adaface", "angular", "arcface", "cosface", "cosine", "etf", "hyperbolic", "prototype", "proxy_anchor", "softmax",
    "spherized", "subcenter_arcface", "vmf",
)  # fmt: skip


def head_choices() -> Iterable[str]:
    """Return the names of the heads, with one's own if torch is imported."""
    return getattr(sys.modules.get("hf_sphere.nn.heads"), "HEADS", HEAD_NAMES)


@dataclass
class ModelArguments(image.EncoderArguments):
    """Head."""

    head: str | None = argument(None, "Head; if not set, `spherized`, or `prototype` for joint.", choices=head_choices)
    head_kwargs: Options = argument(Options, "Options of the head, a mapping.")
    class_weights: Literal["balanced"] | None = argument(
        None, "Weight the loss of each class by the inverse of its number of training images; not weighted if not set."
    )
    shard_classes: bool = argument(False, "Spread the class vectors over processes; the head must have this option.")
    prototypes_file: str | None = argument(None, "Prototypes for `prototype`, of hf-sphere place; computed if not set.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_classes |= bool(self.head_kwargs and self.head_kwargs.get("shard_classes"))


@dataclass
class ImageDataArguments(ImageDataOptions):
    """Batches of a fixed number of classes."""

    episode_classes: int | None = argument(
        None, "P x K sampling: classes per training batch, instead of its size.", only_with=["episode_examples"], ge=1
    )
    episode_examples: int | None = argument(None, "P x K: images per class.", only_with=["episodes_per_epoch"], ge=1)
    episodes_per_epoch: int | None = argument(
        None, "P x K sampling: batches per epoch, over all processes.", only_with=["episode_classes"], ge=1
    )

    @property
    def episodes(self) -> "Episodes | None":
        """The episodes of P x K sampling, if requested."""
        numbers: Any = self.episode_classes, self.episode_examples, self.episodes_per_epoch
        return None if None in numbers else data.Episodes(*numbers)


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
    reject: float | None = argument(
        None,
        "Fit a rejection of unknown images to reserved ones; at most this fraction, such as 0.05, is rejected.",
        gt=0,
        lt=1,
    )


def prepare(
    run: "Run",
    model_args: ModelArguments,
    data_args: ImageDataArguments,
    args: RecipeArguments,
    evaluation: EvaluationArguments,
) -> Prepared:
    """Check the head, load the data, and build the model."""
    check_head(model_args, data_args, args)
    if (level := evaluation.reject) is not None:
        if args.num_train_epochs == 0 or model_args.shard_classes:
            raise ValueError("reject does not apply to num_train_epochs 0 or shard_classes; use hf-sphere reject.")
        data_args.rejection_fraction = data_args.rejection_fraction or 0.1
    setup = image.load_images(run, model_args, data_args, "classification", episodes=data_args.episodes)
    model = build_classifier(setup)
    functions: dict[str, Any] = {}
    if level is not None or model.rejection is not None:
        functions["compare"] = partial(report_rejection, run)
    if evaluation.calibrate is not None:
        functions["finish"] = calibration(run, setup, evaluation.calibrate)
    if level is not None:
        from hf_sphere.ood.rejection_fit import check_count

        images: Any = setup.images
        check_separate(images, "rejection", "train", "validation", "eval")
        check_count((images.rejection.num_examples + 1) // 2, level, is_split=True)
        functions["finish"] = partial(fit_to_reserved, images, level, functions.get("finish"))
    if evaluation.test_time_flips:
        functions["evaluate"] = partial(evaluate_with_flips, run)
    predicts = f"{model.config.num_labels} classes"
    return image.provide(run, setup, model, predicts, **functions)


def report_rejection(run: "Run", model: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    """Print and return what the rejection of a model rejects of the evaluation images."""
    rejection = model.rejection
    summary = f"{rejection.describe()}, rejects {100 * results['eval_rejected']:.1f} % of the evaluation images"
    run.accelerator.print(f"rejection  {summary}")
    names, settings = ("score", "level", "num_images", "ranking", "ranked_by"), rejection.settings
    return {"rejection": {name: settings[name] for name in names if name in settings} | {"summary": summary}}


def check_head(
    model_args: ModelArguments, data_args: ImageDataArguments, args: RecipeArguments, default_head: str = "spherized"
) -> None:
    """Raise an error for a new head or option that does not exist, or two arguments for one thing."""
    from hf_sphere.nn.heads import check_options

    settings = vars(model_args) | vars(args) | vars(data_args)
    for option in ("class_weights", "reduction", "label_smoothing"):
        settings[f"head_kwargs {option}"] = model_args.head_kwargs.get(option)
    weights = ("class_weights", "head_kwargs class_weights")
    pairs = [("loss_reduction", "head_kwargs reduction"), ("label_smoothing_factor", "head_kwargs label_smoothing")]
    for pair in (weights, *pairs, *product(weights, ("class_balanced_sampling", "episode_classes"))):
        check_exclusive("change the loss", {name: settings.get(name) for name in pair})
    if model_args.model_name_or_path is None:
        check_options(model_args.head or default_head, model_args.head_kwargs)


def build_classifier(setup: image.Setup, **settings: Any) -> Any:
    """Build a model with a head for the data, or load the saved one; see `build_model`.

    A saved model needs no other head to evaluate retrieval of other classes.
    """
    from hf_sphere.nn.heads import HEADS
    from hf_sphere.utils.checks import keyword_options

    args, saved, now, new_head = setup.model_args, setup.saved, setup.images.class_names, False
    if saved is None:
        default_head = "prototype" if setup.task == "joint" else "spherized"
        head, options = args.head or default_head, dict(args.head_kwargs)
        settings["head"] = head
    else:
        before, name = [saved.id2label[index] for index in range(saved.num_labels)], args.model_name_or_path
        if before not in (now, [f"LABEL_{index}" for index in range(len(now))]):  # the latter are unnamed
            new_head = setup.args.num_train_epochs > 0
            if not new_head and setup.task != "retrieval":
                raise ValueError(
                    f"the data has {shorten(now)} but {name} was trained on {shorten(before)}, and num_train_epochs 0 "
                    "trains no new head for them; choose data with the model's classes, or train."
                )
            if new_head:
                logger.info("New head for %s; %s was trained on %s.", shorten(now), name, shorten(before))
        if new_head and args.head is not None:
            saved.head, saved.head_kwargs = args.head, dict(args.head_kwargs)
        head, options = saved.head, {k: v for k, v in (saved.head_kwargs or {}).items() if k not in image.OF_THE_RUN}
    if setup.args.label_smoothing_factor:
        options["label_smoothing"] = setup.args.label_smoothing_factor
    if args.class_weights == "balanced":
        if setup.data_args.streaming:
            raise ValueError("class_weights balanced needs all labels before training; leave it or streaming out.")
        counts = setup.images.train.labels.bincount(minlength=len(now))
        # Their mean over the training images is 1, as in scikit-learn.
        options["class_weights"] = (counts.sum() / (counts > 0).sum() / counts.clamp_min(1)).tolist()
    if args.shard_classes:
        options["shard_classes"] = True
    reduction = setup.args.loss_reduction
    if reduction == "sum" or (reduction and head in HEADS and "reduction" in keyword_options(HEADS[head])):
        options["reduction"] = reduction
    if options or saved is None or saved.head_kwargs:
        settings["head_kwargs"] = options
    settings |= {"id2label": dict(enumerate(now)), "label2id": dict(zip(now, range(len(now)), strict=True))}
    model = image.build_model(setup, settings, has_new_head=new_head)
    if args.prototypes_file is not None:
        set_prototypes(model, args.prototypes_file, now)
    return model


def evaluate_with_flips(run: "Run", model: Any, batches: Any) -> dict[str, float]:
    """Evaluate a model on a split, also with logits averaged over each image and its mirror image."""
    from hf_sphere.training.evaluation import evaluate, measure_images

    def measure(output: Any, batch: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        with run.accelerator.autocast():
            mirrored = model(pixel_values=batch["pixel_values"].flip(-1))
        metrics = measure_images(output, batch)
        output.logits = output.logits + mirrored.logits
        return metrics | {"accuracy_with_flips": measure_images(output, batch)["accuracy"]}

    return evaluate(model, batches, run.accelerator, measure)


def check_separate(images: "ImageData", part: str, *others: str) -> None:
    """Raise an error if images of a part of the data are in other parts, too; they are named as in its record."""
    from hf_sphere.utils.shared_rows import Rows, check_disjoint

    ids = {} if images.record is None else images.record.ids
    parts = {"train": "training", "eval": "evaluation"}
    names = {name: f"{parts.get(name, name)} images" for name in ids}
    for other in others if part in ids else ():
        if other in ids:
            check_disjoint(Rows(ids[part], ids[part]), Rows(ids[other], ids[other]), names[part], names[other])


def calibration(run: "Run", setup: image.Setup, kind: str) -> Callable[[Any], dict[str, float]]:
    """Return the field `finish` of `Prepared` that fits a calibration, after checking that it can be fitted."""
    images, whose = setup.images, " of all classes" * (kind == "vector")
    count = 0 if images.validation is None else len(images.validation.labels.unique())
    if setup.model_args.shard_classes or count < (len(images.class_names) if whose else 1):
        raise ValueError(
            f"calibrate {kind} needs validation images{whose} (set validation_split or validation_fraction), and "
            "class vectors that are not spread over processes by shard_classes."
        )
    check_separate(images, "validation", "train", "eval")
    return partial(fit_calibration_of, run, images, kind)


def fit_calibration_of(run: "Run", images: "ImageData", kind: str, model: Any) -> dict[str, float]:
    """Fit a calibration to held-out images, and keep it if it helps by the interval of its cross-validation.

    Returns this change of their likelihood, with its 95 % interval, and the scores of the probabilities on the
    evaluation split without and with the calibration; the evaluation split does not decide.
    """
    from hf_sphere.metrics import probability_scores
    from hf_sphere.nn.calibration import calibrate, fit_and_validate
    from hf_sphere.training.evaluation import gather_logits

    model.set_calibration(None)
    validation: Any = images.validation
    fitted, mean, margin = fit_and_validate(*gather_logits(model, validation, run.accelerator), kind)
    measured = f"in a cross-validation of {validation.num_examples:,} images"
    described = f"{measured} it changes their negative log-likelihood by {mean:.4g} ± {margin:.4g}"
    if mean + margin < 0:
        run.accelerator.print(f"calibration kept: {described}")
    else:
        logger.warning("The calibration is not kept, since it is not shown to help: %s.", described)
        fitted = {}
    results = {"validation_nll_change": mean, f"validation_nll_change{INTERVAL}": margin}
    logits, labels = gather_logits(model, images.evaluation, run.accelerator)
    for prefix, values in {"uncalibrated_": logits, "": calibrate(logits, **fitted) if fitted else logits}.items():
        results |= {f"eval_{prefix}{score}": value for score, value in probability_scores(values, labels).items()}
    model.set_calibration(fitted or None)
    run.accelerator.print("\n".join(show_metrics(results)))
    return results


def fit_to_reserved(
    images: "ImageData", level: float, calibrate: Callable[[Any], dict[str, Any]] | None, model: Any
) -> dict[str, Any]:
    """Fit a rejection to the reserved images, on all processes, before the logits are calibrated, if requested."""
    import torch
    from accelerate.utils import gather_object

    from hf_sphere.ood import Outputs, fit_rejection, model_outputs

    reserved: Any = images.rejection
    own = [(reserved.epoch_rows(), *model_outputs(model, reserved))] if len(reserved) else []
    rows, *values = zip(*gather_object(own), strict=True)
    order = torch.cat(rows).argsort()  # so that the halves do not depend on the number of processes
    fit_rejection(model, Outputs(*(None if each[0] is None else torch.cat(each)[order] for each in values)), level)
    return {} if calibrate is None else calibrate(model)


def shorten(names: list[str]) -> str:
    """Return the number of classes, and the names of the first ones."""
    return f"{len(names)} class{'es' * (len(names) > 1)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def set_prototypes(model: Any, path: str, class_names: list[str]) -> None:
    """Load the prototypes of a file into the head, and check that they were placed for these classes."""
    from hf_sphere.prototypes import Placement

    placement = Placement.load(path)
    if placement.class_names is not None and list(placement.class_names) != class_names:
        raise ValueError(
            f"{path} was placed for {shorten(list(placement.class_names))}, not for {shorten(class_names)} in this "
            "order; place prototypes for the classes of the data."
        )
    head: Any = getattr(model, "head", None)
    if not hasattr(head, "set_prototypes"):
        raise ValueError(f"prototypes_file needs the head prototype; the model has {model.config.head or 'no head'}.")
    head.set_prototypes(placement)


TASK = Task(
    summary="Train an image classifier on the sphere.",
    example="hf-sphere train classification --dataset_name digits --image_size 28 \\\n"
    "    --head vmf --output_dir outputs/digits",
    arguments=(ModelArguments, ImageDataArguments, RecipeArguments, EvaluationArguments),
    prepare=prepare,
    metric="accuracy",
    headline=("accuracy",),
    model_name="SphereVisionForImageClassification",
    pipeline_tag="image-classification",
)
