"""From arguments and data to an image model: built anew or loaded, and always fitting the data."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from hf_sphere.data import ImageData
from hf_sphere.models import SphereVisionConfig, SphereVisionImageProcessor, SphereVisionModel
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
from hf_sphere.nn.heads import HEADS
from hf_sphere.nn.heads.base import option_names
from hf_sphere.prototypes import Placement
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.image_arguments import (
    EncoderArguments,
    ModelArguments,
    RegressionArguments,
    TrainingImageArguments,
)
from hf_sphere.training.tasks import ImageTask


def build_model(
    task: ImageTask,
    model_args: ModelArguments,
    value_args: RegressionArguments,
    args: TrainingArguments,
    data: ImageData,
) -> SphereVisionPreTrainedModel:
    """Build a new model that fits the data, or load the one that was named and see that it fits."""
    if args.label_smoothing_factor and not task.has_classes:
        raise ValueError("label smoothing is for classes, and a regression has none; leave it out.")
    if model_args.model_name_or_path is not None:
        return _load_model(task, model_args, value_args, args, data)
    more: dict[str, Any] = {"head": None}
    if task.has_classes:
        head = model_args.head or ("prototype" if task.has_values else "spherized")
        head_kwargs = model_args.head_kwargs | _loss_options(head, args)
        more = {"head": head, "head_kwargs": head_kwargs, **_label_names(data)}
    elif model_args.head is not None or model_args.head_kwargs:
        raise ValueError("a regression has no classes and so no head; leave out head and head_kwargs.")
    if task.has_values:
        more |= _value_settings(value_args, args, data)
    config = SphereVisionConfig(
        backbone=model_args.backbone or "lenet5",
        backbone_kwargs=dict(model_args.backbone_kwargs),
        num_channels=data.shape.channels,
        image_size=[data.shape.height, data.shape.width],
        embedding_dim=model_args.embedding_dim,
        freeze_batch_norm=bool(model_args.freeze_batch_norm),
        **more,
    )
    model = task.model_class(config, pretrained=model_args.pretrained_backbone)
    if model_args.prototypes_file is not None:
        _take_prototypes(model, model_args.prototypes_file, data.class_names)
    return model


def _load_model(
    task: ImageTask,
    model_args: ModelArguments,
    value_args: RegressionArguments,
    args: TrainingArguments,
    data: ImageData,
) -> SphereVisionPreTrainedModel:
    saved = model_args.model_name_or_path
    config = SphereVisionConfig.from_pretrained(saved)
    own, built = task.model_class.__name__, (config.architectures or [None])[0]
    if built not in (own, SphereVisionModel.__name__, None):
        raise ValueError(f"{saved} is a {built}, but this recipe trains a {own}; use the recipe of that model.")
    check_same_architecture(model_args, config)
    if model_args.freeze_batch_norm is not None:
        config.freeze_batch_norm = model_args.freeze_batch_norm
    losses = _loss_options(config.head, args)
    if config.head_kwargs or losses:
        # Smoothing belongs to a run and not to a model: without a word of it there is none.
        kept = {k: v for k, v in (config.head_kwargs or {}).items() if k != "label_smoothing"}
        config.head_kwargs = kept | losses
    if task.has_values:
        for name, value in _value_settings(value_args, args, data, config).items():
            setattr(config, name, value)
    model = task.model_class.from_pretrained(saved, config=config)
    if task.has_classes:
        if model.config.num_labels != len(data.class_names):
            raise ValueError(
                f"the data has {len(data.class_names)} classes but {saved} has {model.config.num_labels}. Train a new "
                "model, or choose data with the model's classes."
            )
        for name, labels in _label_names(data).items():
            setattr(model.config, name, labels)
    return model


def check_values(model: SphereVisionPreTrainedModel, data: ImageData) -> None:
    """Refuse values outside of a model's range before training, where looking at them costs nothing."""
    regression: Any = getattr(model, "regression", None)
    if regression is None or regression.out_of_range == "clip":
        return
    for name, batches in (("training", data.train), ("evaluation", data.evaluation), ("validation", data.validation)):
        if batches is None:
            continue
        values: Tensor = batches.labels if batches.regression_labels is None else batches.regression_labels
        outside = (values < regression.low) | (values > regression.high)
        if outside.any():
            raise ValueError(
                f"{int(outside.sum())} of {len(values)} {name} values lie outside the range {regression.low:g} to "
                f"{regression.high:g}, for instance {values[outside][0].item():g}. Widen --value_range, or take the "
                "nearest end for them with --out_of_range clip."
            )


def adopt_image_settings(data_args: TrainingImageArguments, saved: str) -> None:
    """Prepare images as a saved model wants them, where the arguments do not say otherwise."""
    processor = SphereVisionImageProcessor.from_pretrained(saved)
    data_args.image_size = data_args.image_size or [processor.size["height"], processor.size["width"]]
    data_args.num_channels = data_args.num_channels or processor.num_channels
    data_args.image_mean = data_args.image_mean or list(processor.image_mean)
    data_args.image_std = data_args.image_std or list(processor.image_std)


def build_processor(config: SphereVisionConfig, data: ImageData) -> SphereVisionImageProcessor:
    """Make the image processor that prepares images as the training data was."""
    return SphereVisionImageProcessor(
        num_channels=config.num_channels,
        size={"height": data.shape.height, "width": data.shape.width},
        image_mean=data.mean,
        image_std=data.std,
    )


def describe(model: SphereVisionPreTrainedModel, data: ImageData) -> str:
    """Sum up data and model in a few lines."""
    parameters = sum(p.numel() for p in model.parameters())
    config, shape = model.config, data.shape
    held_out = f", {data.validation.num_examples:,} held out" if data.validation is not None else ""
    targets = [f"{len(data.class_names)} classes"] if data.class_names else []
    if data.eval_class_names not in ([], data.class_names):
        other = "other " if set(data.class_names).isdisjoint(data.eval_class_names) else ""
        targets.append(f"{len(data.eval_class_names)} {other}classes to evaluate on")
    heads = [f"{config.head} head"] if config.head is not None else []
    regression: Any = getattr(model, "regression", None)
    if regression is not None:
        targets.append(f"values {regression.low:g} to {regression.high:g}")
        heads.append("regression on a pole")
    classifier: Any = getattr(model, "classifier", None)
    if classifier is not None:
        heads += ["spherized"] if config.spherization is not None else []
        heads.append(f"{classifier.metric} prototypes")
    return (
        f"data      {data.train.num_examples:,} training images{held_out}, {data.evaluation.num_examples:,} for "
        f"evaluation, {shape.channels} x {shape.height} x {shape.width}, {', '.join(targets)}\n"
        f"model     {config.backbone}, embeddings of length {model.base_model.embedding_dim}, {', '.join(heads)}\n"
        f"          {parameters:,} parameters on {model.device}"
    )


def _take_prototypes(model: SphereVisionPreTrainedModel, path: str, class_names: list[str]) -> None:
    """Put the prototypes of a file in place, and see that they were placed for these classes."""
    head: Any = getattr(model, "head", None)
    if not hasattr(head, "set_prototypes"):
        raise ValueError(f"prototypes_file needs the head prototype; the model has {model.config.head or 'no head'}.")
    placement = Placement.load(path)
    if placement.class_names is not None and list(placement.class_names) != class_names:
        raise ValueError(
            f"{path} was placed for other classes: {_difference(list(placement.class_names), class_names)}. Place "
            "prototypes for the data's classes in their order."
        )
    try:
        head.set_prototypes(placement)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error


def _difference(theirs: list[str], ours: list[str]) -> str:
    """Say in which way a file's class names are not those of the data."""
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} and the data has {len(ours)}"
    first = next(index for index, names in enumerate(zip(theirs, ours, strict=True)) if names[0] != names[1])
    return f"class {first} is {theirs[first]!r} there and {ours[first]!r} in the data"


def _loss_options(head: str | None, args: TrainingArguments) -> dict[str, Any]:
    """Options of a head that arguments of the run set."""
    options: dict[str, Any] = {}
    if args.label_smoothing_factor:
        options["label_smoothing"] = args.label_smoothing_factor
    if args.loss_reduction is not None and head in HEADS:
        if "reduction" in option_names(HEADS[head]):
            options["reduction"] = args.loss_reduction
        elif args.loss_reduction == "sum":
            raise ValueError(f"loss_reduction sum is not for the head {head}, whose loss is a mean; leave it out.")
    return options


def _value_settings(
    value_args: RegressionArguments, args: TrainingArguments, data: ImageData, saved: SphereVisionConfig | None = None
) -> dict[str, Any]:
    """Settings of the regression: what the arguments say, else what a saved model has, else the defaults."""
    before = (saved.regression_kwargs or {}) if saved is not None else {}
    given = value_args.value_range or (saved.value_range if saved is not None else None)
    # A range that was measured on the training images is no statement about others.
    careful = "error" if given is not None else "clip"
    asked = {"out_of_range": value_args.out_of_range, "reduction": args.loss_reduction}
    kwargs = {"out_of_range": careful, "reduction": "mean"} | before
    weight = getattr(value_args, "task_weight", None)
    before_weight = saved.task_weight if saved is not None else SphereVisionConfig.task_weight
    return {
        "value_range": list(given or data.value_range or ()),
        "regression_kwargs": kwargs | {name: value for name, value in asked.items() if value is not None},
        "task_weight": before_weight if weight is None else weight,
    }


def _label_names(data: ImageData) -> dict[str, dict]:
    """Class names as a configuration holds them."""
    return {
        "id2label": dict(enumerate(data.class_names)),
        "label2id": {name: index for index, name in enumerate(data.class_names)},
    }


def check_same_architecture(model_args: EncoderArguments, saved: SphereVisionConfig) -> None:
    """Refuse settings of the architecture that differ from those of the saved model to start from."""
    default = type(model_args)()
    known = {field.name for field in fields(model_args)}
    for name in ("backbone", "backbone_kwargs", "embedding_dim", "head", "head_kwargs"):
        if name not in known:
            continue
        asked, have = getattr(model_args, name), getattr(saved, name) or getattr(default, name)
        if asked not in (getattr(default, name), have):
            raise ValueError(f"{name} is {asked} but {model_args.model_name_or_path} has {have}; leave {name} out.")
    for name, what in (("pretrained_backbone", "weights"), ("prototypes_file", "prototypes")):
        if name in known and getattr(model_args, name):
            raise ValueError(f"{name} has no meaning for a saved model, which brings its {what}; leave it out.")
