"""What every training recipe does once data and model are there: train, choose, evaluate, save, describe, upload."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from huggingface_hub import HfApi
from torch import nn

from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.checkpoints import RunState, written_whole
from hf_sphere.training.loop import TrainingLoop
from hf_sphere.training.measures import INTERVAL, Measure, show_metrics
from hf_sphere.training.model_card import write_model_card
from hf_sphere.training.run import Run
from hf_sphere.training.snapshots import Snapshots
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER


class Task(Protocol):
    """What a model is trained for; see `hf_sphere.training.tasks.ImageTask`."""

    @property
    def measure(self) -> Measure:
        """What is measured beside the loss."""
        ...

    @property
    def metric(self) -> str:
        """The measure that chooses the best epoch, without its prefix."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values of `metric` are better."""
        ...

    @property
    def headline(self) -> tuple[str, ...]:
        """The measures that the last line of a run and the card's index show."""
        ...

    @property
    def pipeline_tag(self) -> str | None:
        """The pipeline of transformers that runs the model, if there is one."""
        ...

    def evaluate(self, model: nn.Module, batches: Any, accelerator: Accelerator) -> dict[str, float]:
        """Measure a model over all processes' shares of a split."""
        ...

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the means over an epoch."""
        ...


class Data(Protocol):
    """Batches by their purpose; see `hf_sphere.data.ImageData`."""

    @property
    def train(self) -> Any:
        """Training batches."""
        ...

    @property
    def evaluation(self) -> Any:
        """Batches of the split that results are reported on."""
        ...

    @property
    def eval_split(self) -> str:
        """Name of that split."""
        ...

    @property
    def validation(self) -> Any:
        """Batches for choosing epochs, or None."""
        ...


@dataclass(frozen=True)
class Script:
    """The script that runs.

    Attributes:
        path: Its path in the repository.
        words: The command line without the program.
        arguments: The dataclasses that the command line is read into.
        card_template: Template of the model card.
    """

    path: str
    words: Sequence[str]
    arguments: Sequence[type]
    card_template: Path

    def changed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those settings that are not the defaults."""
        known = [f for kind in self.arguments for f in fields(kind)]
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in known}
        return {k: v for k, v in settings.items() if v != defaults.get(k) and k != "output_dir"}


@dataclass(frozen=True)
class Description:
    """What a card says of a model beside settings and results.

    Attributes:
        title: Heading.
        summary: One paragraph.
        model: The model by property.
        dataset: Name of the data set as given.
        held_out: What the epoch was chosen on, if that was not the evaluation split.
        tags: Further tags of the card.
        packages: Packages whose versions matter beside those that every model needs.
    """

    title: str
    summary: str
    model: Mapping[str, Any]
    dataset: str
    held_out: str = "a held-out part of the training split"
    tags: Sequence[str] = ()
    packages: Sequence[str] = ()


def carry_out(
    run: Run,
    task: Task,
    model: Any,
    data: Data,
    *,
    processor: Any,
    script: Script,
    description: Description,
    hub: HfApi,
    finish: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Train a model, evaluate and save it, and upload it if told.

    Args:
        run: Folder and processes; the folder is claimed here.
        task: What to train for.
        model: A model of transformers, on its device.
        data: What to train and evaluate on.
        processor: What makes inputs of raw data, an image processor or a tokenizer; saved beside the model.
        script: What ran, for the card.
        description: What the card says of the model.
        hub: The Hub, used if the model is to be uploaded.
        finish: Called with the trained model before it is evaluated for the last time.
    """
    args = run.args
    chosen_on, prefix = (data.evaluation, "eval") if data.validation is None else (data.validation, "validation")
    metric, higher_is_better = _choosing_metric(task, args, prefix)
    run.claim()
    snapshots = Snapshots(run, {"model": description.title, "dataset": description.dataset})
    loop = TrainingLoop(
        model,
        data.train,
        args,
        run.accelerator,
        evaluate=lambda model: _measured(task, model, chosen_on, prefix, run),
        save_best=functools.partial(save, run, processor, run.output_dir / "best"),
        measure=task.measure,
        derive=task.derive,
        snapshot=snapshots.after_epoch,
        metric=metric,
        higher_is_better=higher_is_better,
    )
    snapshots.forget_after(loop.state.epoch)
    state = loop.run()
    snapshots.at_end(run.accelerator.unwrap_model(loop.model), state)
    trained = run.accelerator.unwrap_model(loop.model)
    if args.load_best_model_at_end and state.best_epoch is not None:
        if not (run.output_dir / "best" / "config.json").is_file():
            raise FileNotFoundError(f"{run.output_dir / 'best'} is gone; the last model is in the latest checkpoint.")
        trained.load_state_dict(type(model).from_pretrained(run.output_dir / "best").state_dict())
    finish(trained)
    results = _collect_results(task, trained, data, state, run)
    results |= {f"best_{metric.removeprefix(f'{prefix}_')}": state.best_metric, "best_epoch": state.best_epoch}
    save(run, processor, run.output_dir, trained)
    run.write_results(results)
    if run.accelerator.is_main_process:
        name = str(run.output_dir)
        if args.push_to_hub:
            name = hub.create_repo(args.hub_model_id or run.output_dir.name, exist_ok=True).repo_id
        write_model_card(
            run.output_dir,
            template=script.card_template,
            model_id=name,
            model_class=type(model).__name__,
            pipeline_tag=task.pipeline_tag,
            headline=task.headline,
            device=run.accelerator.device,
            title=description.title,
            summary=description.summary,
            dataset=description.dataset,
            eval_split=data.eval_split,
            metrics={k: v for k, v in results.items() if k.startswith(("eval_", "validation_", "train_"))},
            model=description.model,
            settings=script.changed(run.settings),
            command=["accelerate", "launch", script.path, *script.words],
            seconds=state.seconds,
            selection_note=_selection_note(metric, run, results, description.held_out),
            tags=description.tags,
            packages=description.packages,
        )
        if args.push_to_hub:
            _upload(run, hub, name)
    headline = [f"eval_{name}" for name in task.headline]
    named = {key: results[key] for name in headline for key in (name, f"{name}{INTERVAL}") if key in results}
    reached = "  ".join(show_metrics(named))
    run.print(f"{reached}  (model and results in {run.output_dir})")
    run.accelerator.end_training()


def save(run: Run, processor: Any, folder: Path, model: Any) -> None:
    """Save model and processor, on the main process."""
    if run.accelerator.is_main_process:
        with written_whole(folder) as unfinished:
            model.save_pretrained(unfinished)
            processor.save_pretrained(unfinished)
    run.accelerator.wait_for_everyone()


def _measured(task: Task, model: nn.Module, batches: Any, prefix: str, run: Run) -> dict[str, float]:
    """Measure what the task measures, named after the data it was measured on."""
    values = task.evaluate(model, batches, run.accelerator)
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _collect_results(task: Task, model: nn.Module, data: Data, state: RunState, run: Run) -> dict[str, Any]:
    """Evaluate the final model and gather what the run has measured."""
    results: dict[str, Any] = _measured(task, model, data.evaluation, "eval", run)
    if data.validation is not None:
        results |= _measured(task, model, data.validation, "validation", run)
    last = state.history[-1] if state.history else {}
    results |= {name: value for name, value in last.items() if name.startswith("train_")}
    results |= {
        "epoch": last.get("epoch", 0),
        "steps": state.step,
        "train_runtime": state.seconds,
        "train_samples_per_second": last.get("epoch", 0) * data.train.examples_per_epoch / max(state.seconds, 1e-9),
        "history": state.history,
    }
    return results


def _choosing_metric(task: Task, args: TrainingArguments, prefix: str) -> tuple[str, bool]:
    """The metric that chooses the best epoch, and whether larger values of it are better."""
    if args.metric_for_best_model is None:
        return f"{prefix}_{task.metric}", task.higher_is_better
    measures = dict.fromkeys([task.metric, *task.headline, "loss"])
    known = [f"{where}_{measure}" for where in (prefix, "train") for measure in measures]
    if args.metric_for_best_model not in known:
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(known)}; got {args.metric_for_best_model!r}."
        )
    return args.metric_for_best_model, not args.metric_for_best_model.endswith(("loss", "error", "perplexity"))


def _selection_note(metric: str, run: Run, results: Mapping[str, Any], held_out: str) -> str:
    """How the reported epoch was chosen."""
    args = run.args
    prefix, _, name = metric.partition("_")
    where = {"train": "the training images", "validation": held_out}.get(prefix, "the evaluation split itself")
    if args.load_best_model_at_end:
        optimism = " (optimistic)" if prefix == "eval" else ""
        return (
            f"The model is that of epoch {results['best_epoch']}, chosen by its {name.replace('_', ' ')} on "
            f"{where}{optimism}."
        )
    followed = args.early_stopping_patience is not None or args.lr_scheduler_type == "plateau"
    where = "its end or learning rate followed" if followed and prefix == "eval" else "nothing was chosen on"
    return f"The model is that of the last epoch, {results['epoch']:g}; {where} the evaluation split."


def _upload(run: Run, hub: HfApi, repo: str) -> None:
    """Upload model, processor, results and card."""
    hub.upload_folder(
        repo_id=repo,
        folder_path=run.output_dir,
        ignore_patterns=["checkpoint-*", ".checkpoint-*", "best/*", "logs/*", f"{SNAPSHOT_FOLDER}/*"],
        commit_message="Upload trained model",
    )
    run.print(f"uploaded to {repo}")
