"""Model cards of the configurations that have results, from the results files."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from hf_sphere.training.model_card import LIBRARY, TEMPLATE, on_one_line, wrap_command
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.commands import command_of
from reproduction.definitions import define, is_share
from reproduction.entries import ROOT, WITHOUT_EFFECT, read_settings
from reproduction.old_options import rename_options
from reproduction.published import show_published
from reproduction.tables import CIFAR_NOTE, Source, mean_minutes, read_rows, show_from_published, show_mean, show_seeds

CARDS = ROOT / "hub_cards"
"""Folder of the template, and of a folder per card."""

MEASURES = {"test_time_flips", "dataset_name"}
"""Arguments of the queue that do not change a configuration's training."""

LEFT_OUT = {"steps", "epoch", "train_runtime", "best_epoch"}
"""Metrics that are not on the cards, like those of the best epoch."""

JPEG_COPY = " (JPEG copy, quality 75, 4:2:0)"
"""What the name of CIFAR-10 is followed by in the metadata of the cards."""

STORED_SEED = 0
"""Seed of the runs whose weights are beside the cards."""

MODEL = ("backbone", "backbone_kwargs", "embedding_dim", "head", "head_kwargs", "spherization", "metric", "temperature")
"""Arguments that describe the model."""


@dataclass(frozen=True)
class Paper:
    """A publication that cards cite.

    Attributes:
        bibtex: The entry.
        tables: Tables of `hf_sphere/configs` that follow it.
        heads: Heads that it introduces.
    """

    bibtex: str
    tables: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Limit:
    """A sentence about what the results of some configurations do not show.

    Attributes:
        text: The sentence.
        configs: The configurations.
    """

    text: str
    configs: list[str]


def read_papers(path: Path) -> list[Paper]:
    """Read the publications."""
    return read_rows(path, Paper)


def read_limits(path: Path) -> list[Limit]:
    """Read the sentences about the limits of results."""
    return read_rows(path, Limit)


def render_cards(
    source: Source, papers: Sequence[Paper], limits: Sequence[Limit] = (), weights: Mapping[str, str] | None = None
) -> dict[Path, str]:
    """Return the text of each card by its path; `weights` are those beside the cards, see `find_weights`."""
    stored = weights or {}
    return {
        CARDS / name / "README.md": render_card(name, group, source, papers, limits, stored.get(name))
        for name, group in find_groups(source, stored).items()
    }


def find_weights() -> dict[str, str]:
    """Return the dtype of the weights beside each card that has some."""
    found = {}
    for path in sorted(CARDS.glob("*/model.safetensors")):
        with safe_open(path, "pt") as file:
            dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        found[path.parent.name] = "float16" if "F16" in dtypes else "float32"
    return found


def find_groups(source: Source, stored: Iterable[str] = ()) -> dict[str, str]:
    """Return the runs behind each card, by its name.

    The card of a configuration has the runs of its own name, or others that only measure more. Other runs whose model
    is stored have a card of their own.
    """
    found: dict[str, str] = {}
    for group, planned in source.planned.items():
        config, entry = planned[0].config, planned[0].entry
        own = group == Path(config).name or group in stored
        same = not entry.grid and not entry.tuned_by and set(entry.overrides) <= MEASURES
        if "+" not in config and (own or same) and source.values(group, _headline(entry.task)[0]):
            name = group if own else Path(config).name
            found = {**found, name: group} if own or name not in found else found
    return dict(sorted(found.items()))


def render_card(
    card_name: str,
    group: str,
    source: Source,
    papers: Sequence[Paper],
    limits: Sequence[Limit] = (),
    dtype: str | None = None,
) -> str:
    """Return the card of a group of runs; `dtype` is that of the weights beside it."""
    planned = source.planned[group][0]
    runs = [run for run in source.runs(group).values() if run["metrics"]]
    config, task = planned.config, find_task(planned.entry.task)
    settings = read_settings(config) | rename_options(runs[0].get("overrides", {}))
    own_name = f"{Path(config).parent}/{card_name}"  # of another configuration, the limits may be others
    names = [name for name in runs[0]["metrics"] if name not in LEFT_OUT and not name.startswith("best_")]
    values: dict[str, Mapping[int, float]] = {}
    for name in sorted(names, key=lambda name: "/" in name):  # those of the training first, each only once
        found, known = source.values(group, name), values.get(name.rpartition("/")[2])
        if define(name) and (known is None or known != found):
            values[name] = found
    seeds = sorted(source.values(group, _headline(planned.entry.task)[0]))
    published = source.published_of(group)
    data = runs[0]["data"]["name"]
    data_name = f"{data}{JPEG_COPY}" if _is_jpeg_copy(runs) else data
    command = [*command_of(Path(planned.script).stem).split(), *planned.arguments(runs[0].get("overrides"))]
    output = settings.get("output_dir", f"outputs/{config}") if dtype is None else f"hub_cards/{card_name}"
    headline = [name for name in _headline(planned.entry.task) if values.get(name)]
    card = ModelCard.from_template(
        ModelCardData(
            library_name=LIBRARY,
            license="apache-2.0",
            pipeline_tag=task.pipeline_tag,
            tags=["hf_sphere", "hypersphere", *([settings["head"]] if "head" in settings else [])],
            datasets=[data] if "/" in data else None,
            model_name=card_name,
            eval_results=[
                EvalResult(
                    task_type=task.pipeline_tag or "other",
                    dataset_type=data,
                    dataset_name=data_name,
                    dataset_split=settings.get("eval_split", "test"),
                    metric_type=name.removeprefix("eval_"),
                    metric_name=f"{name.removeprefix('eval_')}, {of}",
                    metric_value=round(value, 6),
                )
                for name in headline
                for of, value in [
                    *([(f"these weights, seed {STORED_SEED}", values[name][STORED_SEED])] if dtype else []),
                    (f"mean over {_count(len(seeds), 'seed')}", statistics.mean(values[name].values())),
                ]
            ],
        ),
        template_path=str(TEMPLATE),
        model_id=output,
        title=on_one_line(card_name),
        summary=f"{_describe(settings)}, trained on `{data}`. {_about_weights(output, dtype)}",
        model_class=task.model_name,
        pipeline_tag=task.pipeline_tag,
        metrics=[
            (
                f"`{name}`",
                _show(name, [*found.values()]) + (_of_weights(name, found) if dtype and name in headline else ""),
            )
            for name, found in values.items()
        ],
        definitions=[
            *{_pattern(name): define(name, in_episodes=planned.entry.task == "few_shot") for name in values}.items()
        ],
        selection_note=_selection(settings, seeds),
        published=[show_published(published)] if published else [],
        limits=[
            *_limits(group, source, published, data),
            *(one.text for one in limits if own_name in one.configs),
        ],
        model=[(name, f"`{on_one_line(settings[name])}`") for name in MODEL if name in settings],
        settings=[
            (name, on_one_line(value))
            for name, value in settings.items()
            if name not in (*MODEL, *WITHOUT_EFFECT, "dataset_name", *MEASURES)
        ],
        command=wrap_command(command),
        versions=_versions(runs),
        hardware=", ".join(sorted({run["device"] for run in runs})),
        duration=_duration(runs, planned.entry.device),
        citations=[paper.bibtex.strip() for paper in papers if _is_cited(paper, config, settings)],
    )
    return f"{card.content.rstrip()}\n"


def _about_weights(output: str, dtype: str | None) -> str:
    if dtype is None:
        return f"No weights are published: the command below trains the model and writes it to `{output}`."
    return (
        f"The weights are from the run with seed {STORED_SEED}, stored as {dtype} and loaded as float32. They have "
        "exactly the accuracy of the run on the evaluation split. To measure it in a clone, add `--num_train_epochs 0 "
        f"--model_name_or_path {output} --output_dir outputs/again` to the command below."
    )


def _pattern(name: str) -> str:
    """Return the name of a metric with placeholders for the images and the score of an OOD detection."""
    return re.sub(r"ood_[^_]+_(auroc|aupr|fpr_at_95_tpr)_\w+", r"ood_<images>_\1_<score>", name)


def _of_weights(name: str, values: Mapping[int, float]) -> str:
    return f"; these weights: {_show(name, [values[STORED_SEED]])}"


def _headline(task: str) -> list[str]:
    return [f"eval_{name}" for name in find_task(task).headline]


def _describe(settings: Mapping[str, Any]) -> str:
    """Return the network and the head of a configuration."""
    embeddings = "spherized embeddings" if "spherization" in settings else "plain embeddings"
    head = f"the `{settings['head']}` head" if "head" in settings else embeddings
    return f"`{settings.get('backbone') or settings['model_name_or_path']}` with {head}"


def _show(name: str, values: list[float]) -> str:
    return f"{show_mean(name, values)}{' %' if is_share(name) else ''}"


def _selection(settings: Mapping[str, Any], seeds: Sequence[int]) -> str:
    over = f"Mean and standard deviation over {len(seeds)} runs, {show_seeds(seeds)}" if len(seeds) > 1 else "One run"
    if settings.get("load_best_model_at_end"):
        return f"{over}. Each run ends with its best epoch on validation images."
    return f"{over}. Each run is evaluated after its last epoch; no epoch was selected."


def _limits(group: str, source: Source, published: Mapping[str, Any] | None, data: str) -> list[str]:
    metric = _headline(source.planned[group][0].entry.task)[0]
    values = source.values(group, metric)
    limits = [f"Measured on images of `{data}` only."]
    if len(values) == 1:
        limits.append("One run: the deviation between seeds is unknown.")
    if published:
        difference = show_from_published(metric, values, published["value"])
        limits.append(
            f"Measured minus published: {difference}, with the 95 % interval of the measured mean. The source does not "
            "state its number of runs."
        )
    if _is_jpeg_copy(source.runs(group).values()):
        limits.append(CIFAR_NOTE)
    if diverged := source.diverged(group):
        limits.append(f"Diverged, and not in the mean: {', '.join(diverged)}.")
    return limits


def _is_jpeg_copy(runs: Iterable[Mapping[str, Any]]) -> bool:
    return any(run["data"] == {"name": "uoft-cs/cifar10", "encoding": "JPEG"} for run in runs)


def _versions(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the versions of the packages, several if runs have others."""
    found: dict[str, set[str]] = {}
    for name, version in (pair for run in runs for pair in run.get("versions", {}).items()):
        found.setdefault(name, set()).add(version)
    return ", ".join(f"{name} {' and '.join(sorted(versions))}" for name, versions in found.items()) or "not recorded"


def _duration(runs: Sequence[Mapping[str, Any]], device: str) -> str:
    name = "minutes" if device == "gpu" else "core_minutes"
    return f"{mean_minutes(runs, name):.2g} {name.replace('_', '-')} per run, with evaluation"


def _is_cited(paper: Paper, config: str, settings: Mapping[str, Any]) -> bool:
    heads = {settings.get("head"), "spherized" if "spherization" in settings else None}
    return Path(config).parent.name in paper.tables or bool(heads & set(paper.heads))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
