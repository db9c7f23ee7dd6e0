"""The tables of the pages of results, from `results/claims.yaml`: claims of the papers beside what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hf_sphere.comparison.runs import show_p_value
from reproduction.comparisons import Comparison, as_number
from reproduction.results import is_on_cpu
from reproduction.summaries import Benchmarks
from reproduction.tables import (
    MARKS,
    Source,
    Table,
    compare_pairs,
    compare_rows,
    count_runs,
    fold,
    join_lines,
    mean_minutes,
    show_hours,
    show_post_hoc,
    show_seeds,
    split_row,
)


@dataclass(frozen=True)
class Claim:
    """A row of the table of a page.

    Attributes:
        paper: The paper or page, a key of `PAPERS`.
        claim: The claim, in words.
        compare: `a - b`: the run a is compared with the run b, or with a number; groups, as in `results/tables.yaml`.
            Empty if the results files do not have what would be compared.
        metric: Metric of the comparison.
        published: Ids of the two published records. If there are none, those of `a - b` are used, if they exist.
        takes: What the missing measurement needs, if it is not in the queue: machine, hours and data.
        note: What differs from the paper, or how settings were selected; in the appendix.
        setting: Where it is tested, in few words, for the table of the page; empty for claims that are not measured.
        is_equivalence: Whether the claim is that there is no difference.
        minimum: The minimum effect, for metrics without an error rate.
        step_time: Name of a benchmark and of its row with the time of a training step relative to that of b. By
            default, the times of the runs are compared.
    """

    paper: str
    claim: str
    compare: str = ""
    metric: str = "eval_accuracy"
    published: list[str] = field(default_factory=list)
    takes: str = ""
    note: str = ""
    setting: str = ""
    is_equivalence: bool = False
    minimum: float | None = None
    step_time: dict[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[str, ...]:
        """The two sides of the comparison, if there is one."""
        run, reference = split_row(self.compare)
        if self.compare and reference is None:
            raise ValueError(f"claim {self.claim!r}: `compare` must be `a - b`; got {self.compare!r}.")
        return (run, reference) if reference else ()


PAPERS = {
    "spherization": "Spherization layer",
    "prototypes": "Hyperspherical prototypes",
    "optimizers": "Optimizers on the sphere",
    "von_mises_fisher": "von Mises-Fisher embeddings",
    "hyperplanes": "Hyperplane arrangements",
    "heads": "Heads on the fast network",
}
"""Short titles of the pages with a table of claims, in their order."""

COLUMNS = ["setting", "published difference", "measured: with / without", "seeds", "difference (95 %)", "verdict"]
COLUMNS += ["step time", "core-hours"]
"""Columns of the table of a page."""


@dataclass(frozen=True)
class ClaimRow:
    """A claim beside what was measured; the fields are cells of the tables, and what the appendix says of it."""

    claim: Claim
    published: str
    values: str
    seeds: str
    measured: str
    p_values: str
    verdict: str
    time: str
    hours: str
    post_hoc: str
    runs: str


def render_page(rows: Sequence[ClaimRow], paper: str) -> str:
    """Return the table of a page in Markdown: its claims that are measured."""
    lines = [
        [row.claim.setting, row.published, row.values, row.seeds, row.measured, row.verdict, row.time, row.hours]
        for row in rows
        if row.claim.paper == paper and row.measured and row.claim.setting
    ]
    columns = {title: [line[index] for line in lines] for index, title in enumerate(COLUMNS)}
    used = {title: cells for title, cells in columns.items() if any(cells)}
    unit = "Accuracies in %; differences in points"
    if paper == "hyperplanes":  # which has no run without the method
        used = {title.replace("with / without", "value / compared with"): cells for title, cells in used.items()}
        unit = "Shares from 0 to 1, and correlations"
    links = f"{MARKS}, [hours](rules.md#costs), [words](../concepts.md#words-of-the-results)"
    verdicts = "[Verdicts](rules.md#verdicts) are corrected for the number of tests, intervals are not"
    note = f"{unit}. {verdicts}; both are over seeds, with one test set. {links}."
    return join_lines(list(used), zip(*used.values(), strict=True), [note])


def render_overview(rows: Sequence[ClaimRow]) -> str:
    """Return the table of all claims that are measured, each comparison once, in few words."""
    measured: dict[tuple[str, ...], ClaimRow] = {}
    for row in rows:  # each at its first place, since a setting may refer to the row above it
        if row.measured:
            measured.setdefault((*row.claim.groups, row.claim.metric), row)
    lines = [
        [f"`{row.claim.paper}`", row.claim.setting, row.measured, row.verdict.partition(" (")[0], row.time]
        for row in measured.values()
        if row.claim.setting
    ]
    missing = sum(not row.measured for row in rows)
    left = f"{missing} further claims are not measured; the appendix of each page lists them."
    return join_lines(["page", "setting", "difference (95 %)", "verdict", "step time"], lines, [left])


def render_claims(rows: Sequence[ClaimRow], paper: str) -> str:
    """Return what the appendix says of the claims of a page: p-values and runs, and those that are not measured."""
    rows = [row for row in rows if row.claim.paper == paper]
    measured, others = [row for row in rows if row.measured], [row for row in rows if not row.measured]
    about = [(row.p_values and f"{row.p_values}.", row.claim.note, f"{row.runs}.", row.post_hoc) for row in measured]
    runs = [f"- {row.claim.claim} {' '.join(filter(None, parts))}" for row, parts in zip(measured, about, strict=True)]
    parts = [fold("p-values, runs and second analyses of each claim", "\n".join(runs))] if runs else []
    if others:
        takes = (" ".join(filter(None, [row.runs, row.claim.note])) for row in others)
        missing = [[row.claim.claim, row.published, runs] for row, runs in zip(others, takes, strict=True)]
        table = join_lines(["claim", "published difference", "what its runs would take"], missing, [])
        parts.append(fold(f"Claims that are not measured: {len(others)}", table))
    return "\n\n".join(parts)


def claim_rows(
    claims: Sequence[Claim], tables: Sequence[Table], source: Source, benchmarks: Benchmarks
) -> list[ClaimRow]:
    """Return the claims in the order of the pages, those with a measured difference first.

    Raises:
        ValueError: If a claim names a page, run or record that does not exist, or not what its runs take.
    """
    comparisons = {_key(row): row for row in compare_all(claims, tables, source)}
    second = {_key(row)[:2]: row for table in tables for row in compare_rows(table, source, post_hoc=True)}
    rows = []
    found_of = {claim.claim: comparisons.get((*claim.groups, claim.metric)) for claim in claims}
    for claim in sorted(claims, key=lambda claim: (_index(claim.paper), found_of[claim.claim] is None)):
        found, later = found_of[claim.claim], second.get(claim.groups)
        published, runs = show_published_difference(claim, source), show_runs(claim, source)
        if found is None:
            rows.append(ClaimRow(claim, published, "", "", "", "", _unfinished(claim, source), "", "", "", runs))
            continue
        p_values = found.show_p_values()
        if claim.is_equivalence and found.equivalence_p_value is not None:
            p_values += f"; equivalence within {found.margin:.2f}, p {show_p_value(found.equivalence_p_value)}"
        verdict = found.show_verdict(claim.minimum)
        post_hoc = f"Post hoc, `{later.metric}`: {show_post_hoc(later)}." if later is not None else ""
        times = show_step_time(claim, source, benchmarks), show_core_hours(claim, source)
        seeds = " / ".join(map(str, dict.fromkeys(found.counts)))
        if not found.is_complete:
            seeds += f" of {len(source.seeds(claim.groups[0]))}"
        values = found.show_means(), seeds, found.show()
        row = ClaimRow(claim, published, *values, p_values, verdict, *times, post_hoc, runs)
        rows.append(row)
    return rows


def show_step_time(claim: Claim, source: Source, benchmarks: Benchmarks) -> str:
    """Return the time of a training step relative to that of the other run, of a benchmark or, roughly, of the runs."""
    if claim.step_time:
        row = benchmarks.row(claim.step_time["benchmark"], claim.step_time["row"])
        return f"{row['value']:.2f}" if row else ""
    if as_number(claim.groups[1]) is not None:
        return ""
    ours, theirs = (source.runs(name) for name in claim.groups)
    pairs = [
        [run[seed] for run in (ours, theirs)]
        for seed in ours.keys() & theirs.keys()
        if ours[seed].get("processor") == theirs[seed].get("processor")
        and ours[seed]["device"] == theirs[seed]["device"]
        and not any(run[seed].get("time_is_incomplete") for run in (ours, theirs))
    ]
    if len(pairs) < 2:
        return ""
    name = "core_minutes" if is_on_cpu(pairs[0][0]) else "minutes"
    ratio = fmean(pair[0].get(name, 0) for pair in pairs) / fmean(pair[1].get(name, 0) for pair in pairs)
    epochs = [fmean(pair[side]["metrics"].get("epoch", 1) for pair in pairs) for side in (0, 1)]
    return f"≈ {ratio * epochs[1] / epochs[0]:.1f}"


def show_core_hours(claim: Claim, source: Source) -> str:
    """Return the hours of all runs of a claim, of one CPU core or, separately, of a GPU.

    Runs of which only the last part was timed count as the mean of the others of their group.
    """
    on_cpu = on_gpu = 0.0
    for name in claim.groups:
        runs = [] if as_number(name) is not None else [*source.runs(name).values()]
        cpu, gpu = ([run for run in runs if is_on_cpu(run) == expected] for expected in (True, False))
        on_cpu += len(cpu) * mean_minutes(cpu) if cpu else 0
        on_gpu += len(gpu) * mean_minutes(gpu, "minutes") if gpu else 0
    return " + ".join([f"{on_cpu / 60:.1f}"] * bool(on_cpu) + [f"{on_gpu / 60:.1f} GPU"] * bool(on_gpu))


def compare_all(claims: Sequence[Claim], tables: Sequence[Table], source: Source) -> list[Comparison]:
    """Return the comparisons of the tables, and of the claims that no table compares, corrected for each paper.

    Raises:
        ValueError: If two tables compare the same, which would have two verdicts.
    """
    rows = [row for table in tables for row in compare_rows(table, source)]
    found: dict[tuple[str, ...], Comparison] = {}
    for row in rows:
        if (other := found.setdefault(_key(row), row)) is not row:
            raise ValueError(f"{row.table} and {other.table} both compare {row.run} with {row.reference}.")
    planned = {
        (run, reference, next(iter(table.metrics.values()), ""))
        for table in tables
        for run, reference in map(split_row, table.rows)
        if reference and not table.by_metric
    }
    for paper in PAPERS:
        pairs = [(*claim.groups, claim.metric) for claim in claims if claim.paper == paper and claim.compare]
        own = [pair for pair in dict.fromkeys(pairs) if pair not in planned]
        rows += compare_pairs(f"claims, {paper}", own, source)
    return rows


def _key(row: Comparison) -> tuple[str, ...]:
    return row.run, row.reference, row.metric


def show_published_difference(claim: Claim, source: Source) -> str:
    """Return the difference of the published values with its unit; empty if there is none."""
    ids = claim.published or list(claim.groups)
    unknown = [name for name in ids if name not in source.published]
    if unknown and claim.published:
        raise ValueError(f"claim {claim.claim!r}: results/published has no record {', '.join(unknown)}.")
    if unknown or not ids:
        return ""
    first, second = (source.published[name] for name in ids)
    if first["unit"] != second["unit"] or first["metric"] != second["metric"]:
        raise ValueError(f"claim {claim.claim!r}: {' and '.join(ids)} are values of different metrics.")
    unit = "" if first["unit"] == "%" else f" {first['unit']}"
    return f"{first['value'] - second['value']:+.2f}{unit}"


def show_runs(claim: Claim, source: Source) -> str:
    """Return the runs behind a claim, and what those that are missing take."""
    groups = [name for name in claim.groups if as_number(name) is None]
    for name in groups:
        if source.config(name) is None:
            raise ValueError(f"claim {claim.claim!r}: there is no run or configuration {name!r}.")
    done = {name: sorted(source.values(name, claim.metric)) for name in groups}
    parts = [f"`{name}`: {show_seeds(seeds)}" for name, seeds in done.items() if seeds]
    if diverged := source.diverged(*groups):
        parts.append(f"diverged: {', '.join(diverged)}")
    queued = [name for name in groups if name in source.planned]
    if len(queued) < len(groups) or not groups:
        if not claim.takes:
            raise ValueError(f"claim {claim.claim!r}: its runs are not in the queue, so it needs `takes`.")
        names = [f"`{source.config(name)}`" for name in groups if name not in queued]
        parts.append(": ".join([claim.takes, ", ".join(names)]) if names else claim.takes)
    parts += show_missing(queued, source)
    return "; ".join(parts)


def show_missing(groups: Sequence[str], source: Source) -> list[str]:
    """Return number, hours, data and command of the planned runs without results, by entry of the queue."""
    missing: dict[str, list[Mapping]] = {}
    for run in (run for group in groups for run in source.planned[group]):
        if run.seed not in source.runs(run.group):
            missing.setdefault(run.entry.entry, []).append({"run": run, "data": source.dataset(run.group)})
    parts = []
    for entry, found in missing.items():
        planned = found[0]["run"].entry
        time = show_hours(len(found) * planned.minutes)
        machine = "GPU" if planned.device == "gpu" else "CPU core"
        data = ", ".join(sorted({row["data"] for row in found}))
        parts.append(
            f"{count_runs(found)} missing, {time} on one {machine}, data `{data}`: "
            f"`python benchmarks/reproduce.py --only {entry}`"
        )
    return parts


def _unfinished(claim: Claim, source: Source) -> str:
    return "incomplete" if any(source.values(name, claim.metric) for name in claim.groups) else "not run"


def _index(paper: str) -> int:
    if paper not in PAPERS:
        raise ValueError(f"there is no paper {paper!r}; they are {', '.join(PAPERS)}.")
    return list(PAPERS).index(paper)
