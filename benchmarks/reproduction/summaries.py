"""Summaries: the measurements of `results/measured.yaml`, missed goals, and the runs that need a GPU."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.definitions import is_higher_better, is_share, scale
from reproduction.entries import ROOT, PlannedRun
from reproduction.tables import MARKS, Source, Table, compare_rows, join_lines, mean_minutes, show_hours, show_seeds

BENCHMARKS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Measurement:
    """A row of the table of measurements; the value of a group of runs, or of a benchmark.

    Attributes:
        what: What was measured, in words.
        run: Group of runs, as in `results/tables.yaml`.
        metric: Its metric.
        table: Table that compares it, if its verdict is to be shown.
        than: What it is compared with there, in words.
        benchmark: Name of a file of `benchmarks/results`, without suffix.
        row: A row of it, by its `what`.
        form: Format of the benchmark's value and bound.
        script: Script that writes the file, if its name is another.
        unit: Unit, unless the value has it.
        better: `higher` or `lower`, for a benchmark without a goal.
        front: Sentence of the front page, if it has one, with the placeholders `value`, `before` (the value of the
            previous row), `verdict`, `seeds` and `file`.
    """

    what: str
    run: str = ""
    metric: str = "eval_accuracy"
    table: str = ""
    than: str = ""
    benchmark: str = ""
    row: str = ""
    form: str = "{:.2f}"
    script: str = ""
    unit: str = ""
    better: str = "lower"
    front: str = ""


@dataclass
class Benchmarks:
    """The files of `benchmarks/results`.

    Attributes:
        folder: The folder.
        problems: Messages about files that are damaged.
    """

    folder: Path = BENCHMARKS
    problems: list[str] = field(default_factory=list)

    def row(self, name: str, what: str) -> dict[str, Any] | None:
        """Return a row of a benchmark with its device, or None if the file is missing, damaged or without it."""
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            (found,) = [row for row in content["rows"] if row["what"] == what]
            return {"device": content["device"], **found, "value": float(found["value"])}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{path.name} is not used for {what!r}: {type(error).__name__}: {error}"
            self.problems.extend([problem] if problem not in self.problems else [])
            return None

    def goals(self) -> list[dict[str, Any]]:
        """Return the rows of all files that have a goal, with their `file` and `device`."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in content.get("rows", ()) if "holds" in row]
            found += [{"file": path.name, "device": content["device"], **row} for row in rows]
        return found


def render_measured(
    rows: Sequence[Measurement], source: Source, benchmarks: Benchmarks, tables: Sequence[Table] = ()
) -> str:
    """Return the table in Markdown, for pages in the root of the repository; `tables` has those that rows name."""
    lines = []
    for row, (what, value, compared, seeds, file) in zip(
        rows, _measured_lines(rows, source, benchmarks, tables), strict=True
    ):
        number, _, unit = value.partition(" ") if value[:1].isdigit() else (value, "", "")
        is_higher = is_higher_better(row.metric) if row.run else "at least" in compared or row.better == "higher"
        lines.append([what, number, row.unit or unit, "higher" if is_higher else "lower", compared, seeds, file])
    note = (
        "Intervals and verdicts are over seeds. Times are relative to those of the other program on the same CPU; on "
        "an H200 [those of optimizers are longer](docs/results/optimizers.md#what-it-costs), ArcFace is slower than "
        "the other library, and the other rows are not measured. "
        f"The goals are ours; all that were missed [are listed](docs/results/appendix/missed.md). {MARKS}."
    )
    return join_lines(["measured", "value", "unit", "better", "compared", "seeds", "file"], lines, [note])


def render_front(
    rows: Sequence[Measurement], source: Source, benchmarks: Benchmarks, tables: Sequence[Table] = ()
) -> str:
    """Return the list of the measurements of the front page; the arguments are those of `render_measured`."""
    lines = _measured_lines(rows, source, benchmarks, tables)
    named = ("what", "value", "verdict", "seeds", "file")
    return "\n".join(
        f"- {row.front.format_map({**dict(zip(named, line, strict=True)), 'before': before[1]})}"
        for row, line, before in zip(rows, lines, [lines[-1], *lines[:-1]], strict=True)
        if row.front
    )


def _measured_lines(
    rows: Sequence[Measurement], source: Source, benchmarks: Benchmarks, tables: Sequence[Table]
) -> list[list[str]]:
    verdicts = {
        (table.table, found.run): found
        for table in tables
        if table.table in {row.table for row in rows}
        for found in compare_rows(table, source)
    }
    lines = []
    for row in rows:
        if bool(row.run) == bool(row.benchmark):
            raise ValueError(f"measurement {row.what!r} needs either `run` or `benchmark`.")
        cells = _of_runs(row, source) if row.run else _of_benchmark(row, benchmarks)
        found = verdicts.get((row.table, row.run))
        if found is not None and found.verdict not in ("", "incomplete"):
            cells[1] = f"{row.than}: {found.show()}, {found.show_verdict()}"
        lines.append([row.what, *cells])
    return lines


def render_gpu(source: Source) -> str:
    """Return the table of the queue's entries that need a GPU."""
    lines = []
    for entry in (entry for entry in source.entries if entry.device == "gpu"):
        for group in dict.fromkeys(run.group for run in _planned(source, entry.entry)):
            values, runs = source.values(group, "eval_accuracy"), source.runs(group).values()
            shown = f"{scale('eval_accuracy') * statistics.mean(values.values()):.2f}" if values else "not run"
            devices = ", ".join(sorted({run["device"] for run in runs}))
            minutes = f"{mean_minutes([*runs], 'minutes'):.3g}" if runs else ""
            left = len(source.planned[group]) - len(runs)
            parts = [show_seeds(sorted(values))] if values else []
            parts += [f"diverged: {', '.join(found)}"] if (found := source.diverged(group)) else []
            parts += [f"{left} missing, {show_hours(left * entry.minutes)}"] if left else []
            lines.append([f"`{group}`", f"`{entry.entry}`", shown, devices, minutes, "; ".join(parts)])
    header = ["run", "entry of the queue", "test accuracy %", "device", "minutes per run", "seeds"]
    note = (
        "The runs without a device take longer than a GPU was available. `python benchmarks/reproduce.py --only "
        "<entry>` makes the runs of an entry, on a GPU if there is one. `python benchmarks/on_gpu.py --minutes 14` runs"
        " the tests of devices there, compares speed with other programs, and continues these runs."
    )
    return join_lines(header, lines, [_throughput(), note])


def render_missed(benchmarks: Benchmarks) -> str:
    """Return the table of the benchmarks' goals that were missed."""
    goals = benchmarks.goals()
    missed = [row for row in goals if not row["holds"]]
    lines = []
    for row in missed:
        case, _, measured = row["what"].rpartition(": ")
        device, name = row["device"].replace(" 1 threads", " 1 thread"), Path(row["file"]).stem
        lines.append([f"`{name}`", case, measured, f"{row['value']:.4g}", row["bound"], device])
    note = (
        f"{len(missed)} of the {len(goals)} goals of the benchmarks are missed. The goals are ours; verdicts on "
        "methods stand on the pages of the papers. The files are in `benchmarks/results`."
    )
    return f"{note}\n\n{join_lines(['file', 'case', 'measured', 'value', 'goal', 'machine'], lines, [])}"


def _throughput() -> str:
    path = BENCHMARKS / "on_gpu.json"
    is_measured = path.is_file() and '"part": "throughput"' in path.read_text(encoding="utf-8")
    link = f"[{path.name}](benchmarks/results/{path.name})"
    return f"Throughput on a GPU: {link if is_measured else 'not measured'}."


def _planned(source: Source, entry: str) -> list[PlannedRun]:
    return [run for runs in source.planned.values() for run in runs if run.entry.entry == entry]


def _of_runs(row: Measurement, source: Source) -> list[str]:
    values = source.values(row.run, row.metric)
    if not values:
        return ["not run", "", "", ""]
    factor, unit = scale(row.metric), " %" if is_share(row.metric) else ""
    shown = [factor * value for value in values.values()]
    spread = f"± {statistics.stdev(shown):.2f}" if len(shown) > 1 else "one run"
    link = _link(f"results/runs/{source.runs(row.run)[min(values)]['name']}.json")
    return [f"{statistics.mean(shown):.2f}{unit}", spread, str(len(values)), link]


def _of_benchmark(row: Measurement, benchmarks: Benchmarks) -> list[str]:
    found = benchmarks.row(row.benchmark, row.row)
    if found is None:
        return [f"not measured: `python benchmarks/{row.script or row.benchmark}.py`", "", "", ""]
    bound = found.get("bound", "")
    if "%" in row.form:  # also of the bound, whose words stay
        bound = re.sub(r"\S+$", lambda number: _as_form(row, float(number[0])), bound)
    goal = f"goal: {bound}{'' if found['holds'] else ', missed'}" if bound else ""
    return [_as_form(row, found["value"]), goal, "", _link(f"benchmarks/results/{row.benchmark}.json")]


def _as_form(row: Measurement, value: float) -> str:
    return re.sub(r"(?<=\d)%", " %", row.form.format(value))


def _link(path: str) -> str:
    return f"[{Path(path).name}]({path})"
