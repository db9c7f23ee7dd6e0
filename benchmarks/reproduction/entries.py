"""The runs of `benchmarks/queue.yaml`: settings, names and digests."""

import contextlib
import difflib
import functools
import hashlib
import inspect
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hf_sphere.commands import JOBS
from hf_sphere.comparison.significance import Test
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import parse_arguments, to_argv
from hf_sphere.utils.configs import YamlLoader, config_names, load_config, read_yaml
from reproduction.old_options import restore_job, restore_options

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {
    "classification": "train_image_classification",
    "regression": "train_image_regression",
    "retrieval": "train_image_retrieval",
    "joint": "train_joint_prediction",
    "few_shot": "train_few_shot",
    "masked_lm": "train_masked_lm",
}
"""Recipe of each task."""

WITHOUT_EFFECT = {
    *("output_dir", "save_epochs", "save_steps", "save_total_limit", "logging_steps", "disable_tqdm"),
    *("report_to", "cache_dir", "dataloader_num_workers", "preprocessing_num_workers", "per_device_eval_batch_size"),
}
"""Arguments on which no result depends; they are not part of the digest."""


class AliasLoader(YamlLoader):
    """Loader of files of this repository, which may have aliases."""

    has_aliases = True


class QueueError(ValueError):
    """An error in the queue's file."""


@dataclass(frozen=True)
class Entry:
    """Runs of the same kind.

    Attributes:
        entry: Unique name.
        priority: Entries with smaller numbers run first.
        task: Name of the task, see `SCRIPTS`.
        configs: Names of configurations, such as `spherization/mnist-lenet5-plain`; `a + b` combines several, of which
            later ones take precedence.
        minutes: Expected minutes per run, of one CPU core or of the GPU.
        seeds: Number of seeds.
        first_seed: The smallest seed; fresh seeds leave out those of earlier runs.
        device: Where the runs take place.
        label: Appended to the names of the runs, to distinguish them from other runs of the same configuration.
        overrides: Arguments that differ from the configuration; `head_kwargs.scaling` sets one option of a mapping.
        grid: Values of arguments; each combination is a separate run, and part of its name.
        tuned_by: Entry with a grid; each configuration gets the values with which it has the highest mean of
            `selection_metric` there, among those with the values of its own grid.
        selection_metric: See `tuned_by`.
        test: Planned test of the comparisons of these runs with others: `welch`, or, for runs that were planned before
            26 November 2026, `paired`. The others have the mean of the last epochs as planned metric, see `RULES`.
        exceptions: Rules of `reproduction.rules` that the comparisons of these runs, or this tuning, break, with the
            reasons.
        after: Jobs that run after training, by the names of `hf-sphere`, with the placeholders `{model}`
            (output folder of the training), `{folder}` (folder for other results) and `{<Hub id>}` (a dataset).

    Raises:
        QueueError: If a value is invalid.
    """

    entry: str
    priority: int
    task: str
    configs: list[str]
    minutes: float
    seeds: int = 1
    first_seed: int = 0
    device: Literal["cpu", "gpu"] = "cpu"
    label: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    tuned_by: str | None = None
    selection_metric: str = "validation_accuracy"
    test: Test = "welch"
    exceptions: dict[str, str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        valid = {
            "priority": isinstance(self.priority, int),
            "configs": isinstance(self.configs, list) and {type(config) for config in self.configs} == {str},
            "minutes": isinstance(self.minutes, (int, float)) and self.minutes > 0,
            "seeds": isinstance(self.seeds, int) and self.seeds >= 1,
            "first_seed": type(self.first_seed) is int and self.first_seed >= 0,
            "device": self.device in ("cpu", "gpu"),
            "test": self.test in get_args(Test),
            "exceptions": isinstance(self.exceptions, Mapping),
            "overrides": isinstance(self.overrides, Mapping),
            "grid": isinstance(self.grid, Mapping) and all(isinstance(v, list) and v for v in self.grid.values()),
            "after": all(words.split()[0] in JOBS.keys() - {"train"} for words in self.after),
        }
        wrong = [f"{name} {getattr(self, name)!r}" for name, is_valid in valid.items() if not is_valid]
        if wrong:
            raise QueueError(f"entry {self.entry!r}: invalid {', '.join(wrong)}; see the attributes of `Entry`.")


@dataclass(frozen=True)
class PlannedRun:
    """One run of an entry.

    Attributes:
        entry: The entry.
        config: One of the entry's `configs`.
        seed: The seed.
        grid: Values of the entry's grid, by argument.
    """

    entry: Entry
    config: str
    seed: int
    grid: Mapping[str, Any]

    @property
    def group(self) -> str:
        """Name without the seed, unique among all entries."""
        label = [self.entry.label] if self.entry.label else []
        values = [f"{name.rpartition('.')[2]}{value}" for name, value in self.grid.items()]
        return "-".join([*(part.rpartition("/")[2] for part in split_config(self.config)), *label, *values])

    @property
    def name(self) -> str:
        """Unique name; that of the results file."""
        return f"{self.group}-seed{self.seed}"

    @property
    def script(self) -> str:
        """Path of the recipe in the repository."""
        return f"recipes/{SCRIPTS[self.entry.task]}.py"

    def overrides(self, tuned: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments that differ from the configuration, with options of mappings merged."""
        settings = read_settings(self.config)
        changed = apply_overrides(settings, {**self.entry.overrides, **self.grid, **(tuned or {})})
        return {name: value for name, value in changed.items() if name not in settings or settings[name] != value}

    def arguments(self, tuned: Mapping[str, Any] | None = None) -> list[str]:
        """Return the command-line arguments of the recipe, without data and output folders."""
        words = [word for name in split_config(self.config) for word in ("--config", name)]
        return [*words, *to_argv({**self.overrides(tuned), "seed": self.seed})]

    def digest(self, tuned: Mapping[str, Any] | None = None) -> str:
        """Return a digest of what the result depends on: settings, later steps, and the task's `numerics`.

        The settings are the explicit ones, and all options of the head, so that a new default makes a result stale; the
        options and later steps have their old names, so that a new name does not.
        """
        settings = read_settings(self.config) | self.overrides(tuned)
        if "head" in settings:
            settings["head_kwargs"] = resolve_head_options(settings["head"]) | (settings.get("head_kwargs") or {})
        content = {
            "task": self.entry.task,
            "settings": {
                name: value for name, value in restore_options(settings).items() if name not in WITHOUT_EFFECT
            },
            "after": [*map(restore_job, self.entry.after)],
            "seed": self.seed,
            "numerics": find_task(self.entry.task).numerics,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_queue(path: Path) -> list[Entry]:
    """Read and check the entries of a queue, in order of priority.

    Raises:
        QueueError: If a configuration does not exist, an argument is unknown or invalid, or a name is not unique.
    """
    rows = read_yaml(path, AliasLoader)
    if not isinstance(rows, list):
        raise QueueError(f"{path} must be a list of entries.")
    entries = sorted((_to_entry(row, path) for row in rows), key=lambda entry: entry.priority)
    names = [entry.entry for entry in entries]
    for entry in entries:
        if names.count(entry.entry) > 1:
            raise QueueError(f"{path} has two entries named {entry.entry!r}.")
        tuning = next((other for other in entries if other.entry == entry.tuned_by), None)
        if entry.tuned_by is not None and (
            tuning in (None, entry) or not tuning.grid or not set(entry.configs) <= set(tuning.configs)
        ):
            raise QueueError(
                f"entry {entry.entry!r}: tuned_by must name an entry with a grid and these configs; got "
                f"{entry.tuned_by!r}."
            )
    groups: dict[str, str] = {}
    for run in itertools.chain.from_iterable(map(plan, entries)):
        if groups.setdefault(run.group, run.entry.entry) != run.entry.entry:
            raise QueueError(
                f"entries {groups[run.group]!r} and {run.entry.entry!r} both have runs named {run.group}; give one of "
                "them a label."
            )
    return entries


def plan(entry: Entry) -> list[PlannedRun]:
    """Return the runs of an entry: all configurations with the first seed, then with the second, and so on."""
    combinations = [dict(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
    return [
        PlannedRun(entry, config, seed, values)
        for seed in range(entry.first_seed, entry.first_seed + entry.seeds)
        for config in entry.configs
        for values in combinations
    ]


@functools.cache
def read_settings(config: str) -> dict[str, Any]:
    """Return the arguments that a configuration, or a combination `a + b`, sets."""
    settings: dict[str, Any] = {}
    for name in split_config(config):
        settings |= load_config(name).settings
    return settings


@functools.cache
def resolve_head_options(head: str) -> dict[str, Any]:
    """Return the default options of a head, without those that change its results only by rounding."""
    from hf_sphere.nn import HEADS  # imports torch
    from hf_sphere.utils.checks import keyword_options

    ignored = ("blockwise", "shard_classes")
    return {name: option.default for name, option in keyword_options(HEADS[head]).items() if name not in ignored}


def split_config(config: str) -> list[str]:
    """Return the parts of a combination `a + b`."""
    return [part.strip() for part in config.split("+")]


def apply_overrides(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with overrides; the name `a.b` sets the option b of the mapping a."""
    result = dict(settings)
    for name, value in overrides.items():
        mapping, _, option = name.partition(".")
        if option and not isinstance(result.get(mapping) or {}, Mapping):
            raise QueueError(f"{name} sets an option of {mapping}, which is {result[mapping]!r} and no mapping.")
        result[mapping] = {**(result.get(mapping) or {}), option: value} if option else value
    return result


def _to_entry(row: Any, path: Path) -> Entry:
    known = [f.name for f in fields(Entry)]
    if not isinstance(row, Mapping) or "entry" not in row:
        raise QueueError(f"each entry of {path} must be a mapping with a key `entry`, its name; got {row!r}.")
    for name in row:
        if name not in known:
            raise QueueError(f"entry {row['entry']!r}: unknown key {name!r}.{_hint(name, known)}")
    try:
        entry = Entry(**row)
    except (TypeError, AttributeError, IndexError) as error:
        raise QueueError(f"entry {row['entry']!r}: {error}") from error
    if entry.task not in SCRIPTS:
        raise QueueError(f"entry {entry.entry!r}: unknown task {entry.task!r}; the tasks are {', '.join(SCRIPTS)}.")
    for config in entry.configs:
        try:
            read_settings(config)
        except ValueError as error:
            raise QueueError(f"entry {entry.entry!r}: {error}") from error
        if unnamed := [name for name in split_config(config) if name not in config_names()]:
            raise QueueError(f"entry {entry.entry!r}: {unnamed[0]!r} must be a name with its table, <table>/<run>.")
    for run in plan(replace(entry, seeds=1)):
        _check_arguments(run)
    return entry


def _check_arguments(run: PlannedRun) -> None:
    """Parse the arguments of a run as its recipe does."""
    unset = [name for name, value in run.overrides().items() if value is None]
    if unset:
        raise QueueError(
            f"entry {run.entry.entry!r}: {unset[0]} cannot be null, since that would not override a value."
        )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            words, recipe = [*run.arguments(), "--output_dir", "unused"], SCRIPTS[run.entry.task]
            parse_arguments(find_task(run.entry.task).arguments, words, recipe=recipe)
    except SystemExit as stop:
        message = said.getvalue().partition("error: ")[2].partition("\nSee ")[0]
        raise QueueError(f"entry {run.entry.entry!r}, {run.config}: {message}") from stop
    _check_options(run)


def _check_options(run: PlannedRun) -> None:
    """Check the options of the head and of the spherization that the entry changes."""
    changed = [name.partition(".") for name in (*run.entry.overrides, *run.grid)]
    if not any(mapping in ("head_kwargs", "spherization") and option for mapping, _, option in changed):
        return
    from hf_sphere.nn import HEADS, Spherization  # imports torch
    from hf_sphere.utils.checks import keyword_options

    settings = read_settings(run.config) | run.overrides()
    head = HEADS.get(settings.get("head", "spherized"))
    known = {"spherization": list(inspect.signature(Spherization).parameters)}
    known |= {"head_kwargs": list(keyword_options(head))} if head is not None else {}
    for mapping, _, option in changed:
        if option and option not in known.get(mapping, [option]):
            raise QueueError(
                f"entry {run.entry.entry!r}, {run.config}: unknown option {option!r} of {mapping}."
                f"{_hint(option, known[mapping])}"
            )


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
