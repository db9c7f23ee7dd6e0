"""The rule of a comparison (`docs/compare.md`), checked for tables, claims and the queue; and those of pages."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_sphere.training.tasks import find_task
from reproduction.claims import PAPERS, Claim
from reproduction.entries import ROOT, WITHOUT_EFFECT, Entry, PlannedRun, plan, read_settings
from reproduction.tables import Source, Table, split_row

RULES = {
    "settings": "the settings of both runs are selected from equally many",
    "grid": "the selected value is inside its grid",
    "selection": "settings are selected on validation images",
    "metric": "the metric of runs without validation images is the mean of the last epochs",
    "test": "the tests of a table are planned together",
    "seeds": "a run has at least two planned seeds",
    "options": "the table names the options in which its runs differ",
}
"""The rules by name, which an entry of the queue can have as a key of `exceptions`."""


MOST_WORDS, MOST_WORDS_OF_ALL, MOST_COLUMNS = 1200, 13900, 8
"""Largest number of words of a page of results, of all of them and `RESULTS.md`, and of columns of their tables."""
VERDICT = re.compile(
    r"|-|better|worse|higher|lower|not run|not tested|incomplete"
    r"|equivalent( \(within [\d.]+\))?|not decided( \([^)]* seeds would decide [^)]*\))?"
)
"""A cell of a column of verdicts."""
ANSWER = re.compile(r"\b(helps?|does not help|do not help|hurts?|not decided)\b", re.IGNORECASE)
"""What the first paragraph of the page of a paper says."""


@dataclass(frozen=True)
class Violation:
    """A rule that an entry of the queue breaks.

    Attributes:
        rule: Name of the rule.
        entry: Name of the entry.
        text: What is wrong, and what to do.
    """

    rule: str
    entry: str
    text: str


def check_rules(tables: Sequence[Table], claims: Sequence[Claim], source: Source) -> tuple[list[str], list[str]]:
    """Return messages about broken rules, and about those whose entry states a reason."""
    reasons = {(entry.entry, rule): reason for entry in source.entries for rule, reason in entry.exceptions.items()}
    broken = dict.fromkeys(find_violations(tables, claims, source))
    keys = {(found.entry, found.rule) for found in broken}
    problems = [
        f"entry {found.entry!r}: {found.text} Or state why not in its key exceptions, as {found.rule}."
        for found in broken
        if (found.entry, found.rule) not in reasons
    ]
    for entry, rule in reasons:
        if rule not in RULES:
            problems.append(f"entry {entry!r}: there is no rule {rule!r}; they are {', '.join(RULES)}.")
        elif (entry, rule) not in keys and rule != "grid":  # whose runs may not be finished
            problems.append(f"entry {entry!r}: the exception {rule!r} is not needed; remove it.")
    return problems, [f"{entry}: {rule}: {reason}" for (entry, rule), reason in reasons.items()]


def check_pages(files: Mapping[Path, str]) -> list[str]:
    """Return messages about the pages of results, without the appendix, that are long, wide or say no plain verdict."""
    folder, problems, total = ROOT / "docs" / "results", [], 0
    for path, text in files.items():
        if path.parent != folder and path != ROOT / "RESULTS.md":
            continue
        total += (words := len(text.split()))
        if words > MOST_WORDS and path.parent == folder:
            problems.append(f"{path.name} has {words} words, more than {MOST_WORDS}; move some to the appendix.")
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        if (widest := max(map(len, rows), default=0)) > MOST_COLUMNS:
            problems.append(f"{path.name} has a table of {widest} columns, more than {MOST_COLUMNS}.")
        paragraph = next(part for part in text.split("\n\n") if not part.startswith(("#", "---")))
        if path.stem.replace("-", "_") in PAPERS and not (ANSWER.search(paragraph) and paragraph.count("\n") < 5):
            problems.append(f"{path.name} must say in its first five lines whether the method helps.")
    if total > MOST_WORDS_OF_ALL:
        problems.append(f"the pages of results have {total} words, more than {MOST_WORDS_OF_ALL}.")
    measured = [path for path in files if {"results", "methods"} & {*path.parts} or path.name == "RESULTS.md"]
    return problems + [f"{path.name}: {text}" for path in measured for text in wrong_verdicts(files[path])]


def wrong_verdicts(page: str) -> list[str]:
    """Return the verdicts of tables, and the phrase in the text, that are not those of the rules."""
    found, place = [f"write 'not decided' instead of {p!r}." for p in ("no significant difference",) if p in page], None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            place = None
        elif "verdict" in cells:
            place = cells.index("verdict")
        elif place is not None and set(cells[place]) != {"-"} and not VERDICT.fullmatch(cells[place].rstrip("‡")):
            found.append(f"{cells[place]!r} is no verdict.")
    return found


def find_violations(tables: Sequence[Table], claims: Sequence[Claim], source: Source) -> Iterator[Violation]:
    """Return all broken rules."""
    for table in tables:
        pairs = [split_row(row) for row in table.rows]
        runs = [_pair(source, run, reference) for run, reference in pairs if reference]
        ours = [pair[0] for pair in runs if pair]
        for run, reference in filter(None, runs):
            yield from _check_pair(run, reference, source)
            yield from _options(run, reference, table, source)
            yield from _metric(run, next(iter(table.metrics.values()), ""), table.table)
            if (test := run.entry.test) != ours[0].entry.test:
                yield Violation("test", run.entry.entry, f"test {test} in the table {table.table!r} of another test.")
    for claim in claims:
        if claim.compare and (pair := _pair(source, *claim.groups)):
            yield from _check_pair(*pair, source)
    for entry in source.entries:
        yield from _grid(entry, source)


def _pair(source: Source, run: str, reference: str) -> tuple[PlannedRun, PlannedRun] | None:
    """Return the first runs of two groups, if both are planned."""
    found = [source.planned[group][0] for group in (run, reference) if group in source.planned]
    return (found[0], found[1]) if len(found) == 2 else None


def _check_pair(run: PlannedRun, reference: PlannedRun, source: Source) -> Iterator[Violation]:
    counts = [_count_settings(side, source) for side in (run, reference)]
    if counts[0] != counts[1]:
        text = f"{counts[0]} settings against {counts[1]} of {reference.group}; tune both with equally many."
        yield Violation("settings", run.entry.entry, text)
    for side in (run, reference):
        if side.entry.seeds < 2:
            yield Violation("seeds", side.entry.entry, f"{side.group} has one seed, a test needs two; state seeds.")


def _count_settings(run: PlannedRun, source: Source) -> int:
    tuning = _tuning(run.entry, source)
    return math.prod(len(values) for name, values in tuning.grid.items() if name not in run.grid) if tuning else 1


def _tuning(entry: Entry, source: Source) -> Entry | None:
    return next((other for other in source.entries if other.entry == entry.tuned_by), None)


def _options(run: PlannedRun, reference: PlannedRun, table: Table, source: Source) -> Iterator[Violation]:
    defaults = {item.name: item.default for kind in find_task(run.entry.task).arguments for item in fields(kind)}
    ours, theirs = (defaults | dict(_flat(side)) for side in (run, reference))
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    tunings = [tuning.grid for side in (run, reference) if (tuning := _tuning(side.entry, source))]
    named = {*table.differs, *run.grid, *reference.grid, *itertools.chain(*tunings)}
    unnamed = [name for name in differ if name not in named and name.partition(".")[0] not in named]
    if unnamed:
        text = f"{run.group} differs from {reference.group} in {', '.join(unnamed)}; name them in the key differs of "
        yield Violation("options", run.entry.entry, f"{text}the table {table.table!r}.")


def _flat(run: PlannedRun) -> Iterator[tuple[str, Any]]:
    """Return the explicit settings with an effect; options of mappings are named `a.b`."""
    for name, value in (read_settings(run.config) | run.overrides()).items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{option}", content) for option, content in value.items())
        elif name not in WITHOUT_EFFECT:
            yield name, value


def _metric(run: PlannedRun, metric: str, table: str) -> Iterator[Violation]:
    settings = read_settings(run.config) | run.overrides()
    is_validated = run.entry.task == "few_shot" or settings.get("validation_fraction")
    if run.entry.test == "welch" and metric == "eval_accuracy" and not is_validated:
        text = f"the first metric of the table {table!r} must be eval_accuracy_last_quarter, without validation images."
        yield Violation("metric", run.entry.entry, text)


def _grid(entry: Entry, source: Source) -> Iterator[Violation]:
    """Check the selection of an entry, and where the selected values are in the grid, if its runs are finished."""
    tuning = _tuning(entry, source)
    if tuning is None:
        return
    if not entry.selection_metric.startswith("validation_"):
        text = f"selection_metric {entry.selection_metric} is not measured on validation images; use validation_*."
        yield Violation("selection", entry.entry, text)
    for run in plan(replace(entry, seeds=1)):
        for name, value in (source.results.tuned(run, source.entries) or {}).items():
            if (wanted := value_beyond(tuning.grid[name], value)) is not None:
                text = f"{name} {value:g} of {run.config} is the end of its grid; add {wanted:g}."
                yield Violation("grid", tuning.entry, text)


def value_beyond(grid: Sequence[Any], value: Any) -> float | None:
    """Return the value to add to a grid if the selected one is at its end; None if it is inside or has no order.

    The grid continues with its ratio, or, if that is small, with its step, or towards 1 for values below 1. It ends
    at 0.
    """
    values = sorted(float(number) for number in grid if type(number) in (int, float))
    if len(values) < max(2, len(grid)) or value in (0, *values[1:-1]):
        return None
    near = values[-2] if value == values[-1] else values[1]
    ratio = value / near if near else 0.0
    if ratio and max(ratio, 1 / ratio) >= 1.4:
        return float(f"{value * ratio:.3g}")
    if value > near and value < 1 < 2 * value - near:
        return float(f"{1 - (1 - value) ** 2 / (1 - near):.3g}")
    return float(f"{2 * value - near:.3g}")
