"""A run of an image recipe from its arguments to the saved model: what the recipes for images share."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import HfApi

from hf_sphere.data import Augmentation, FewShotData, ImageData, load_image_data
from hf_sphere.models import SphereVisionConfig
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.checkpoints import RUN_FILE
from hf_sphere.training.evaluation import fit_confidence, initialize_head
from hf_sphere.training.few_shot_models import build_few_shot_model
from hf_sphere.training.image_arguments import (
    EncoderArguments,
    FewShotArguments,
    ImageDataArguments,
    JointArguments,
    ModelArguments,
    RegressionArguments,
    RetrievalArguments,
    TrainingImageArguments,
)
from hf_sphere.training.image_models import (
    adopt_image_settings,
    build_model,
    build_processor,
    check_values,
    describe,
)
from hf_sphere.training.recipe import Description, Script, carry_out
from hf_sphere.training.run import start_run
from hf_sphere.training.tasks import ImageTask
from hf_sphere.utils.arguments import parse_arguments

VALIDATION_EPISODES = 500
"""Episodes that the epoch of a few-shot model is chosen on, where the arguments do not say."""

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "classification": (ModelArguments, ImageDataArguments, TrainingArguments),
    "regression": (ModelArguments, ImageDataArguments, TrainingArguments, RegressionArguments),
    "joint": (ModelArguments, ImageDataArguments, TrainingArguments, JointArguments),
    "retrieval": (ModelArguments, ImageDataArguments, TrainingArguments, RetrievalArguments),
    "few_shot": (EncoderArguments, TrainingImageArguments, TrainingArguments, FewShotArguments),
}
"""Argument dataclasses of each task."""


def train_images(
    task: ImageTask, argv: Sequence[str] | None, *, recipe: str, card_template: Path, description: str
) -> None:
    """Train, evaluate and save as the arguments say.

    Args:
        task: What to train for.
        argv: The command line without the program; `sys.argv[1:]` if None.
        recipe: Path of the recipe in the repository, for the card.
        card_template: Template of the model card.
        description: Shown by `--help`.
    """
    model_args, data_args, args, *rest = parse_arguments(ARGUMENTS[task.name], argv, description)
    if data_args.sample_classes or data_args.label_noise or data_args.shuffled_pixels:
        data_args.corruption_seed = _corruption_seed(data_args, args)
    run = start_run(args, model_args, data_args, *rest)
    if model_args.model_name_or_path is not None:
        adopt_image_settings(data_args, model_args.model_name_or_path)
    data = load_data(task, data_args, args, run.accelerator, *rest)
    model = build(task, model_args, args, data, *rest).to(run.accelerator.device)
    check_values(model, data)
    if args.resume_from_checkpoint is None:
        initialize_head(model, data.train)
    processor = build_processor(model.config, data)
    run.print(describe(model, data))

    def finish(trained: Any) -> None:
        if data.validation is not None and not task.is_open_set:
            fit_confidence(trained, data.validation, run.accelerator)

    few_shot = next((part for part in rest if isinstance(part, FewShotArguments)), None)
    words = list(sys.argv[1:] if argv is None else argv)
    carry_out(
        run,
        task,
        model,
        data
        if few_shot is None
        else FewShotData.of(data, few_shot.shot, eval_batch_size=args.per_device_eval_batch_size),
        processor=processor,
        script=Script(recipe, words, ARGUMENTS[task.name], card_template),
        description=_description(task, model.config, data_args, few_shot),
        hub=HfApi(),
        finish=finish,
    )


def build(
    task: ImageTask,
    model_args: EncoderArguments,
    args: TrainingArguments,
    data: ImageData,
    target_args: RegressionArguments | RetrievalArguments | None = None,
) -> SphereVisionPreTrainedModel:
    """Build the model of a task from its arguments, those of `ARGUMENTS`."""
    if isinstance(target_args, FewShotArguments):
        return build_few_shot_model(model_args, target_args, args, data)
    assert isinstance(model_args, ModelArguments)  # as every other task has
    value_args = target_args if isinstance(target_args, RegressionArguments) else RegressionArguments()
    return build_model(task, model_args, value_args, args, data)


def _corruption_seed(data_args: TrainingImageArguments, args: TrainingArguments) -> int:
    """The seed that is given; else that of the run that goes on, so that its corruption stays; else that of the run."""
    if data_args.corruption_seed is not None:
        return data_args.corruption_seed
    noted = Path(args.output_dir, RUN_FILE)
    before = None
    if args.resume_from_checkpoint is not None and noted.is_file():
        before = json.loads(noted.read_text(encoding="utf-8")).get("corruption_seed")
    return args.seed if before is None else before


def load_data(
    task: ImageTask,
    data_args: TrainingImageArguments,
    args: TrainingArguments,
    accelerator: Accelerator,
    target_args: RegressionArguments | RetrievalArguments | None = None,
) -> ImageData:
    """Load the data set; the main process decodes first, the others read its cache."""
    targets: dict[str, Any] = {}
    if isinstance(target_args, RegressionArguments):
        targets = {"value_column": target_args.value_column_name, "computed_value": target_args.computed_value}
    elif target_args is not None:
        targets = {"train_classes": target_args.train_classes}
    episodes = data_args.episodes if isinstance(data_args, ImageDataArguments) else None
    if isinstance(target_args, FewShotArguments):
        episodes = target_args.episodes(target_args.episodes_per_epoch, target_args.episodes_per_step)
        count = target_args.validation_episodes
        if data_args.validation_split is not None or data_args.validation_fraction:
            targets["validation_episodes"] = target_args.episodes(VALIDATION_EPISODES if count is None else count)
        elif count is not None:
            raise ValueError(
                f"validation_episodes {count} needs images that they are drawn from: give --validation_split or "
                "--validation_fraction, or leave it out."
            )
        targets["eval_episodes"] = target_args.episodes(target_args.eval_episodes)
    batch_size = args.per_device_train_batch_size
    if episodes is not None and batch_size not in (TrainingArguments.per_device_train_batch_size, episodes.batch_size):
        raise ValueError(
            f"per_device_train_batch_size {batch_size} does not go with episodes of {episodes.classes} classes and "
            f"{episodes.examples} images of each, which are batches of {episodes.batch_size}; leave it out."
        )
    augmentation = Augmentation(
        crop_padding=data_args.crop_padding,
        horizontal_flip=data_args.horizontal_flip,
        rotation=data_args.rotation,
        random_resized_crop=data_args.random_resized_crop,
    )
    with accelerator.main_process_first():
        data = load_image_data(
            data_args.dataset_name,
            task=task.name,
            config_name=data_args.dataset_config_name,
            train_split=data_args.train_split,
            eval_split=data_args.eval_split,
            validation_split=data_args.validation_split,
            validation_fraction=data_args.validation_fraction,
            image_column=data_args.image_column_name,
            label_column=data_args.label_column_name,
            **targets,
            image_size=data_args.image_size,
            num_channels=data_args.num_channels,
            mean=data_args.image_mean,
            std=data_args.image_std,
            augmentation=augmentation,
            sample_classes=data_args.sample_classes,
            label_noise=data_args.label_noise,
            shuffled_pixels=data_args.shuffled_pixels,
            corruption_seed=data_args.corruption_seed,
            max_train_samples=data_args.max_train_samples,
            max_eval_samples=data_args.max_eval_samples,
            skip_corrupt=data_args.skip_corrupt_images,
            cache_dir=data_args.cache_dir,
            num_workers=data_args.dataloader_num_workers,
            train_batch_size=args.per_device_train_batch_size,
            episodes=episodes,
            eval_batch_size=args.per_device_eval_batch_size,
            device=accelerator.device,
            seed=args.seed,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            progress=accelerator.is_main_process and not args.disable_tqdm,
        )
    # Only now it is known which split is evaluated on where none is named.
    shared = targets.get("train_classes") is None and data.eval_split == data_args.train_split
    if isinstance(target_args, FewShotArguments) and shared:
        raise ValueError(
            f"train_split and eval_split are both {data.eval_split}, so the classes to be told apart would be trained "
            "on; name another split, or divide the classes of this one with --train_classes."
        )
    return data


def _description(
    task: ImageTask, config: SphereVisionConfig, data_args: TrainingImageArguments, few_shot: FewShotArguments | None
) -> Description:
    """What the card says of the model."""
    parts = {"backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}"}
    goals = [f"{config.num_labels} classes"] if task.has_classes else []
    goals += ["a real value"] if task.has_values else []
    head = f"{config.head} head" if task.has_classes else "regression"
    tag = config.head or "regression"
    if few_shot is not None:
        compared = config.few_shot_kwargs or {}
        metric, temperature = compared["metric"], compared["temperature"]
        if config.spherization is not None:
            parts["spherization"] = f"of the embeddings {config.spherization or ''}"
        parts["episodes"] = f"{few_shot.way}-way {few_shot.shot}-shot, {few_shot.query} queries of each class"
        parts["comparison"] = f"with the mean embedding of each class, `{metric}`, temperature {temperature:g}"
        goals, head, tag = ["classes that it has not seen in training"], f"{metric} prototypes", "few-shot"
    elif task.has_classes:
        parts["head"] = f"`{config.head}` {config.head_kwargs or ''}"
    if task.has_values:
        parts["values"] = f"{' to '.join(f'{end:g}' for end in config.value_range or ())}, read off the angle to a pole"
    parts["images"] = f"{config.num_channels} x {config.input_size[0]} x {config.input_size[1]}"
    chosen_on = {} if data_args.validation_split is None else {"held_out": f"the split {data_args.validation_split}"}
    return Description(
        title=f"{config.backbone} with {head} on {Path(data_args.dataset_name).name}",
        summary=f"Image model for {' and '.join(goals)}: a `{config.backbone}` backbone and the {head} of hf_sphere.",
        model=parts,
        dataset=data_args.dataset_name,
        tags=[tag],
        packages=["timm"],
        **chosen_on,
    )
