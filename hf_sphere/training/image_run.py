"""A run of an image recipe from its arguments to the saved model: what the recipes for images share."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn

from hf_sphere.data import Augmentation, ImageBatches, ImageData, load_image_data
from hf_sphere.model_card import write_model_card
from hf_sphere.models import SphereVisionConfig, SphereVisionImageProcessor
from hf_sphere.training.arguments import (
    ImageDataArguments,
    JointArguments,
    ModelArguments,
    RegressionArguments,
    RetrievalArguments,
    TrainingArguments,
    parse_arguments,
)
from hf_sphere.training.checkpoints import RunState, written_whole
from hf_sphere.training.evaluation import calibrate_head, fit_confidence
from hf_sphere.training.image_models import (
    adopt_image_settings,
    build_model,
    build_processor,
    check_values,
    describe,
)
from hf_sphere.training.loop import TrainingLoop
from hf_sphere.training.measures import show_metric
from hf_sphere.training.run import Run, start_run
from hf_sphere.training.tasks import ImageTask

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "classification": (ModelArguments, ImageDataArguments, TrainingArguments),
    "regression": (ModelArguments, ImageDataArguments, TrainingArguments, RegressionArguments),
    "joint": (ModelArguments, ImageDataArguments, TrainingArguments, JointArguments),
    "retrieval": (ModelArguments, ImageDataArguments, TrainingArguments, RetrievalArguments),
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
    value_args = next((part for part in rest if isinstance(part, RegressionArguments)), RegressionArguments())
    run = start_run(args, model_args, data_args, *rest)
    if model_args.model_name_or_path is not None:
        adopt_image_settings(data_args, model_args.model_name_or_path)
    data = load_data(task, data_args, args, run, *rest)
    model = build_model(task, model_args, value_args, args, data).to(run.accelerator.device)
    check_values(model, data)
    if args.resume_from_checkpoint is None:
        calibrate_head(model, data.train)
    processor = build_processor(model.config, data)
    run.print(describe(model, data))
    run.claim()

    chosen_on, prefix = (data.evaluation, "eval") if data.validation is None else (data.validation, "validation")
    loop = TrainingLoop(
        model,
        data.train,
        args,
        run.accelerator,
        evaluate=lambda model: measured(task, model, chosen_on, prefix, run),
        save_best=functools.partial(save, run, processor, run.output_dir / "best"),
        measure=task.measure,
        metric=f"{prefix}_{task.metric}",
        higher_is_better=task.higher_is_better,
    )
    state = loop.run()
    trained = run.accelerator.unwrap_model(loop.model)
    if args.load_best_model_at_end and state.best_epoch is not None:
        if not (run.output_dir / "best" / "config.json").is_file():
            raise FileNotFoundError(f"{run.output_dir / 'best'} is gone; the last model is in the latest checkpoint.")
        best = task.model_class.from_pretrained(run.output_dir / "best")
        trained.load_state_dict(best.state_dict())
    if data.validation is not None and not task.is_open_set:
        fit_confidence(trained, data.validation, run.accelerator)
    results = collect_results(task, trained, data, state, run)
    save(run, processor, run.output_dir, trained)
    run.write_results(results)
    if run.accelerator.is_main_process:
        command = ["accelerate", "launch", recipe, *(sys.argv[1:] if argv is None else argv)]
        name = create_repo(run, args) if args.push_to_hub else str(run.output_dir)
        write_card(task, run, data_args, data.eval_split, name, model.config, state, results, command, card_template)
        if args.push_to_hub:
            upload(run, name)
    reached = "  ".join(f"eval_{name} {show_metric(name, results[f'eval_{name}'])}" for name in task.headline)
    run.print(f"{reached}  (model and results in {run.output_dir})")
    run.accelerator.end_training()


def load_data(
    task: ImageTask,
    data_args: ImageDataArguments,
    args: TrainingArguments,
    run: Run,
    target_args: RegressionArguments | RetrievalArguments | None = None,
) -> ImageData:
    """Load the data set; the main process decodes first, the others read its cache."""
    accelerator = run.accelerator
    targets: dict[str, Any] = {}
    if isinstance(target_args, RegressionArguments):
        targets = {"value_column": target_args.value_column_name, "computed_value": target_args.computed_value}
    elif target_args is not None:
        targets = {"train_classes": target_args.train_classes}
    episodes, batch_size = data_args.episodes, args.per_device_train_batch_size
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
        return load_image_data(
            data_args.dataset_name,
            task=task.name,
            config_name=data_args.dataset_config_name,
            train_split=data_args.train_split,
            eval_split=data_args.eval_split,
            validation_fraction=data_args.validation_fraction,
            image_column=data_args.image_column_name,
            label_column=data_args.label_column_name,
            **targets,
            image_size=data_args.image_size,
            num_channels=data_args.num_channels,
            mean=data_args.image_mean,
            std=data_args.image_std,
            augmentation=augmentation,
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


def measured(task: ImageTask, model: nn.Module, batches: ImageBatches, prefix: str, run: Run) -> dict[str, float]:
    """Measure what the task measures, named after the data it was measured on."""
    values = task.evaluate(model, batches, run.accelerator)
    return {f"{prefix}_{name}": value for name, value in values.items()}


def save(run: Run, processor: SphereVisionImageProcessor, folder: Path, model: Any) -> None:
    """Save model and image processor, on the main process."""
    if run.accelerator.is_main_process:
        with written_whole(folder) as unfinished:
            model.save_pretrained(unfinished)
            processor.save_pretrained(unfinished)
    run.accelerator.wait_for_everyone()


def collect_results(task: ImageTask, model: nn.Module, data: ImageData, state: RunState, run: Run) -> dict[str, Any]:
    """Evaluate the final model and gather what the run has measured."""
    results: dict[str, Any] = measured(task, model, data.evaluation, "eval", run)
    if data.validation is not None:
        results |= measured(task, model, data.validation, "validation", run)
    last = state.history[-1] if state.history else {}
    results |= {name: value for name, value in last.items() if name.startswith("train_")}
    results |= {
        f"best_{task.metric}": state.best_metric,
        "best_epoch": state.best_epoch,
        "epoch": last.get("epoch", 0),
        "steps": state.step,
        "train_runtime": state.seconds,
        "train_samples_per_second": last.get("epoch", 0) * data.train.examples_per_epoch / max(state.seconds, 1e-9),
        "history": state.history,
    }
    return results


def write_card(
    task: ImageTask,
    run: Run,
    data_args: ImageDataArguments,
    eval_split: str,
    model_id: str,
    config: SphereVisionConfig,
    state: RunState,
    results: dict[str, Any],
    command: list[str],
    template: Path,
) -> None:
    """Write the model card from the run's results."""
    args = run.args
    defaults = {f.name: f.default for kind in ARGUMENTS[task.name] for f in fields(kind)}
    settings = {k: v for k, v in run.settings.items() if v != defaults.get(k) and v != {} and k != "output_dir"}
    held_out = bool(data_args.validation_fraction)
    if args.load_best_model_at_end:
        where = "a held-out part of the training split" if held_out else "the evaluation split itself (optimistic)"
        metric = task.metric.replace("_", " ")
        note = f"The model is that of epoch {state.best_epoch}, chosen by its {metric} on {where}."
    else:
        followed = args.early_stopping_patience is not None or args.lr_scheduler_type == "plateau"
        where = "its end or learning rate followed" if followed and not held_out else "nothing was chosen on"
        note = f"The model is that of the last epoch, {results['epoch']:g}; {where} the evaluation split."
    parts = {"backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}"}
    if task.has_classes:
        parts["head"] = f"`{config.head}` {config.head_kwargs or ''}"
    if task.has_values:
        parts["values"] = f"{' to '.join(f'{end:g}' for end in config.value_range or ())}, read off the angle to a pole"
    parts["images"] = f"{config.num_channels} x {config.input_size[0]} x {config.input_size[1]}"
    goals = [f"{config.num_labels} classes"] if task.has_classes else []
    goals += ["a real value"] if task.has_values else []
    head = f"{config.head} head" if task.has_classes else "regression"
    write_model_card(
        run.output_dir,
        template=template,
        model_id=model_id,
        model_class=task.model_class.__name__,
        pipeline_tag=task.pipeline_tag,
        headline=task.headline,
        device=run.accelerator.device,
        title=f"{config.backbone} with {head} on {Path(data_args.dataset_name).name}",
        summary=f"Image model for {' and '.join(goals)}: a `{config.backbone}` backbone and the {head} of hf_sphere.",
        dataset=data_args.dataset_name,
        eval_split=eval_split,
        metrics={k: v for k, v in results.items() if k.startswith(("eval_", "validation_", "train_"))},
        model=parts,
        settings=settings,
        command=command,
        seconds=state.seconds,
        selection_note=note,
        tags=[config.head or "regression"],
    )


def create_repo(run: Run, args: TrainingArguments) -> str:
    """Create the model's repository on the Hub and return its full name."""
    return HfApi().create_repo(args.hub_model_id or run.output_dir.name, exist_ok=True).repo_id


def upload(run: Run, repo: str) -> None:
    """Upload model, processor, results and card."""
    HfApi().upload_folder(
        repo_id=repo,
        folder_path=run.output_dir,
        ignore_patterns=["checkpoint-*", ".checkpoint-*", "best/*", "logs/*"],
        commit_message="Upload trained model",
    )
    run.print(f"uploaded to {repo}")
