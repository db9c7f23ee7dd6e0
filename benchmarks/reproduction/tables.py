"""Tables of measured and published results, from `results/tables.yaml` and the files of `results/runs`."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from hf_sphere.training.published import read_published, show_published
from hf_sphere.utils.arguments import read_config
from reproduction.entries import CONFIGS, ROOT, SCRIPTS, Entry, PlannedRun, plan, read_settings
from reproduction.results import Results

CIFAR_NOTE = "CIFAR-10 is a JPEG copy here (quality 75, chroma subsampling 4:2:0), which is harder than the original."


@dataclass(frozen=True)
class Table:
    """One table of a README.

    Attributes:
        table: Unique name, in the markers of the README.
        readme: Path of the README in the repository.
        title: Heading in `RESULTS.md`.
        rows: Runs, by name without seed, as in `PlannedRun.group`; `a - b` also compares the run a with the run b. With
            `columns`, parts of their names.
        metrics: Metrics of the results files, or `core_minutes`, by column title; the first one is compared. Without
            metrics the table has published values only.
        published: Further published values by column title: the end of the id of a record, after that of the run.
        task: Task of the runs, for the command of those that are not in the queue.
        columns: Other parts of the names. The table then has a cell with the published value, if there is one, and the
            measured value of the run `<column>-<row>`.
        note: Further note below the table.
    """

    table: str
    readme: str
    title: str
    rows: list[str]
    metrics: dict[str, str] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    task: str = "classification"
    columns: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Source:
    """What tables are made from.

    Attributes:
        results: Results of finished runs.
        entries: Entries of the queue.
        published: Published records by id.
    """

    results: Results
    entries: list[Entry]
    published: Mapping[str, Mapping[str, Any]]
    planned: dict[str, list[PlannedRun]] = field(init=False)

    def __post_init__(self) -> None:
        self.planned = {}
        for entry in self.entries:
            for run in plan(entry):
                self.planned.setdefault(run.group, []).append(run)

    @classmethod
    def read(cls, results: Results, entries: list[Entry]) -> "Source":
        """Read the published records."""
        return cls(results, entries, read_published(ROOT / "results" / "published"))

    def runs(self, group: str) -> dict[int, Mapping[str, Any]]:
        """Return the results of a group by seed, without those of other settings than the queue's."""
        if group in self.planned:
            runs = [run for run in self.planned[group] if self.results.state(run, self.entries) == "done"]
            return {run.seed: self.results.runs[run.name] for run in runs}
        found = [run for run in self.results.runs.values() if run.get("group") == group]
        return {run["seed"]: run for run in found}

    def values(self, group: str, metric: str) -> dict[int, float]:
        """Return a metric of the runs of a group by seed."""
        runs = {seed: {"core_minutes": run["core_minutes"], **run["metrics"]} for seed, run in self.runs(group).items()}
        return {seed: values[metric] for seed, values in runs.items() if metric in values}

    def published_of(self, group: str, further: str = "") -> Mapping[str, Any] | None:
        """Return the published record of a group's configuration, if it has one and the group does not change it.

        Args:
            group: The group.
            further: End of the record's id, after that of the run.
        """
        config = self.config(group)
        unchanged = config is not None and config.rpartition("/")[2] == group
        name = read_settings(config).get("published") if unchanged else None
        # Numbers that are only in the picture of a table have ids of their own.
        ids = [f"{name}/{further}" if further else f"{name}", f"{name}/picture"]
        return next((self.published[key] for key in ids[: 1 if further else 2] if key in self.published), None)

    def config(self, group: str) -> str | None:
        """Return the configuration of a group, if there is one."""
        if group in self.planned:
            return self.planned[group][0].config
        path = next(CONFIGS.rglob(f"{group}.yaml"), None)
        return None if path is None else str(path.relative_to(CONFIGS).with_suffix(""))


def read_tables(path: Path) -> list[Table]:
    """Read the definitions of the tables."""
    return [Table(**row) for row in read_config(path)]


def render(table: Table, source: Source) -> str:
    """Return a table in Markdown, with its notes."""
    if table.columns:
        return _render_matrix(table, source)
    rows = [_Row(*_split(row), table, source) for row in table.rows]
    columns = {"run": [f"`{row.group}`" for row in rows]}
    if table.metrics and any(row.published for row in rows):
        columns["published"] = [show_published(row.published) if row.published else "" for row in rows]
    for title, metric in table.metrics.items():
        columns[title] = [row.measured(metric) for row in rows]
    for title, further in table.published.items():
        records = [source.published_of(row.group, further) for row in rows]
        columns[title] = [f"{record['value']:g}" if record else "" for record in records]
    columns["seeds"] = [str(row.count) if row.count else "" for row in rows]
    if any(row.published for row in rows):
        columns["measured minus published"] = [row.from_published() for row in rows]
    if any(row.baseline for row in rows):
        columns["difference from"] = [row.from_baseline() for row in rows]
    used = {name: cells for name, cells in columns.items() if name in ("run", *table.metrics) or any(cells)}
    return _join(list(used), zip(*used.values(), strict=True), _notes(table, rows, source))


def _render_matrix(table: Table, source: Source) -> str:
    """Return a table of published and measured values by row and column."""
    lines, rows = [], []
    for name in table.rows:
        line = [_Row(f"{column}-{name}", None, table, source) for column in table.columns]
        known = [row for row in line if row.published or row.group in source.planned]
        cells = [_show_cell(row) if row in known else "" for row in line]
        lines.append([f"`{name}`", *cells])
        rows += known
    order = ["Each cell: published; measured."] if any(row.published for row in rows) else []
    notes = [*order, *_notes(table, rows, source)]
    return _join(["", *(f"`{column}`" for column in table.columns)], lines, notes)


def _show_cell(row: "_Row") -> str:
    measured = row.measured(row.first)
    return f"{show_published(row.published)}; {measured}" if row.published else measured


def _join(header: list[str], lines: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    notes = " ".join(notes)
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *(["", notes] if notes else [])])


@dataclass
class _Row:
    """A row of a table; `baseline` is the run that it is compared with, if any."""

    group: str
    baseline: str | None
    table: Table
    source: Source

    def __post_init__(self) -> None:
        self.first = next(iter(self.table.metrics.values()), "")
        self.values = self.source.values(self.group, self.first)
        self.count = len(self.values)
        self.published = self.source.published_of(self.group)

    def measured(self, metric: str) -> str:
        values = list(self.source.values(self.group, metric).values())
        if not values:
            return "" if self.count else "not run"
        spread = f" ± {_number(metric, statistics.stdev(values))}" if len(values) > 1 else ""
        return f"{_number(metric, statistics.mean(values))}{spread}"

    def from_published(self) -> str:
        if not self.published or not self.values:
            return ""
        scale = _scale(self.first)
        differences = [scale * value - self.published["value"] for value in self.values.values()]
        return _interval(stats.ttest_1samp(differences, 0.0) if self.count > 1 else None, statistics.mean(differences))

    def from_baseline(self) -> str:
        if self.baseline is None or not self.values:
            return ""
        other = self.source.values(self.baseline, self.first)
        if not other:
            return f"`{self.baseline}`: not run"
        scale = _scale(self.first)
        ours, theirs = [scale * v for v in self.values.values()], [scale * v for v in other.values()]
        test = None
        if set(other) == set(self.values) and self.count > 1:
            test = stats.ttest_rel(ours, [scale * other[seed] for seed in self.values])
        elif min(len(ours), len(theirs)) > 1:
            test = stats.ttest_ind(ours, theirs, equal_var=False)
        return f"`{self.baseline}`: {_interval(test, statistics.mean(ours) - statistics.mean(theirs))}"


def _split(row: str) -> tuple[str, str | None]:
    group, _, baseline = row.partition(" - ")
    return group.strip(), baseline.strip() or None


def _scale(metric: str) -> float:
    """Return 100 for metrics that are shown in percent."""
    shares = ("accuracy", "recall", "map_at_r", "calibration", "auroc", "fpr")
    return 100.0 if any(share in metric for share in shares) else 1.0


def _number(metric: str, value: float) -> str:
    return f"{100 * value:.2f}" if _scale(metric) == 100.0 else f"{value:.4g}"


def _interval(test: Any, mean: float) -> str:
    """Format a mean difference with its 95 % interval, if there is one."""
    if test is None:
        return f"{mean:+.2f}"
    low, high = test.confidence_interval(0.95)
    return f"{mean:+.2f}" if math.isnan(low) else f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def _notes(table: Table, rows: list[_Row], source: Source) -> Iterator[str]:
    runs = [run for row in rows for run in source.runs(row.group).values()]
    if runs:
        yield "Measured: mean and standard deviation over seeds"
        yield "and, in parentheses, 95 % intervals of differences: paired by seed, or Welch's for other seeds;"
        yield "of differences from published numbers, of the measured mean only."
        devices = sorted({run["device"] for run in runs})
        minutes = statistics.mean(run["core_minutes"] for run in runs)
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        yield f"{count} on {', '.join(devices)}, {minutes:.3g} core-minutes each on average."
    if any(run["data"] == {"name": "uoft-cs/cifar10", "encoding": "JPEG"} for run in runs):
        yield CIFAR_NOTE
    diverged = sorted(run["name"] for run in runs if run.get("diverged"))
    if diverged:
        yield f"Diverged: {', '.join(diverged)}."
    missing = [row.group for row in rows if table.metrics and not row.count]
    queued = sorted({source.planned[group][0].entry.entry for group in missing if group in source.planned})
    if queued:
        yield f"Runs that are missing: `python benchmarks/reproduce.py --only {' '.join(queued)}`."
    folders = {str(Path(config).parent) for g in missing if g not in source.planned and (config := source.config(g))}
    for folder in sorted(folders):
        command = f"accelerate launch recipes/{SCRIPTS[table.task]}.py --config recipes/configs/{folder}/<run>.yaml"
        yield f"Runs that are not in the queue: `{command}`."
    if table.note:
        yield table.note
