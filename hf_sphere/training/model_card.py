"""The model card of a run, and the upload of model and card."""

import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_sphere.data.sources import BUNDLED
from hf_sphere.training.tasks import Description, Prepared, Task
from hf_sphere.training.upload import CARD_FILE, split_files, upload
from hf_sphere.utils.files import atomic_file, write_text
from hf_sphere.utils.privacy import hide_private
from hf_sphere.utils.texts import show_metric

LIBRARY = "hf_sphere"
"""Name of the library on the Hub. With `transformers`, the Hub would show code without `import hf_sphere`."""

TEMPLATE = Path(__file__).with_name("model_card_template.md")
"""Jinja template of all cards."""

_DEFINITIONS = {
    "eval_rejected": "fraction of the evaluation images, all of known classes, that are rejected as unknown",
    "eval_loss": "mean training loss on the evaluation split, including a margin of the head, without calibration",
    "validation_nll_change": "change of the negative log-likelihood of validation images by the calibration, in a "
    "cross-validation; without an interval below 0, the calibration is not kept",
    "eval_nll": "mean negative log-likelihood of the classes, calibrated, without a margin of the head",
}


@dataclass(frozen=True)
class Command:
    """The command line of a run."""

    words: Sequence[str]  # what starts the run
    argv: Sequence[str]  # command-line arguments after them
    recipe: str  # name of the script, or of the task, that `run.json` records


def publish(
    run: Any, task: Task, prepared: Prepared, results: Mapping[str, Any], command: Command, *, metric: str
) -> None:
    """Write the model card of a `Run`, and upload its directory if requested; `metric` has selected the best epoch."""
    args, description = run.args, prepared.description
    options = [field for kind in task.arguments for field in fields(kind)]
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in options}
    defaults |= {"bf16": False, "fp16": False}  # the settings have the precision that was used
    changed = {k: v for k, v in run.settings.items() if v != defaults.get(k) and k != "output_dir"}
    write_model_card(
        run.output_dir,
        replace(description, title=hide_private(description.title)),
        model_id=hide_private(str(run.output_dir)),
        model_class=type(prepared.model).__name__,
        pipeline_tag=task.pipeline_tag,
        metrics={k: v for k, v in results.items() if k.startswith(("eval_", "validation_", "train_"))},
        headline=task.headline,
        eval_split=description.evaluated_on or prepared.data.eval_split,
        selection_note=_selection_note(metric, prepared, args, results),
        settings=hide_private(changed),
        command=hide_private([*command.words, *command.argv]),
        device=run.accelerator.device,
        seconds=results["train_runtime"],
        license=hide_private(args.license),
        modules=prepared.model.config.to_dict().get("requires_import", []),
    )
    if "rejection" in results:
        write_rejection(run.output_dir / CARD_FILE, results["rejection"]["summary"])
    if args.push_to_hub:
        name = args.hub_model_id or run.output_dir.name
        try:
            name = upload(run.output_dir, split_files(run.output_dir)[0], name)
        except (ConnectionError, ValueError) as error:
            again = f"hf-sphere publish {shlex.quote(str(run.output_dir))} --repo_id {name}"
            raise type(error)(f"{error} The model is saved; to try again: {again}") from error
        run.accelerator.print(f"uploaded to {name}")


def _selection_note(metric: str, prepared: Prepared, args: Any, results: Mapping[str, Any]) -> str:
    """Describe how the reported epoch was selected, for the model card."""
    prefix, _, name = metric.partition("_")
    splits = {"train": "the training split", "validation": prepared.description.held_out}
    if args.load_best_model_at_end and results["best_epoch"] is not None:
        optimism = " (optimistic)" if prefix == "eval" else ""
        return (
            f"The model is from epoch {results['best_epoch']}, chosen by its {name.replace('_', ' ')} on "
            f"{splits.get(prefix, 'the evaluation split itself')}{optimism}."
        )
    followed = args.early_stopping_patience is not None or args.lr_scheduler_type == "reduce_lr_on_plateau"
    used = "determined its end or learning rate" if followed and prefix == "eval" else "was not used for selection"
    return f"The model is from the last epoch, {results['epoch']:g}; the evaluation split {used}."


def write_model_card(
    folder: Path,
    description: Description,
    *,
    model_id: str,
    model_class: str,
    pipeline_tag: str | None,
    metrics: Mapping[str, float],
    headline: Sequence[str],
    eval_split: str,
    selection_note: str,
    settings: Mapping[str, Any],
    command: Sequence[str],
    device: torch.device,
    seconds: float,
    license: str = "unknown",
    modules: Sequence[str] = (),
) -> ModelCard:
    """Write the model card, `README.md`, to the folder of a model.

    The `headline` metrics, without `eval_`, become the card's `model-index` entries, and `modules` are those that
    define its head and backbone, if this library does not.
    """
    dataset = description.dataset
    try:
        validate_repo_id(dataset)
        is_on_hub = dataset not in BUNDLED and not Path(dataset).exists()
    except HFValidationError:
        is_on_hub = False
    data = ModelCardData(
        library_name=LIBRARY,
        license=license,
        pipeline_tag=pipeline_tag,
        tags=["hf_sphere", "hypersphere", *description.tags],
        datasets=[dataset] if is_on_hub else None,
        model_name=description.title,
        eval_results=[
            EvalResult(
                task_type=pipeline_tag or "other",
                dataset_type=Path(dataset).name if Path(dataset).exists() else dataset,
                dataset_name=Path(dataset).name,
                dataset_split=eval_split,
                metric_type=name,
                metric_value=round(metrics[f"eval_{name}"], 6),
            )
            for name in headline
        ],
    )
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    packages = ("hf_sphere", "torch", "transformers", *description.packages)
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_id=model_id,
        title=on_one_line(description.title),
        summary=on_one_line(description.summary),
        model_class=model_class,
        imports=[f"import {name}" for name in modules],
        pipeline_tag=pipeline_tag,
        metrics=[(name, show_metric(name, value)) for name, value in metrics.items() if "_excluded" not in name],
        definitions=[(name, text) for name, text in _DEFINITIONS.items() if name in metrics],
        model=[(name, on_one_line(value)) for name, value in description.model.items()],
        settings=[(name, on_one_line(value)) for name, value in settings.items()],
        selection_note=selection_note,
        command=wrap_command(command),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        hardware=hardware,
        duration=f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
    )
    with atomic_file(folder / CARD_FILE) as unfinished:
        card.save(unfinished)
    write_eval_results(folder, (data.eval_results or []) if data.datasets else [])
    return card


def write_rejection(card: Path, rejection: str) -> None:
    """Describe the rejection of unknown images in the table of a card's model, instead of an earlier one."""
    text = re.sub(r"^\| unknown images \|.*\n", "", card.read_text(encoding="utf-8"), flags=re.MULTILINE)
    head, table, rows = text.partition("## Model\n\n| | |\n|---|---|\n")
    row = f"| unknown images | `output.known` and `output.p_value`, in eval mode: {rejection} |\n"
    write_text(card, f"{head}{table}{row * bool(table)}{rows}")


def write_eval_results(folder: Path, results: Sequence[EvalResult]) -> None:
    """Write results on a dataset of the Hub to a file that the Hub reads; without any, remove the file."""
    entries = [
        EvalResultEntry(r.dataset_type, r.metric_type, r.metric_value, notes=f"{r.dataset_split} split")
        for r in results
    ]
    path = folder / EVAL_RESULTS_FOLDER / "results.yaml"
    if entries:
        write_text(path, yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False))
    else:
        path.unlink(missing_ok=True)


def on_one_line(value: Any) -> str:
    """Format a value for a line or a table cell, which line breaks and bars would end."""
    return " ".join(str(value).split()).replace("|", r"\|")


def wrap_command(command: Sequence[str]) -> str:
    """Quote a command for the shell and break it before its options; a word with a line break stays on one line."""
    lines: list[list[str]] = [[]]
    for word in command:
        escaped = word.encode("unicode_escape").decode().replace("'", r"\'")
        quoted = shlex.quote(word) if word.isprintable() else f"$'{escaped}'"
        if quoted.startswith("--") and lines[0]:
            lines.append([])
        lines[-1].append(quoted)
    return " \\\n    ".join(map(" ".join, lines))
