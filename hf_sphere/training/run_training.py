"""Training from parsed arguments: load, train, select the best epoch, evaluate, save, write the card, upload."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn

from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.training.checkpoints import RunState, Snapshots, check_can_be_saved, write_model_files
from hf_sphere.training.class_shards import gather_classes
from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.loop import TrainingLoop
from hf_sphere.training.measures import INTERVAL, show_metrics
from hf_sphere.training.model_card import TrainingRecord, write_model_card
from hf_sphere.training.output_dir import BEST_FOLDER, LOCAL_PATHS_FILE, LOCK_FILE
from hf_sphere.training.run import Run, start_run
from hf_sphere.training.tasks.base import Prepared, Task
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.files import UNFINISHED, find_damage, write_manifest
from hf_sphere.utils.loading import load_model
from hf_sphere.utils.privacy import hide_private
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER

_NOT_UPLOADED = [
    *("checkpoint-*", ".checkpoint-*", f"{BEST_FOLDER}/*", f"{SNAPSHOT_FOLDER}/*", "logs/*"),
    *(LOCK_FILE, LOCAL_PATHS_FILE, f"*{UNFINISHED}"),
]
"""Files in the output directory beside model, processor, results and card."""


@dataclass(frozen=True)
class Command:
    """The command line of a run."""

    script: str  # path of the script in the repository
    argv: Sequence[str]  # command-line arguments without the program name


def run_training(task: Task, command: Command) -> None:
    """Train, evaluate and save the model of a task; its card states the command line."""
    others = [part for part in task.parts if part is not task.args]
    with start_run(task.args, *others, recipe=Path(command.script).stem) as run:
        _train(task, run, command)


def _train(task: Task, run: Run, command: Command) -> None:
    prepared = task.prepare(run)
    check_can_be_saved(prepared.model)
    description = task.describe(prepared)
    prefix = "eval" if prepared.data.validation is None else "validation"
    metric, higher_is_better = _selection_metric(task, prefix)
    run.prepare_output_dir()
    args, about = task.args, {"model": description.title, "dataset": description.dataset, "seed": str(task.args.seed)}
    snapshots = Snapshots(run.output_dir, args.snapshot_epochs, args.snapshot_until, about)
    loop = TrainingLoop(
        prepared.model,
        prepared.data.train,
        task.args,
        run.accelerator,
        evaluate=lambda model: _evaluate(task, model, prepared, prefix, run),
        save_best=functools.partial(_save, run, prepared, run.output_dir / BEST_FOLDER),
        measure=task.measure,
        derive=task.derive,
        before_epoch=task.before_epoch,
        snapshot=snapshots.after_epoch,
        metric=metric,
        higher_is_better=higher_is_better,
    )
    snapshots.remove_after(loop.state.epoch)
    state = loop.run()
    trained = loop.trained_model
    if state.batch == 0:  # training may have ended in the middle of an epoch
        snapshots.at_end(trained, state.epoch)
    if task.args.load_best_model_at_end and state.best_epoch is not None:
        best = run.output_dir / BEST_FOLDER
        if damage := find_damage(best):
            raise CheckpointError(f"cannot load the best model in {best}: {damage}; the checkpoints have the last.")
        trained.load_state_dict(load_model(type(trained), best).state_dict())
    finished = replace(prepared, model=trained)
    fitted = task.finish(finished, run.accelerator)
    _save(run, prepared, run.output_dir, trained)  # before the evaluation, which may need more memory than there is
    results = _collect_results(task, trained, prepared, state, run) | fitted
    results |= task.compare(finished, run, results)
    results |= {f"best_{metric.removeprefix(f'{prefix}_')}": state.best_metric, "best_epoch": state.best_epoch}
    run.write_results(results)
    if run.accelerator.is_main_process:
        hub = HfApi() if task.args.push_to_hub else None
        name = hide_private(str(run.output_dir))
        if hub is not None:
            with _explain_failed_upload(run):
                name = hub.create_repo(task.args.hub_model_id or run.output_dir.name, exist_ok=True).repo_id
        record = TrainingRecord(
            metrics={k: v for k, v in results.items() if k.startswith(("eval_", "validation_", "train_"))},
            headline=task.headline,
            eval_split=description.evaluated_on or prepared.data.eval_split,
            selection_note=_selection_note(metric, run, results, description.held_out),
            settings=hide_private(_changed_settings(task, run.settings)),
            command=hide_private(["accelerate", "launch", command.script, *command.argv]),
            device=run.accelerator.device,
            seconds=state.seconds,
        )
        write_model_card(
            run.output_dir,
            model_id=name,
            model_class=type(prepared.model).__name__,
            pipeline_tag=task.pipeline_tag,
            description=replace(description, title=hide_private(description.title)),
            license=hide_private(task.args.license),
            record=record,
        )
        if hub is not None:
            with _explain_failed_upload(run):
                hub.upload_folder(
                    repo_id=name,
                    folder_path=run.output_dir,
                    ignore_patterns=_NOT_UPLOADED,
                    commit_message="Upload trained model",
                )
            run.print(f"uploaded to {name}")
    headline = [f"eval_{name}" for name in task.headline]
    shown = {key: results[key] for name in headline for key in (name, f"{name}{INTERVAL}") if key in results}
    run.print(f"{'  '.join(show_metrics(shown))}  (model and results in {run.output_dir})")
    run.accelerator.end_training()


def _save(run: Run, prepared: Prepared, folder: Path, model: Any) -> None:
    """Save model and processor, on the main process."""
    gathered = run.accelerator.get_state_dict(model) if run.accelerator.is_fsdp2 else None
    gathered = gather_classes(model) if class_shards(model) else gathered
    if run.accelerator.is_main_process:
        with write_model_files(folder) as unfinished:
            model.save_pretrained(unfinished, state_dict=gathered)
            prepared.processor.save_pretrained(unfinished)
            if prepared.record is not None:
                prepared.record.save(unfinished)
            if folder.name == BEST_FOLDER:  # it is read at the end, possibly by a resumed run
                write_manifest(unfinished)
    run.accelerator.wait_for_everyone()


def _evaluate(task: Task, model: nn.Module, prepared: Prepared, prefix: str, run: Run) -> dict[str, float]:
    """Evaluate a model on the evaluation or validation split, and prefix the names of the metrics."""
    batches = prepared.data.evaluation if prefix == "eval" else prepared.data.validation
    return {f"{prefix}_{name}": value for name, value in task.evaluate(model, batches, run.accelerator).items()}


def _collect_results(task: Task, model: nn.Module, prepared: Prepared, state: RunState, run: Run) -> dict[str, Any]:
    """Evaluate the final model and collect the metrics of the run."""
    results: dict[str, Any] = _evaluate(task, model, prepared, "eval", run)
    if prepared.data.validation is not None:
        results |= _evaluate(task, model, prepared, "validation", run)
    last = state.history[-1] if state.history else {}
    results |= {name: value for name, value in last.items() if name.startswith("train_")}
    examples = last.get("epoch", 0) * prepared.data.train.examples_per_epoch
    return results | {
        "epoch": last.get("epoch", 0),
        "steps": state.step,
        "train_runtime": state.seconds,
        "train_samples_per_second": examples / max(state.seconds, 1e-9),
        "history": state.history,
    }


def _selection_metric(task: Task, prefix: str) -> tuple[str, bool]:
    """Return the metric for selecting the best epoch, and whether larger values are better."""
    requested = task.args.metric_for_best_model
    if requested is None:
        return f"{prefix}_{task.metric}", task.higher_is_better
    known = [f"{split}_{name}" for split in (prefix, "train") for name in task.selectable_metrics(split)]
    if requested not in known:
        raise ValueError(f"metric_for_best_model must be one of {', '.join(known)}; got {requested!r}.")
    return requested, not requested.endswith(("loss", "error", "perplexity"))


def _selection_note(metric: str, run: Run, results: Mapping[str, Any], held_out: str) -> str:
    """Describe how the reported epoch was selected, for the model card."""
    args = run.args
    prefix, _, name = metric.partition("_")
    where = {"train": "the training split", "validation": held_out}.get(prefix, "the evaluation split itself")
    if args.load_best_model_at_end and results["best_epoch"] is not None:
        optimism = " (optimistic)" if prefix == "eval" else ""
        return (
            f"The model is that of epoch {results['best_epoch']}, chosen by its {name.replace('_', ' ')} on "
            f"{where}{optimism}."
        )
    followed = args.early_stopping_patience is not None or args.lr_scheduler_type == "plateau"
    used = "determined its end or learning rate" if followed and prefix == "eval" else "was not used for selection"
    return f"The model is that of the last epoch, {results['epoch']:g}; the evaluation split {used}."


def _changed_settings(task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    known = [field for kind in task.arguments for field in fields(kind)]
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in known}
    return {k: v for k, v in settings.items() if v != defaults.get(k) and k != "output_dir"}


@contextmanager
def _explain_failed_upload(run: Run) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        raise ConnectionError(
            f"the upload failed: {error_text(error).rstrip('.')}. The model is saved in "
            f"{run.output_dir}; to upload it, repeat the command with --resume_from_checkpoint latest."
        ) from error
