"""Tables of measured and published results, from `results/tables.yaml` and the files of `results/runs`."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from hf_sphere.comparison.runs import show_p_value
from hf_sphere.comparison.significance import Test
from hf_sphere.utils.commands import command_of
from hf_sphere.utils.configs import config_names, read_yaml
from reproduction.comparisons import Comparison, as_number, compare, correct
from reproduction.definitions import is_higher_better, is_share, scale
from reproduction.entries import SCRIPTS, AliasLoader, Entry, PlannedRun, plan, read_settings
from reproduction.published import read_published, show_published
from reproduction.results import Results, describe, is_on_cpu

Row = TypeVar("Row")

P_VALUE = "p, corrected: planned test (other test)"
"""Title of the column of p-values."""

LONGEST_NOTE = 60
"""Words below a table; longer notes are folded."""

LARGEST_GRID = 20
"""Cells of a table of settings; larger ones are folded below their best cell."""

EXCEPTIONS = "Exceptions to the rule of comparisons"

MARKS = "[† JPEG copy, ‡ later seeds](rules.md#marks)"
"""Link to the meaning of the marks; `report.insert` makes it relative to the page."""

CIFAR_NOTE = (
    "CIFAR-10 is a JPEG copy here (quality 75, chroma subsampling 4:2:0), which may be harder than the original; its "
    "cost in accuracy is not measured."
)


@dataclass(frozen=True)
class Table:
    """One table of a page.

    Attributes:
        table: Unique name, in the markers of the page.
        page: Path of the page in the repository.
        rows: Runs, by name without seed, as in `PlannedRun.group`; `a - b` also compares the run a with the run b. With
            `columns`, parts of their names.
        metrics: Metrics of the results files, or `core_minutes`, by column title; the first one is compared. Without
            metrics the table has published values only.
        published: Further published values by column title: the end of the id of a record, after that of the run.
        task: Task of the runs, for the command of those that are not in the queue.
        columns: Other parts of the names. The table then has a cell with the published value, if there is one, and the
            measured value of the run `<column>-<row>`. What the columns' names begin with in common is above the rows.
        post_hoc: A metric that was chosen when the results were known, by name: a second analysis, below the table.
        differs: Arguments in which the runs of a comparison differ, besides those that their names say or a tuning
            selects, see `reproduction.rules`.
        note: Further note below the table.
        by_metric: Whether the table has a row per metric, of its one comparison, which is no planned test, instead of
            one per run.
    """

    table: str
    page: str
    rows: list[str]
    metrics: dict[str, str] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    task: str = "classification"
    columns: list[str] = field(default_factory=list)
    post_hoc: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    note: str = ""
    by_metric: bool = False


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
        self.planned, self._found = {}, {}
        for entry in self.entries:
            for run in plan(entry):
                self.planned.setdefault(run.group, []).append(run)

    @classmethod
    def read(cls, results: Results, entries: list[Entry]) -> "Source":
        """Read the published records."""
        return cls(results, entries, read_published())

    def runs(self, group: str) -> dict[int, Mapping[str, Any]]:
        """Return the results of a group by seed, without those of other settings than the queue's, or of no entry."""
        if group not in self._found:
            runs = [run for run in self.planned.get(group, []) if self.results.state(run, self.entries) == "done"]
            self._found[group] = {run.seed: self.results.runs[run.name] for run in runs}
        return self._found[group]

    def values(self, group: str, metric: str) -> dict[int, float]:
        """Return a metric of the runs of a group by seed."""
        found = {seed: describe(run).get(metric) for seed, run in self.runs(group).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def test(self, group: str) -> Test:
        """Return the planned test of the comparison of a group with others."""
        return self.planned[group][0].entry.test if group in self.planned else "welch"

    def diverged(self, *groups: str) -> list[str]:
        """Return the names of the runs that diverged, which have no metrics."""
        return sorted(run["name"] for group in groups for run in self.runs(group).values() if run.get("diverged"))

    def published_of(self, group: str, further: str = "") -> Mapping[str, Any] | None:
        """Return the published record of a group's configuration, if it has one and the group does not change it.

        Args:
            group: The group.
            further: End of the record's id, after that of the run.
        """
        config = self.config(group)
        unchanged = config is not None and config.rpartition("/")[2] == group
        name = group if unchanged else None
        # Numbers that are only in the picture of a table have ids of their own.
        ids = [f"{name}/{further}" if further else f"{name}", f"{name}/picture"]
        return next((self.published[key] for key in ids[: 1 if further else 2] if key in self.published), None)

    def seeds(self, *groups: str) -> set[int]:
        """Return the seeds that all groups have, or will have by the queue."""
        every = [{run.seed for run in self.planned.get(group, [])} | self.runs(group).keys() for group in groups]
        return set.intersection(*every)

    def config(self, group: str) -> str | None:
        """Return the configuration of a group, if there is one."""
        if group in self.planned:
            return self.planned[group][0].config
        return next((name for name in config_names() if name.endswith(f"/{group}")), None)

    def dataset(self, group: str) -> str:
        """Return the dataset of a planned group."""
        run = self.planned[group][0]
        return str((read_settings(run.config) | run.overrides()).get("dataset_name", "digits"))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read the instances of a dataclass from a YAML list of mappings.

    Raises:
        ValueError: If a key is unknown or missing.
    """
    rows = read_yaml(path, AliasLoader)
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}  # type: ignore[arg-type]
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if not isinstance(rows, list) or not isinstance(row, Mapping):
            raise ValueError(f"{path} must be a list of mappings; got {row!r}.")
        wrong = [f"unknown key {name!r}" for name in row if name not in known]
        wrong += [f"no {name!r}" for name, is_required in known.items() if is_required and name not in row]
        if wrong:
            raise ValueError(f"{path}, row {number + 1}: {', '.join(wrong)}; the keys are {', '.join(known)}.")
    return [kind(**row) for row in rows]


def render(table: Table, source: Source, *, only_measured: bool = False) -> str:
    """Return a table in Markdown, with its notes; rows without a result are folded, or left out."""
    if table.columns:
        return _render_matrix(table, source)
    if table.by_metric:
        return _render_metrics(table, source)
    rows = [_Row(*split_row(row), table, source) for row in table.rows]
    done = [row for row in rows if source.runs(row.group)] or rows
    left = [row for row in rows if row not in done]
    is_planned = table.metrics and not any(source.runs(row.group) or row.published for row in rows)
    parts = [] if is_planned else [_join_rows(done, table, source)]
    if left and only_measured:
        parts.append(f"*No results yet of {len(left)} of {len(rows)} runs of this table.*")
    elif left:
        parts.append(fold(f"{count_runs(left)} of this table without a result", _join_rows(left, table, source)))
    return "\n\n".join([*parts, *filter(None, [join_notes(_notes(table, rows, source))])])


def _join_rows(rows: "list[_Row]", table: Table, source: Source) -> str:
    """Return rows; the column of the metric that is compared is followed by those of the comparisons."""
    columns = {"run": [f"`{row.group}`" for row in rows]}
    if table.metrics and any(row.published for row in rows):
        columns["published"] = [show_published(row.published) if row.published else "" for row in rows]
    metrics = [(title, [row.measured(metric) for row in rows]) for title, metric in table.metrics.items()]
    columns |= metrics[:1]
    if any(row.published for row in rows):
        columns["measured minus published"] = [row.from_published() for row in rows]
    if baselines := {row.baseline for row in rows if row.baseline}:
        pairs = {(found.run, found.reference): found for found in compare_rows(table, source)}
        compared = [pairs.get((row.group, row.baseline or "")) for row in rows]
        title = f"minus `{baselines.pop()}`" if len(baselines) == 1 else "minus another run"
        shown = zip(rows, compared, strict=True)
        columns[title] = [_show_difference(row, found, not baselines) for row, found in shown]
        columns[P_VALUE] = [found.show_p_values() if found else "" for found in compared]
        columns["verdict"] = [found.show_verdict() if found else "" for found in compared]
    columns |= metrics[1:]
    for title, further in table.published.items():
        records = [source.published_of(row.group, further) for row in rows]
        columns[title] = [f"{record['value']:g}" if record else "" for record in records]
    columns["seeds"] = [str(row.count) if row.count else "" for row in rows]
    used = {name: cells for name, cells in columns.items() if name == "run" or {*cells} - {"", "not run"}}
    return join_lines(list(used), zip(*used.values(), strict=True), [])


def compare_rows(table: Table, source: Source, *, post_hoc: bool = False) -> list[Comparison]:
    """Compare the first metric, or that of `post_hoc`, of the rows that have a baseline, if both were run."""
    metric = "" if table.by_metric else next(iter((table.post_hoc if post_hoc else table.metrics).values()), "")
    pairs = [(group, baseline, metric) for group, baseline in map(split_row, table.rows) if baseline and metric]
    return compare_pairs(f"{table.table}, post hoc" if post_hoc else table.table, pairs, source)


def compare_pairs(table: str, pairs: Iterable[tuple[str, str, str]], source: Source) -> list[Comparison]:
    """Compare groups of runs.

    Args:
        table: Name of the table, whose tests are corrected together.
        pairs: Group, group or number that it is compared with, and metric.
        source: Where the values are from.

    Returns:
        The comparisons of the pairs that both have results.
    """
    found, tests = [], 0
    for run, reference, metric in pairs:
        number, test = as_number(reference), source.test(run)
        groups = [run, reference] if number is None else [run]
        seeds = {group: source.seeds(*groups) if test == "paired" else source.seeds(group) for group in groups}
        tests += min(map(len, seeds.values())) > 1
        values, others = source.values(run, metric), source.values(reference, metric) if number is None else number
        if values and others != {}:
            is_complete = all(seeds[group] <= source.runs(group).keys() for group in groups)
            found.append(compare(table, metric, run, values, reference, others, test=test, is_complete=is_complete))
    correct(found, tests)
    return found


def _show_difference(row: "_Row", comparison: Comparison | None, is_named: bool) -> str:
    """Return a difference, with the name of the baseline unless the title of the column has it."""
    shown = comparison.show() if comparison is not None else "not run" if row.baseline and row.values else ""
    return f"`{row.baseline}`: {shown}" if shown and not is_named else shown


def _render_metrics(table: Table, source: Source) -> str:
    """Return a table of the differences of one comparison by metric, with p-values of each alone."""
    row = _Row(*split_row(table.rows[0]), table, source)
    lines = []
    for title, metric in table.metrics.items():
        for found in compare_pairs(table.table, [(row.group, row.baseline or "", metric)], source):
            lines.append([title, found.show(), found.show_p_values()])
    header = ["metric", f"`{row.group}` minus `{row.baseline}`", "p, not corrected: planned test (other test)"]
    return join_lines(header, lines, _notes(table, [row], source))


def _render_matrix(table: Table, source: Source) -> str:
    """Return a table of published and measured values by row and column."""
    grid = {name: [_Row(f"{column}-{name}", None, table, source) for column in table.columns] for name in table.rows}
    rows = [row for line in grid.values() for row in line if row.published or row.group in source.planned]
    measured = [row for row in rows if row.values]
    lines = [[f"`{name}`", *(_show_cell(row, bool(measured)) if row in rows else "" for row in line)]
             for name, line in grid.items()]  # fmt: skip
    if any(row.published for row in rows):
        order = ["Each cell: published; measured." if measured else "Published values; none of these runs was made."]
    else:
        order = []
    notes = [*order, *_notes(table, rows, source)]
    names = zip(*(column.split("-") for column in table.columns), strict=False)
    alike = takewhile(lambda parts: len(set(parts)) == 1, names)
    shared = "-".join(parts[0] for parts in alike)
    titles = [column.removeprefix(shared).lstrip("-") for column in table.columns]
    metric = next(iter(table.metrics), "")
    header = [f"`{shared}`" if shared else "", *(f"`{t}`" if t else metric for t in titles)]
    if len(measured) <= LARGEST_GRID:
        return join_lines(header, lines, notes)
    choose = max if is_higher_better(next(iter(table.metrics.values()))) else min
    best = choose(measured, key=lambda row: statistics.mean(row.values.values()))
    shown = f"The best of {len(measured)} settings by {metric}: `{best.group}`, {best.measured(best.first)}."
    return f"{shown}\n\n{fold(f'All {len(measured)} settings', join_lines(header, lines, notes))}"


def _show_cell(row: "_Row", with_measured: bool) -> str:
    cells = [show_published(row.published)] if row.published else []
    return "; ".join([*cells, *([row.measured(row.first)] if with_measured or not cells else [])])


def join_lines(header: list[str], lines: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    """Return a table in Markdown, with its notes."""
    rows = [header, ["---"] * len(header), *lines]
    below = join_notes(notes)
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *(["", below] if below else [])])


def join_notes(notes: Iterable[str]) -> str:
    """Return the notes of a table as a paragraph, or folded as a list if they are long."""
    notes = list(notes)
    if sum(len(note.split()) for note in notes) <= LONGEST_NOTE:
        return " ".join(notes)
    has_exceptions = any(note.startswith(EXCEPTIONS) for note in notes)
    summary = "How measured, and exceptions to the rule of comparisons" if has_exceptions else "How measured"
    return fold(summary, "\n".join(f"- {note}" for note in notes))


def fold(summary: str, text: str) -> str:
    """Return a text that a page shows on a click, in HTML that GitHub and MkDocs understand."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


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
            runs = self.source.runs(self.group).values()
            have_diverged = bool(runs) and all(run.get("diverged") for run in runs)
            return "" if self.count else "diverged" if have_diverged else "not run"
        return show_mean(metric, values) + (
            f" ({len(values)} of {self.count} seeds)" if len(values) < self.count else ""
        )

    def from_published(self) -> str:
        if not self.published or not self.values:
            return ""
        return show_from_published(self.first, self.values, self.published["value"])


def show_from_published(metric: str, values: Mapping[int, float], published: float) -> str:
    """Format the difference of a measured mean from a published value, with the interval of the mean."""
    found = compare("", metric, "", values, "published", published / scale(metric))
    return found.show()


def show_post_hoc(found: Comparison) -> str:
    """Format a second analysis: the difference, p-values, and the verdict."""
    equivalence = show_p_value(found.equivalence_p_value)
    parts = [found.show(), f"p {found.show_p_values()}", f"p of equivalence {equivalence}", found.show_verdict()]
    return ", ".join(parts)


def split_row(row: str) -> tuple[str, str | None]:
    """Split `a - b` into a and b, which is None if there is none."""
    group, _, baseline = row.partition(" - ")
    return group.strip(), baseline.strip() or None


def show_mean(metric: str, values: Sequence[float]) -> str:
    """Format mean and standard deviation of a metric."""
    shown = [scale(metric) * value for value in values]
    mean = statistics.mean(shown)
    # Two digits after the point for shares, else four significant ones of the mean.
    digits = 2 if is_share(metric) or not mean else max(0, 3 - math.floor(math.log10(abs(mean))))
    if len(shown) == 1:
        return f"{mean:.2f}" if is_share(metric) else f"{mean:.4g}"
    return f"{mean:.{digits}f} ± {statistics.stdev(shown):.{digits}f}"


def _notes(table: Table, rows: list[_Row], source: Source) -> Iterator[str]:
    runs = [run for group in dict.fromkeys(row.group for row in rows) for run in source.runs(group).values()]
    if runs:
        if any(row.count > 1 for row in rows):
            yield "Measured values are means and standard deviations over seeds."
        if any(row.baseline for row in rows):
            yield "Differences between runs have their 95 % intervals in parentheses."
        if any(row.published for row in rows) and not table.columns:
            yield "The interval of a difference from a published number is that of the measured mean."
        yield _show_machines(runs)
    if any(run["data"] == {"name": "uoft-cs/cifar10", "encoding": "JPEG"} for run in runs):
        yield f"CIFAR-10† ({MARKS})."
    if diverged := source.diverged(*(row.group for row in rows)):
        yield f"Diverged, and in no mean or comparison: {', '.join(diverged)}."
    for found in compare_rows(table, source, post_hoc=True):
        runs = f"`{found.run}`, minus `{found.reference}`"
        yield f"Post hoc, {next(iter(table.post_hoc))}: {runs}: {show_post_hoc(found)}."
    if unlike := [row.group for row in rows if row.baseline and not _are_alike(row.group, row.baseline, source)]:
        named = ", ".join(f"`{group}`" for group in unlike)
        yield f"Compared with runs of other processors, torch versions or copies of the data: {named}."
    groups = list(dict.fromkeys(row.group for row in rows)) if table.metrics else []
    queued = [run for g in groups for run in source.planned.get(g, []) if run.seed not in source.runs(g)]
    for device, machine in {"cpu": "CPU core", "gpu": "GPU"}.items():
        if left := [run.entry for run in queued if run.entry.device == device]:
            time = show_hours(sum(entry.minutes for entry in left))
            command = f"python benchmarks/reproduce.py --only {' '.join(sorted({entry.entry for entry in left}))}"
            yield f"Not run yet: {count_runs(left)}, {time} on one {machine}: `{command}`."
    missing = [group for group in groups if group not in source.planned and not source.runs(group)]
    stems = {config.partition("/")[0] for group in missing if (config := source.config(group))}
    for stem in sorted(stems):
        command = f"{command_of(SCRIPTS[table.task])} --config {stem}/<run>"
        yield f"Runs that are not in the queue: `{command}`."
    if reasons := exceptions(rows, source):
        named = "; ".join(f"`{entry}`: {reason}" for entry, reason in reasons)
        yield f"{EXCEPTIONS}: {named}."
    if table.differs:
        yield f"Besides selected settings, compared runs differ in {', '.join(f'`{name}`' for name in table.differs)}."
    if table.note:
        yield table.note


def exceptions(rows: list[_Row], source: Source) -> list[tuple[str, str]]:
    """Return the names and reasons of the exceptions of the entries that a table compares, and of their tunings."""
    groups = [name for row in rows for name in (row.group, row.baseline) if name in source.planned]
    names = {source.planned[group][0].entry.entry: None for group in groups}
    tunings = {entry.tuned_by for entry in source.entries if entry.entry in names}
    found = [entry for entry in source.entries if entry.entry in names or entry.entry in tunings]
    return [(entry.entry, reason) for entry in found for reason in entry.exceptions.values()]


def _are_alike(group: str, other: str, source: Source) -> bool:
    """Return whether the runs of two groups with the same seed were made under the same conditions."""
    first, second = source.runs(group), source.runs(other)
    pairs = ((first[seed], second[seed]) for seed in first.keys() & second.keys())
    return all(
        a["versions"]["torch"] == b["versions"]["torch"]
        and all(a[name] == b[name] for name in ("device", "data"))
        and all(a[name] == b[name] for name in ("data_hash", "processor", "threads") if name in a and name in b)
        for a, b in pairs
    )


def show_seeds(seeds: Sequence[int]) -> str:
    """Format seeds: `seed 3`, `seeds 0 to 9`, `seeds 0, 2, 3`."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def count_runs(runs: Sequence[Any]) -> str:
    """Return a number of runs in words."""
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def show_hours(minutes: float) -> str:
    """Return an estimated time in hours."""
    return f"about {minutes / 60:.{0 if minutes >= 597 else 1}f} h"


def mean_minutes(runs: Sequence[Mapping[str, Any]], name: str = "core_minutes") -> float:
    """Return the mean time of runs, without those of which only the last part was timed, unless there are no others."""
    whole = [run for run in runs if not run.get("time_is_incomplete")] or runs
    return statistics.mean(run.get(name, run["core_minutes"]) for run in whole)


def _show_machines(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the machines, times and versions behind a table; times of CPUs and GPUs are not comparable."""
    devices = sorted({run["device"] for run in runs})
    versions = sorted({run["versions"]["torch"] for run in runs})
    on_cpu, on_gpu = ([run for run in runs if is_on_cpu(run) == expected] for expected in (True, False))
    times = [f"{mean_minutes(on_cpu):.3g} core-minutes"] if on_cpu else []
    times += [f"{mean_minutes(on_gpu, 'minutes'):.3g} minutes on a GPU"] if on_gpu else []
    shown = f"{count_runs(runs)} on {', '.join(devices)}, {' or '.join(times)} each on average, torch"
    changed = sum(run["commit"].endswith("-modified") for run in runs)
    partial = [run for run in runs if run.get("time_is_incomplete")]
    notes = f"; {changed} of them with uncommitted changes" if changed else ""
    notes += f"; {count_runs(partial)} timed only in part, which the average leaves out" if partial else ""
    return f"{shown} {', '.join(versions)}{notes}."
