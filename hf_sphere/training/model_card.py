"""Model cards generated from the results of a run."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_sphere.data.sources import BUNDLED
from hf_sphere.training.measures import show_metric
from hf_sphere.training.tasks.base import Description
from hf_sphere.utils.files import atomic_file

TEMPLATE = Path(__file__).with_name("model_card_template.md")
"""Jinja template of all cards."""

_DEFINITIONS = {
    "eval_loss": "mean training loss on the evaluation split, including a margin of the head, without calibration",
    "eval_nll": "mean negative log-likelihood of the classes, without a margin of the head, with calibration",
}


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained and what was measured."""

    metrics: Mapping[str, float]  # measured values by name
    headline: Sequence[str]  # names of the metrics, without `eval_`, that become the card's `model-index` entries
    eval_split: str  # split of the `eval_` metrics
    selection_note: str  # how the reported epoch was chosen
    settings: Mapping[str, Any]  # training settings that differ from their defaults
    command: Sequence[str]  # the command that ran
    device: torch.device  # device that the model was trained on
    seconds: float  # time spent in training


def write_model_card(
    folder: Path,
    *,
    model_id: str,
    model_class: str,
    pipeline_tag: str | None,
    description: Description,
    record: TrainingRecord,
    license: str = "unknown",
) -> ModelCard:
    """Write the model card, `README.md`, to the folder of a model.

    `model_id` is the name to load the model by, and `pipeline_tag` the transformers pipeline for it, if there is one.
    """
    dataset = description.dataset
    data = ModelCardData(
        library_name="transformers",
        license=license,
        pipeline_tag=pipeline_tag,
        tags=["hf_sphere", "hypersphere", *description.tags],
        datasets=[dataset] if _is_on_hub(dataset) else None,
        model_name=description.title,
        eval_results=[
            EvalResult(
                task_type=pipeline_tag or "other",
                dataset_type=Path(dataset).name if Path(dataset).exists() else dataset,
                dataset_name=Path(dataset).name,
                dataset_split=record.eval_split,
                metric_type=name,
                metric_value=round(record.metrics[f"eval_{name}"], 6),
            )
            for name in record.headline
        ],
    )
    device = record.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    packages = ("hf_sphere", "torch", "transformers", *description.packages)
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_id=model_id,
        title=on_one_line(description.title),
        summary=on_one_line(description.summary),
        model_class=model_class,
        pipeline_tag=pipeline_tag,
        metrics=[(name, show_metric(name, value)) for name, value in record.metrics.items() if "_excluded" not in name],
        definitions=[(name, text) for name, text in _DEFINITIONS.items() if name in record.metrics],
        model=[(name, on_one_line(value)) for name, value in description.model.items()],
        settings=[(name, on_one_line(value)) for name, value in record.settings.items()],
        selection_note=record.selection_note,
        command=wrap_command(record.command),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        hardware=hardware,
        duration=f"{record.seconds:.0f} s" if record.seconds < 600 else f"{record.seconds / 60:.0f} min",
    )
    with atomic_file(folder / "README.md") as unfinished:
        card.save(unfinished)
    return card


def _is_on_hub(dataset: str) -> bool:
    try:
        validate_repo_id(dataset)
    except HFValidationError:
        return False
    return dataset not in BUNDLED and not Path(dataset).exists()


def on_one_line(value: Any) -> str:
    """Format a value for a line or a table cell, which line breaks and bars would end."""
    return " ".join(str(value).split()).replace("|", r"\|")


def _quote(word: str) -> str:
    """Quote a word for the shell, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.encode("unicode_escape").decode().replace("'", r"\'")
    return f"$'{escaped}'"


def wrap_command(command: Sequence[str]) -> str:
    """Quote a command for the shell and break it before its options."""
    lines, current = [], ""
    for word in map(_quote, command):
        if word.startswith("--") and current:
            lines.append(current)
            current = f"    {word}"
        else:
            current = f"{current} {word}".strip() if not current.startswith("    ") else f"{current} {word}"
    return " \\\n".join([*lines, current])
