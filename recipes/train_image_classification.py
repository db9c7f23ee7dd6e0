"""Train an image classifier on the sphere.

python recipes/train_image_classification.py --config recipes/configs/spherization/digits-lenet5-spherized.yaml
accelerate launch recipes/train_image_classification.py --config <run>.yaml --learning_rate 0.01

Every argument can stand in the YAML file or on the command line, which has the last word.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import Tensor, nn

from hf_sphere.data import Augmentation, ImageBatches, ImageData, load_image_data
from hf_sphere.model_card import write_model_card
from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.training import (
    ImageDataArguments,
    ModelArguments,
    Run,
    RunState,
    TrainingArguments,
    TrainingLoop,
    calibrate_head,
    count_correct,
    evaluate_classification,
    parse_arguments,
    start_run,
    written_whole,
)
from hf_sphere.training.run import run_recipe

CARD_TEMPLATE = Path(__file__).parent.parent / "hub_cards" / "model_card.md"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments say."""
    model_args, data_args, args = parse_arguments(
        (ModelArguments, ImageDataArguments, TrainingArguments), argv, "Train an image classifier on the sphere."
    )
    run = start_run(args, model_args, data_args)
    if model_args.model_name_or_path is not None:
        adopt_image_settings(data_args, model_args.model_name_or_path)
    data = load_data(data_args, args, run)
    model = build_model(model_args, args, data).to(run.accelerator.device)
    if model_args.model_name_or_path is None and args.resume_from_checkpoint is None:
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
        evaluate=lambda model: evaluate(model, chosen_on, prefix, run),
        save_best=functools.partial(save, run, processor, run.output_dir / "best"),
        measure=training_accuracy,
        metric=f"{prefix}_accuracy",
    )
    state = loop.run()
    trained = run.accelerator.unwrap_model(loop.model)
    if args.load_best_model_at_end and state.best_epoch is not None:
        if not (run.output_dir / "best" / "config.json").is_file():
            raise FileNotFoundError(f"{run.output_dir / 'best'} is gone; the last model is in the latest checkpoint.")
        best = SphereVisionForImageClassification.from_pretrained(run.output_dir / "best")
        trained.load_state_dict(best.state_dict())
    results = collect_results(trained, data, state, run)
    save(run, processor, run.output_dir, trained)
    run.write_results(results)
    if run.accelerator.is_main_process:
        words = list(sys.argv[1:] if argv is None else argv)
        name = create_repo(run, args) if args.push_to_hub else str(run.output_dir)
        write_card(run, args, data_args, data.eval_split, name, model.config, state, results, words)
        if args.push_to_hub:
            upload(run, name)
    run.print(f"eval_accuracy {100 * results['eval_accuracy']:.2f} %  (model and results in {run.output_dir})")
    run.accelerator.end_training()


def load_data(data_args: ImageDataArguments, args: TrainingArguments, run: Run) -> ImageData:
    """Load the data set; the main process decodes first, the others read its cache."""
    accelerator = run.accelerator
    with accelerator.main_process_first():
        return load_image_data(
            data_args.dataset_name,
            config_name=data_args.dataset_config_name,
            train_split=data_args.train_split,
            eval_split=data_args.eval_split,
            validation_fraction=data_args.validation_fraction,
            image_column=data_args.image_column_name,
            label_column=data_args.label_column_name,
            image_size=data_args.image_size,
            num_channels=data_args.num_channels,
            mean=data_args.image_mean,
            std=data_args.image_std,
            augmentation=Augmentation(data_args.crop_padding, data_args.horizontal_flip, data_args.rotation),
            max_train_samples=data_args.max_train_samples,
            max_eval_samples=data_args.max_eval_samples,
            skip_corrupt=data_args.skip_corrupt_images,
            cache_dir=data_args.cache_dir,
            num_workers=data_args.dataloader_num_workers,
            train_batch_size=args.per_device_train_batch_size,
            eval_batch_size=args.per_device_eval_batch_size,
            device=accelerator.device,
            seed=args.seed,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            progress=accelerator.is_main_process and not args.disable_tqdm,
        )


def adopt_image_settings(data_args: ImageDataArguments, saved: str) -> None:
    """Prepare images as a saved model wants them, where the arguments do not say otherwise."""
    processor = SphereVisionImageProcessor.from_pretrained(saved)
    data_args.image_size = data_args.image_size or [processor.size["height"], processor.size["width"]]
    data_args.num_channels = data_args.num_channels or processor.num_channels
    data_args.image_mean = data_args.image_mean or list(processor.image_mean)
    data_args.image_std = data_args.image_std or list(processor.image_std)


def build_model(
    model_args: ModelArguments, args: TrainingArguments, data: ImageData
) -> SphereVisionForImageClassification:
    """Build a new model that fits the data, or load the one that was named and see that it fits."""
    if model_args.model_name_or_path is not None:
        config = SphereVisionConfig.from_pretrained(model_args.model_name_or_path)
        check_same_architecture(model_args, config)
        config.head_kwargs = {k: v for k, v in (config.head_kwargs or {}).items() if k != "label_smoothing"}
        if args.label_smoothing_factor:
            config.head_kwargs["label_smoothing"] = args.label_smoothing_factor
        model = SphereVisionForImageClassification.from_pretrained(model_args.model_name_or_path, config=config)
        if model.config.num_labels != len(data.class_names):
            raise ValueError(
                f"the data has {len(data.class_names)} classes but {model_args.model_name_or_path} has "
                f"{model.config.num_labels}. Train a new model, or choose data with the model's classes."
            )
        for name, labels in label_names(data).items():
            setattr(model.config, name, labels)
        return model
    head_kwargs = dict(model_args.head_kwargs)
    if args.label_smoothing_factor:
        head_kwargs["label_smoothing"] = args.label_smoothing_factor
    config = SphereVisionConfig(
        backbone=model_args.backbone or "lenet5",
        backbone_kwargs=dict(model_args.backbone_kwargs),
        num_channels=data.shape.channels,
        image_size=[data.shape.height, data.shape.width],
        embedding_dim=model_args.embedding_dim,
        head=model_args.head or "spherized",
        head_kwargs=head_kwargs,
        **label_names(data),
    )
    return SphereVisionForImageClassification(config, pretrained=model_args.pretrained_backbone)


def label_names(data: ImageData) -> dict[str, dict]:
    """Class names as a configuration holds them."""
    return {
        "id2label": dict(enumerate(data.class_names)),
        "label2id": {name: index for index, name in enumerate(data.class_names)},
    }


def check_same_architecture(model_args: ModelArguments, saved: SphereVisionConfig) -> None:
    """Refuse settings of the architecture that differ from those of the saved model to start from."""
    default = ModelArguments()
    for name in ("backbone", "backbone_kwargs", "embedding_dim", "head", "head_kwargs"):
        asked, have = getattr(model_args, name), getattr(saved, name) or getattr(default, name)
        if asked not in (getattr(default, name), have):
            raise ValueError(f"{name} is {asked} but {model_args.model_name_or_path} has {have}; leave {name} out.")
    if model_args.pretrained_backbone:
        raise ValueError(
            "pretrained_backbone has no meaning for a saved model, which brings its weights; leave it out."
        )


def build_processor(config: SphereVisionConfig, data: ImageData) -> SphereVisionImageProcessor:
    """Make the image processor that prepares images as the training data was."""
    return SphereVisionImageProcessor(
        num_channels=config.num_channels,
        size={"height": data.shape.height, "width": data.shape.width},
        image_mean=data.mean,
        image_std=data.std,
    )


def evaluate(model: nn.Module, batches: ImageBatches, prefix: str, run: Run) -> dict[str, float]:
    """Measure accuracy and loss, named after the data they were measured on."""
    measured = evaluate_classification(model, batches, run.accelerator)
    return {f"{prefix}_{name}": value for name, value in measured.items()}


def training_accuracy(output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Measure the accuracy of a training batch."""
    return {"accuracy": count_correct(output.logits, batch["labels"]) / len(batch["labels"])}


def save(run: Run, processor: SphereVisionImageProcessor, folder: Path, model: nn.Module) -> None:
    """Save model and image processor, on the main process."""
    if run.accelerator.is_main_process:
        with written_whole(folder) as unfinished:
            model.save_pretrained(unfinished)
            processor.save_pretrained(unfinished)
    run.accelerator.wait_for_everyone()


def collect_results(model: nn.Module, data: ImageData, state: RunState, run: Run) -> dict[str, Any]:
    """Evaluate the final model and gather what the run has measured."""
    evaluated = evaluate(model, data.evaluation, "eval", run)
    results: dict[str, Any] = dict(evaluated)
    if data.validation is not None:
        results |= evaluate(model, data.validation, "validation", run)
    last = state.history[-1] if state.history else {}
    results |= {name: value for name, value in last.items() if name.startswith("train_")}
    results |= {
        "best_accuracy": state.best_metric,
        "best_epoch": state.best_epoch,
        "epoch": last.get("epoch", 0),
        "steps": state.step,
        "train_runtime": state.seconds,
        "train_samples_per_second": last.get("epoch", 0) * data.train.num_examples / max(state.seconds, 1e-9),
        "history": state.history,
    }
    return results


def write_card(
    run: Run,
    args: TrainingArguments,
    data_args: ImageDataArguments,
    eval_split: str,
    model_id: str,
    config: SphereVisionConfig,
    state: RunState,
    results: dict[str, Any],
    words: list[str],
) -> None:
    """Write the model card from the run's results."""
    kinds = (ModelArguments, ImageDataArguments, TrainingArguments)
    defaults = {f.name: f.default for kind in kinds for f in fields(kind)}
    settings = {k: v for k, v in run.settings.items() if v != defaults.get(k) and v != {} and k != "output_dir"}
    held_out = bool(data_args.validation_fraction)
    if args.load_best_model_at_end:
        where = "a held-out part of the training split" if held_out else "the evaluation split itself (optimistic)"
        note = f"The model is that of epoch {state.best_epoch}, chosen by its accuracy on {where}."
    else:
        followed = args.early_stopping_patience is not None or args.lr_scheduler_type == "plateau"
        where = "its end or learning rate followed" if followed and not held_out else "nothing was chosen on"
        note = f"The model is that of the last epoch, {results['epoch']:g}; {where} the evaluation split."
    write_model_card(
        run.output_dir,
        template=CARD_TEMPLATE,
        model_id=model_id,
        device=run.accelerator.device,
        title=f"{config.backbone} with {config.head} head on {Path(data_args.dataset_name).name}",
        summary=f"Image classifier of {config.num_labels} classes: a `{config.backbone}` backbone and the "
        f"`{config.head}` head of hf_sphere.",
        dataset=data_args.dataset_name,
        eval_split=eval_split,
        metrics={k: v for k, v in results.items() if k.startswith(("eval_", "validation_", "train_"))},
        model={
            "backbone": f"`{config.backbone}` {config.backbone_kwargs or ''}",
            "head": f"`{config.head}` {config.head_kwargs or ''}",
            "images": f"{config.num_channels} x {config.input_size[0]} x {config.input_size[1]}",
        },
        settings=settings,
        command=["accelerate", "launch", "recipes/train_image_classification.py", *words],
        seconds=state.seconds,
        selection_note=note,
        tags=[config.head],
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


def describe(model: SphereVisionForImageClassification, data: ImageData) -> str:
    """Sum up the run in three lines."""
    parameters = sum(p.numel() for p in model.parameters())
    shape = data.shape
    held_out = f", {data.validation.num_examples:,} held out" if data.validation is not None else ""
    return (
        f"data      {data.train.num_examples:,} training images{held_out}, {data.evaluation.num_examples:,} for "
        f"evaluation, {shape.channels} x {shape.height} x {shape.width}, {len(data.class_names)} classes\n"
        f"model     {model.config.backbone}, embeddings of length {model.sphere_vision.embedding_dim}, "
        f"{model.config.head} head\n"
        f"          {parameters:,} parameters on {model.device}"
    )


if __name__ == "__main__":
    run_recipe(main)
