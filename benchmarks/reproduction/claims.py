"""The claims of the papers beside what was measured, from `results/claims.yaml`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reproduction.comparisons import Comparison, as_number
from reproduction.tables import (
    P_VALUE,
    Source,
    Table,
    compare_pairs,
    compare_rows,
    count_runs,
    fold,
    join_lines,
    show_hours,
    show_post_hoc,
    split_row,
)


@dataclass(frozen=True)
class Claim:
    """A row of the table.

    Attributes:
        paper: The paper, a key of `PAPERS`.
        claim: The claim, in words.
        compare: `a - b`: the run a is compared with the run b, or with a number; groups, as in `results/tables.yaml`.
            Empty if the results files do not have what would be compared.
        metric: Metric of the comparison.
        published: Ids of the two published records. If there are none, those of `a - b` are used, if they exist.
        takes: What the missing measurement needs, if it is not in the queue: machine, hours and data.
        note: What differs from the paper, or how settings were selected; folded below the table.
    """

    paper: str
    claim: str
    compare: str = ""
    metric: str = "eval_accuracy"
    published: list[str] = field(default_factory=list)
    takes: str = ""
    note: str = ""

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
}
"""Short titles of the papers, in the order of the table."""


@dataclass(frozen=True)
class ClaimRow:
    """A claim beside what was measured; the fields are cells of the table, and what is folded below it."""

    claim: Claim
    published: str
    measured: str
    p_values: str
    verdict: str
    post_hoc: str
    runs: str


def render_claims(rows: Sequence[ClaimRow], paper: str = "") -> str:
    """Return the table of a paper in Markdown, with its runs and with what is not measured; or that of all papers."""
    rows = [row for row in rows if paper in ("", row.claim.paper)]
    measured, others = [row for row in rows if row.measured], [row for row in rows if not row.measured]
    header = ["claim", "published difference", "measured difference", P_VALUE, "verdict"]
    lines = [[row.claim.claim, row.published, row.measured, row.p_values, row.verdict] for row in measured]
    if not paper:
        lines = [[PAPERS[row.claim.paper], *line] for row, line in zip(measured, lines, strict=True)]
        late = (
            "The tests of critical layers and of resets (hyperplane arrangements) were stated after the runs. For "
            'resets, "higher" contradicts the claim.'
        )
        left = f"{len(others)} further claims are not measured; the pages of the papers have them."
        return join_lines(["paper", *header], lines, [late, left])
    about = [(row.claim.note, f"{row.runs}.", row.post_hoc) for row in measured]
    runs = [f"- {row.claim.claim} {' '.join(filter(None, parts))}" for row, parts in zip(measured, about, strict=True)]
    parts = [join_lines(header, lines, []), fold("Runs of each claim, and second analyses", "\n".join(runs))]
    if others:
        takes = (" ".join(filter(None, [row.runs, row.claim.note])) for row in others)
        missing = [[row.claim.claim, row.published, runs] for row, runs in zip(others, takes, strict=True)]
        table = join_lines(["claim", "published difference", "what its runs would take"], missing, [])
        parts.append(fold(f"Claims that are not measured: {len(others)}", table))
    return "\n\n".join(parts if measured else parts[2:])


def claim_rows(claims: Sequence[Claim], tables: Sequence[Table], source: Source) -> list[ClaimRow]:
    """Return the claims in the order of the papers, those with a measured difference first.

    Raises:
        ValueError: If a claim names a paper, run or record that does not exist, or not what its runs take.
    """
    comparisons = {_key(row): row for row in compare_all(claims, tables, source)}
    second = {_key(row)[:2]: row for table in tables for row in compare_rows(table, source, post_hoc=True)}
    rows = []
    found_of = {claim.claim: comparisons.get((*claim.groups, claim.metric)) for claim in claims}
    for claim in sorted(claims, key=lambda claim: (_index(claim.paper), found_of[claim.claim] is None)):
        found, later = found_of[claim.claim], second.get(claim.groups)
        cells = [found.show(), found.show_p_values(), found.show_verdict()] if found is not None else ["", "", ""]
        post_hoc = f"Post hoc, `{later.metric}`: {show_post_hoc(later)}." if later is not None else ""
        cells[-1] = cells[-1] or _unfinished(claim, source)
        published = show_published_difference(claim, source)
        rows.append(ClaimRow(claim, published, *cells, post_hoc, show_runs(claim, source)))
    return rows


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
    """Return the difference of the published values with its unit, or that there is none."""
    ids = claim.published or list(claim.groups)
    unknown = [name for name in ids if name not in source.published]
    if unknown and claim.published:
        raise ValueError(f"claim {claim.claim!r}: results/published has no record {', '.join(unknown)}.")
    if unknown or not ids:
        return "none"
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


def show_seeds(seeds: Sequence[int]) -> str:
    """Format seeds: `seed 3`, `seeds 0 to 9`, `seeds 0, 2, 3`."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def _unfinished(claim: Claim, source: Source) -> str:
    return "incomplete" if any(source.values(name, claim.metric) for name in claim.groups) else "not run"


def _index(paper: str) -> int:
    if paper not in PAPERS:
        raise ValueError(f"there is no paper {paper!r}; they are {', '.join(PAPERS)}.")
    return list(PAPERS).index(paper)
