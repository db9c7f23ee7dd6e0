"""The model card of a run, and the upload of the model with its card to the Hub."""

import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_sphere.data.sources import BUNDLED
from hf_sphere.training.tasks import Prepared, Task
from hf_sphere.utils.arguments import default_of
from hf_sphere.utils.files import write_text
from hf_sphere.utils.texts import hide_private, show_metric

CARD_FILE = "README.md"

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


def write_model_card(
    run: Any, task: Task, prepared: Prepared, results: Mapping[str, Any], command: Sequence[str], *, metric: str
) -> None:
    """Write the model card of a `Run`, without access tokens and absolute paths; `metric` has selected the best epoch.

    The headline metrics of the task become the card's `model-index` entries.
    """
    description, device, dataset = prepared.description, run.accelerator.device, Path(prepared.description.dataset)
    try:
        validate_repo_id(description.dataset)
        is_on_hub = description.dataset not in BUNDLED and not dataset.exists()
    except HFValidationError:
        is_on_hub = False
    data = ModelCardData(
        library_name=LIBRARY,
        license=run.args.license,
        pipeline_tag=task.pipeline_tag,
        tags=["hf_sphere", "hypersphere", *description.tags],
        datasets=[description.dataset] if is_on_hub else None,
        model_name=description.title,
        eval_results=[
            EvalResult(
                task_type=task.pipeline_tag or "other",
                dataset_type=dataset.name if dataset.exists() else description.dataset,
                dataset_name=dataset.name,
                dataset_split=description.evaluated_on or prepared.data.eval_split,
                metric_type=name,
                metric_value=round(results[f"eval_{name}"], 6),
            )
            for name in task.headline
        ],
    )
    defaults: dict[str, Any] = {"bf16": False, "fp16": False}  # the settings have the precision that was used
    for field in chain.from_iterable(map(fields, task.arguments)):
        defaults.setdefault(field.name, default_of(field))
    settings = []
    for name, value in run.settings.items():
        if name != "output_dir" and (name not in defaults or value != defaults[name]):
            settings.append((name, on_one_line(value)))
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    packages, seconds = ("hf_sphere", "torch", "transformers", *description.packages), results["train_runtime"]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_id=str(run.output_dir),
        title=on_one_line(description.title),
        summary=on_one_line(description.summary),
        model_class=type(prepared.model).__name__,
        imports=[*map("import {}".format, prepared.model.config.to_dict().get("requires_import", []))],
        pipeline_tag=task.pipeline_tag,
        metrics=[
            (name, show_metric(name, value))
            for name, value in results.items()
            if name.startswith(("eval_", "validation_", "train_")) and "_excluded" not in name
        ],
        definitions=[(name, text) for name, text in _DEFINITIONS.items() if name in results],
        model=[(k, on_one_line(v)) for k, v in description.model.items()],
        settings=settings,
        selection_note=_selection_note(metric, prepared, run.args, results),
        command=wrap_command(command),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        hardware=hardware,
        duration=f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
    )
    write_text(run.output_dir / CARD_FILE, hide_private(card.content))
    if "rejection" in results:
        write_rejection(run.output_dir / CARD_FILE, results["rejection"]["summary"])
    write_eval_results(run.output_dir, (data.eval_results or []) if is_on_hub else [])


def _selection_note(metric: str, prepared: Prepared, args: Any, results: Mapping[str, Any]) -> str:
    """Describe how the reported epoch was selected."""
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


def write_rejection(card: Path, rejection: str) -> None:
    """Describe the rejection of unknown images in the table of a card's model, instead of an earlier one."""
    text = re.sub(r"^\| unknown images \|.*\n", "", card.read_text(encoding="utf-8"), flags=re.MULTILINE)
    table = "## Model\n\n| | |\n|---|---|\n"
    row = f"| unknown images | `output.known` and `output.p_value`, in eval mode: {rejection} |\n"
    write_text(card, text.replace(table, table + row, 1))


def write_eval_results(folder: Path, results: Sequence[EvalResult]) -> None:
    """Write results on a dataset of the Hub to a file that the Hub reads; without any, remove the file."""
    path, entries = folder / EVAL_RESULTS_FOLDER / "results.yaml", []
    path.unlink(missing_ok=True)
    for each in results:
        notes = f"{each.dataset_split} split"
        entries.append(EvalResultEntry(each.dataset_type, each.metric_type, each.metric_value, notes=notes))
    if entries:
        write_text(path, yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False))


def on_one_line(value: Any) -> str:
    """Format a value for a line or a table cell, which line breaks and bars would end."""
    return " ".join(str(value).split()).replace("|", r"\|")


def wrap_command(command: Sequence[str]) -> str:
    """Quote a command for the shell, and break it before its options."""
    words = map(shlex.quote, command)
    return "".join(f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words).lstrip()


def rename_model(card: str, name: str) -> str:
    """Return the text of a card whose code loads the model by another name."""
    model = re.search(r'\bmodel(?:_id)? ?= ?("[^"\n]+")', card)
    return card.replace(model[1], json.dumps(name)) if model else card
