"""Model cards written from a run's own results."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_sphere.training.measures import show_metric


def write_model_card(
    folder: Path,
    *,
    template: Path,
    model_id: str,
    title: str,
    summary: str,
    dataset: str,
    eval_split: str,
    metrics: Mapping[str, float],
    headline: Sequence[str],
    model_class: str,
    pipeline_tag: str | None,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    command: Sequence[str],
    device: torch.device,
    seconds: float,
    selection_note: str,
    tags: Sequence[str] = (),
    packages: Sequence[str] = ("timm",),
) -> ModelCard:
    """Write `README.md` of a model beside its weights.

    Args:
        folder: Where the model is saved.
        template: Jinja template of the card.
        model_id: Name that loads the model.
        title: Heading.
        summary: One paragraph.
        dataset: Name of the data set as given to the recipe.
        eval_split: Split that the metrics were measured on.
        metrics: Measured values.
        headline: Names of the metrics, without `eval_`, that become the card's `model-index` entries.
        model_class: Name of the model's class.
        pipeline_tag: The pipeline of transformers that runs the model, if there is one.
        model: Description of the model by property.
        settings: Training settings that differ from their defaults.
        command: The command that ran.
        device: What the model was trained on.
        seconds: Time spent in training.
        selection_note: How the reported epoch was chosen.
        tags: Further tags of the card.
        packages: Packages whose versions are named beside those that every model needs.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=["hf_sphere", "hypersphere", *tags],
        datasets=[dataset] if dataset.count("/") == 1 and not Path(dataset).exists() else None,
        model_name=title,
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
    card = ModelCard.from_template(
        data,
        template_path=str(template),
        model_id=model_id,
        title=title,
        summary=summary,
        model_class=model_class,
        pipeline_tag=pipeline_tag,
        metrics=[(name, show_metric(name, value)) for name, value in metrics.items()],
        model=list(model.items()),
        settings=list(settings.items()),
        selection_note=selection_note,
        command=_wrap(command),
        versions=", ".join(f"{name} {version(name)}" for name in ("hf_sphere", "torch", "transformers", *packages)),
        hardware=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({platform.machine()})",
        duration=f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
    )
    card.save(folder / "README.md")
    return card


def _wrap(command: Sequence[str]) -> str:
    """Quote a command for the shell and break it before its options."""
    lines, current = [], ""
    for word in map(shlex.quote, command):
        if word.startswith("--") and current:
            lines.append(current)
            current = f"    {word}"
        else:
            current = f"{current} {word}".strip() if not current.startswith("    ") else f"{current} {word}"
    return " \\\n".join([*lines, current])
