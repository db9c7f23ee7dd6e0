"""Base of the image tasks: encoder arguments, loading images, building a model or loading a saved one."""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_sphere import data, models
from hf_sphere.data.options import DataTask, ImageDataOptions, OpenSetOptions, ValueOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.tasks.base import Description, Prepared, Task
from hf_sphere.utils.arguments import Arguments, Options, argument
from hf_sphere.utils.loading import load_model, load_pretrained

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_sphere.data import Episodes, ImageData
    from hf_sphere.models import SphereVisionConfig
    from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
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
    )
    backbone_weights: str | None = argument(
        None, "Start from this file of weights of the backbone (safetensors or state dict), likewise with its images."
    )
    freeze_stages: int = argument(0, "Do not train the stem and this many first stages of the backbone.", ge=0)
    linear_probe_epochs: int = argument(0, "Train only the layers after the backbone in these first epochs.", ge=0)
    embedding_dim: int | None = argument(None, "Dimension of the embeddings; that of the backbone if not set.", ge=1)
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
        names = ("pretrained_backbone", "backbone_weights", "initial_weights")
        sources = [name for name in names if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(
                f"{' and '.join(sources)} are two sources of the backbone's weights; use only one of them."
            )


class ImageTask(Task):
    """Training of an image model.

    Attributes:
        data_task: The task of `load_image_data`.
        model_name: Name of the model's class in `hf_sphere.models`.
        default_backbone: Backbone if the argument is not set.
        is_open_set: Whether the evaluation data may have other classes than the training data.
        num_transparent: Number of images with transparency, once the data is loaded.
    """

    data_task: ClassVar[DataTask]
    model_name: ClassVar[str]
    default_backbone: ClassVar[str] = "lenet5"
    is_open_set: ClassVar[bool] = False
    num_transparent = 0

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.model_args: Any = self.part(EncoderArguments)
        self.data_args: Any = self.part(ImageDataOptions)
        corrupted = self.data_args.sample_classes or self.data_args.label_noise or self.data_args.shuffled_pixels
        if corrupted and self.data_args.corruption_seed is None:
            self.data_args.corruption_seed = self._default_corruption_seed()

    @property
    def model_class(self) -> "type[SphereVisionPreTrainedModel]":
        """Class of the model."""
        return getattr(models, self.model_name)

    def prepare(self, run: "Run") -> Prepared:
        """Load the data and build the model."""
        import torch
        from timm import is_model

        from hf_sphere.data.provenance import DataRecord
        from hf_sphere.models.backbones import create_backbone
        from hf_sphere.training.evaluation import initialize_from_data
        from hf_sphere.utils.modules import check_input_shape

        name = self.model_args.backbone or self.default_backbone
        if models.SphereVisionConfig(backbone=name).backbone_config is None and not is_model(name.split(".")[0]):
            create_backbone(name, num_channels=3, image_size=1)  # raises an error that lists similar names
        if self.model_args.model_name_or_path is not None:
            from hf_sphere.utils.model_sources import processor_options

            processor = load_pretrained(models.SphereVisionImageProcessor, self.model_args.model_name_or_path)
            self.data_args.fill(processor_options(processor))
        elif self.model_args.pretrained_backbone or self.model_args.backbone_weights is not None:
            from hf_sphere.models.pretrained_backbones import pretrained_preprocessing

            self.data_args.fill(pretrained_preprocessing(name))
        image_data = self.load_data(run.accelerator)
        if (saved := self.model_args.model_name_or_path) is not None and image_data.record is not None:
            record = image_data.record.after(DataRecord.read(saved), trains=self.args.num_train_epochs > 0)
            image_data = replace(image_data, record=record)
        # Convolutions are faster with the channels last, as the batches are; benchmarks/image_training.py measures it.
        model = self.build_model(image_data).to(run.accelerator.device, memory_format=torch.channels_last)
        shape = image_data.shape
        check_input_shape(model.base_model, (shape.channels, shape.height, shape.width))
        self.check_data(model, image_data)
        self.before_epoch(model, self.model_args.linear_probe_epochs)  # freezes stages
        in_backbone = len([*model.base_model.backbone.parameters()])
        if self.model_args.linear_probe_epochs and len([*model.parameters()]) == in_backbone:
            raise ValueError("linear_probe_epochs needs layers after the backbone to train; set embedding_dim.")
        if self.args.resume_from_checkpoint is None:
            initialize_from_data(model, image_data.train)
        processor = models.SphereVisionImageProcessor.from_data(image_data)
        self.num_transparent = image_data.num_transparent
        run.print(self.summarize(model, image_data))
        return Prepared(model, self.batches(image_data), processor, image_data.record)

    # Data

    def episodes(self) -> "dict[str, Episodes | None]":
        """Return the episodes of training, validation and evaluation, as keywords of `load_image_data`."""
        return {"episodes": self.data_args.episodes}

    def load_data(self, accelerator: "Accelerator") -> "ImageData":
        """Load the data set; the main process decodes it first, the others read its cache."""
        args, episodes = self.args, self.episodes()
        batch_size, drawn = args.per_device_train_batch_size, episodes.get("episodes")
        if drawn is not None and batch_size not in (TrainingArguments.per_device_train_batch_size, drawn.batch_size):
            raise ValueError(
                f"per_device_train_batch_size {batch_size} does not match episodes of {drawn.classes} classes "
                f"and {drawn.examples} images, which are batches of {drawn.batch_size}; leave it out."
            )
        with accelerator.main_process_first():
            return data.load_image_data(
                self.data_args,
                self.data_task,
                targets=self.part(ValueOptions) or self.part(OpenSetOptions),
                **episodes,
                batch_size=batch_size,
                eval_batch_size=args.per_device_eval_batch_size,
                device=accelerator.device,
                seed=args.seed,
                process_index=accelerator.process_index,
                num_processes=accelerator.num_processes,
                progress=accelerator.is_main_process and not args.disable_tqdm,
            )

    def before_epoch(self, model: Any, epoch: int) -> None:
        """Freeze the backbone in the epochs of the linear probe, and its first stages in all epochs."""
        from hf_sphere.models.pretrained_backbones import stage_parameters

        backbone, args = model.base_model.backbone, self.model_args
        frozen = stage_parameters(backbone, args.freeze_stages)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(epoch >= args.linear_probe_epochs and name not in frozen)

    def check_data(self, model: Any, image_data: "ImageData") -> None:
        """Raise an error if the model cannot be trained on the data."""

    def batches(self, image_data: "ImageData") -> Any:
        """Return the batches for the loop and the evaluation."""
        return image_data

    # Model

    def model_settings(self, image_data: "ImageData", saved: "SphereVisionConfig | None" = None) -> dict[str, Any]:
        """Return the settings of the configuration that depend on the task, its arguments and the data.

        Args:
            image_data: The data.
            saved: Configuration of the model to start from, if there is one.
        """
        return {} if saved is not None else {"head": None}

    def build_model(self, image_data: "ImageData") -> "SphereVisionPreTrainedModel":
        """Build a new model for the data, or load the saved one.

        Raises:
            ValueError: If an argument does not apply, or contradicts the saved model or the data.
        """
        args = self.model_args
        if args.model_name_or_path is not None:
            return self._load_model(args.model_name_or_path, image_data)
        config = models.SphereVisionConfig(
            backbone=args.backbone or self.default_backbone,
            backbone_kwargs=dict(args.backbone_kwargs),
            num_channels=image_data.shape.channels,
            image_size=[image_data.shape.height, image_data.shape.width],
            embedding_dim=args.embedding_dim,
            final_activation=args.final_activation,
            freeze_batch_norm=bool(args.freeze_batch_norm),
            initialization=args.initialization,
            **self.model_settings(image_data),
        )
        pretrained: bool | str = args.backbone_weights or args.pretrained_backbone
        if pretrained is True and args.backbone is not None and Path(args.backbone).is_dir():
            pretrained = args.backbone
        model = self.model_class(config, pretrained=pretrained)
        if args.initial_weights is not None:
            _copy_backbone_weights(args.initial_weights, model)
        return model

    def check_saved(self, config: "SphereVisionConfig") -> None:
        """Raise an error if the saved model has another class, or another architecture than the arguments."""
        saved = self.model_args.model_name_or_path
        found = (config.architectures or [None])[0]
        if found not in (self.model_name, "SphereVisionModel", None):
            raise ValueError(
                f"{saved} is a {found}, but this recipe trains a {self.model_name}; use the recipe of that model."
            )
        check_same_architecture(self.model_args, config)

    def _load_model(self, saved: str, image_data: "ImageData") -> "SphereVisionPreTrainedModel":
        config = load_pretrained(models.SphereVisionConfig, saved)
        new_head = self.needs_new_head(config, image_data)
        if new_head and self.model_args.head is not None:
            config.head, config.head_kwargs = self.model_args.head, dict(self.model_args.head_kwargs)
        self.check_saved(config)
        if self.model_args.freeze_batch_norm is not None:
            config.freeze_batch_norm = self.model_args.freeze_batch_norm
        for name, value in self.model_settings(image_data, config).items():
            setattr(config, name, value)
        if not new_head:
            return load_model(self.model_class, saved, config=config)
        model = load_model(self.model_class, saved, config=config, ignore_mismatched_sizes=True)
        model.head.reset_parameters()
        return model

    def needs_new_head(self, saved: "SphereVisionConfig", image_data: "ImageData") -> bool:
        """Return whether the head of a saved model is for other classes than the data; False without classes."""
        return False

    def _default_corruption_seed(self) -> int:
        """Return the corruption seed of the run to resume, else the seed of this run."""
        from hf_sphere.training.output_dir import read_settings

        resumes = self.args.resume_from_checkpoint is not None
        before = (read_settings(Path(self.args.output_dir)) or {}) if resumes else {}
        return self.args.seed if before.get("corruption_seed") is None else before["corruption_seed"]

    # Console and card

    def targets(self, model: Any) -> list[str]:
        """Return what the model predicts besides classes, for the console."""
        return []

    def heads(self, model: Any) -> list[str]:
        """Return the parts of the model that compute predictions from embeddings, for the console."""
        return []

    def summarize(self, model: Any, image_data: "ImageData") -> str:
        """Summarize data and model in a few lines."""
        shape = image_data.shape
        held_out = f", {image_data.validation.num_examples:,} held out" if image_data.validation is not None else ""
        targets = [f"{len(image_data.class_names)} classes"] if image_data.class_names else []
        if image_data.eval_class_names not in ([], image_data.class_names):
            other = "other " if set(image_data.class_names).isdisjoint(image_data.eval_class_names) else ""
            targets.append(f"{len(image_data.eval_class_names)} {other}classes to evaluate on")
        parts = [model.config.backbone, f"{model.base_model.embedding_dim}-dimensional embeddings", *self.heads(model)]
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        untrained = f" ({frozen:,} frozen)" if frozen else ""
        prepared = ""
        if self.data_args.crop_pct is not None:
            mean, std = (", ".join(f"{value:.3f}" for value in part) for part in (image_data.mean, image_data.std))
            prepared = f"\nimages    crop of {shape.crop_pct:g} of a side, mean {mean}, standard deviation {std}"
        return (
            f"data      {image_data.train.num_examples:,} training images{held_out}, "
            f"{image_data.evaluation.num_examples:,} for evaluation, "
            f"{shape.channels} x {shape.height} x {shape.width}, {', '.join([*targets, *self.targets(model)])}\n"
            f"model     {', '.join(parts)}\n"
            f"          {sum(p.numel() for p in model.parameters()):,} parameters{untrained} on {model.device}"
            f"{prepared}"
        )

    def describe(self, prepared: Prepared) -> Description:
        """Return the model's description for the model card."""
        config, args = prepared.model.config, self.data_args
        background = " ".join(map(str, prepared.processor.background_color))
        drawn = f", {self.num_transparent:,} with transparency, drawn on the color {background}"
        card = self.describe_head(config)
        chosen_on = {} if args.validation_split is None else {"held_out": f"the split {args.validation_split}"}
        return Description(
            title=f"{config.backbone} with {card.head} on {Path(args.dataset_name).name}",
            summary=f"Image model for {' and '.join(card.predicts)}: a `{config.backbone}` backbone and the "
            f"{card.head} of hf_sphere.",
            model={
                "backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}",
                **card.properties,
                "images": f"{config.num_channels} x {config.input_size[0]} x {config.input_size[1]}"
                + drawn * bool(self.num_transparent),
            },
            dataset=args.dataset_name,
            tags=[card.tag],
            packages=["timm"],
            **chosen_on,
        )

    @abstractmethod
    def describe_head(self, config: "SphereVisionConfig") -> "HeadDescription":
        """Return the description, for the model card, of the part that computes predictions from embeddings."""


@dataclass(frozen=True)
class HeadDescription:
    """Description, for the model card, of the part of a model that computes predictions from embeddings."""

    predicts: list[str]  # what it predicts
    head: str  # its name
    tag: str  # a tag of the card
    properties: dict[str, str]  # further properties by name


def check_same_architecture(args: EncoderArguments, saved: "SphereVisionConfig") -> None:
    """Raise an error if the arguments set another architecture than that of the saved model."""
    default: Mapping[str, Any] = vars(type(args)())
    known = {field.name for field in fields(args)}
    for name in ("backbone", "backbone_kwargs", "embedding_dim", "final_activation", "head", "head_kwargs"):
        if name not in known:
            continue
        given, have = getattr(args, name), getattr(saved, name)
        have = default[name] if have is None else have
        if given not in (default[name], have):
            raise ValueError(f"{name} is {given} but {args.model_name_or_path} has {have}; leave {name} out.")
    weights = ("pretrained_backbone", "backbone_weights", "initial_weights", "initialization")
    for name, what in (*((name, "weights") for name in weights), ("prototypes_file", "prototypes")):
        if name in known and getattr(args, name):
            raise ValueError(f"{name} does not apply to a saved model, which has {what} already; leave {name} out.")


def _copy_backbone_weights(saved: str, model: "SphereVisionPreTrainedModel") -> None:
    """Copy the tensors of a saved model's backbone that have the name and shape of one in a new model's backbone."""
    # The few-shot model can be loaded from any other model, without its head.
    source = load_model(models.SphereVisionForFewShotClassification, saved).base_model.backbone.state_dict()
    own = model.base_model.backbone.state_dict()
    shared = {name: tensor for name, tensor in source.items() if name in own and own[name].shape == tensor.shape}
    if not shared:
        raise ValueError(f"initial_weights {saved} has no tensor of the backbone {model.config.backbone}.")
    model.base_model.backbone.load_state_dict(own | shared)
    logger.info("%d of %d tensors of the backbone are those of %s.", len(shared), len(own), saved)
