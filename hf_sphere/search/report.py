"""What is wrong with vectors: numbers, verdicts in plain words, and the remedies that were measured."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import to_embeddings
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.geometry import effective_dimension_interval, uniformity_test
from hf_sphere.search.neighbor_search import NeighborSearch
from hf_sphere.search.vectors import check_ids, check_names, parse_vectors, repeated_rows
from hf_sphere.utils.checks import check_seed
from hf_sphere.utils.pages import DataFrame, Table

ROWS, MEMBERS, FEWEST, FEWEST_GROUPS, RESAMPLES = 10_000, 50, 50, 20, 4_000
"""Most rows that are compared, most rows of a group if there are many, fewest rows to describe directions, fewest
groups of two rows or more to measure remedies, and resamples for an interval."""

K, HUBS = 10, 1.0
"""The k-occurrence of a row is how often it is among the nearest k of others. There are hubs if its skewness is above
1 by two standard errors: that of uniform directions never was, and CSLS helped from there on (page of the report)."""

MOST_LOSS = 0.02
"""Fraction of the Recall@1 that fewer dimensions may cost."""

FAULTS = ("not finite", "zero", "equal to an earlier row")
"""What is wrong with single rows; in `numbers`, `rows_` or `ids_` precedes it."""


@dataclass(frozen=True)
class Remedy:
    """The Recall@1 with a remedy and its change, with an interval that is corrected for the number of remedies."""

    name: str
    dimensions: int
    recall_at_1: float
    change: float
    low: float
    high: float

    def __str__(self) -> str:
        recall, change, low, high = (100 * x for x in (self.recall_at_1, self.change, self.low, self.high))
        return f"{self.name}: Recall@1 {recall:.1f} % ({change:+.1f} points, interval {low:+.1f} to {high:+.1f})"


@dataclass(frozen=True, repr=False)
class VectorReport(Table):
    """What `report_vectors` found; as a text, all of it.

    Attributes:
        numbers: Values by name.
        verdicts: What is wrong, what to do, and what could not be measured, in sentences.
        remedies: Measured on held-out groups; the first one is to do nothing. Empty without groups.
        drawn: What `hf_sphere.visualization.plot_report` draws.
    """

    numbers: dict[str, Any]
    verdicts: list[str]
    remedies: list[Remedy] = field(default_factory=list)
    drawn: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"VectorReport({self.numbers['rows']:,} rows: {' '.join(self.verdicts)})"

    def to_pandas(self) -> DataFrame:
        """Return the numbers: name and value."""
        import pandas as pd

        return pd.DataFrame([{"name": name, "value": value} for name, value in self._lines()])

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yield what is shown of each number: its name and its value."""
        for key, value in self.numbers.items():
            name = key.replace("_", " ")
            kind, _, fault = name.partition(" ")
            if fault in FAULTS:
                named = f"{', '.join(map(str, value[:5]))}{', ...' * (len(value) > 5)}"
                yield f"rows {fault}", f"{len(value):,} ({kind if len(value) > 1 else kind[:-1]} {named})"
            elif key.startswith("p_value"):
                yield name.replace("p value", "p-value"), "below 0.0001" if value < 1e-4 else f"{value:.4f}"
            elif key == "effective_dimension_and_interval":
                yield name, "{:.1f} ({:.1f} to {:.1f})".format(*value)
            elif key == "smallest_median_largest_norm":
                yield "smallest, median and largest norm", ", ".join(f"{norm:.4g}" for norm in value)
            elif key == "largest_hub":
                yield name, f"among the nearest {K} of {value:,} rows"
            elif key in ("fraction_never_found", "overlap"):
                yield name, f"{100 * value:.1f} %"
            else:
                yield name, f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but `drawn` as values of JSON."""
        return {name: value for name, value in asdict(self).items() if name != "drawn"}

    def __str__(self) -> str:
        lines = [f"{name:<36}{value}" for name, value in self._lines()]
        parts = lines, [*map(str, self.remedies)], [f"- {verdict}" for verdict in self.verdicts]
        return "\n\n".join("\n".join(part) for part in parts if part)


def report_vectors(vectors: Any, groups: Any = None, *, ids: Any = None, seed: int = 0) -> VectorReport:
    """Describe vectors, judge them, and measure which remedies help.

    Rows of zeros, rows that are not finite and copies of earlier rows are counted and left out. Up to 10,000 rows are
    compared, drawn at random: with groups whole ones, or 50 rows or more of larger ones.

    Args:
        vectors: (N, d), as for `read_vectors`.
        groups: (N,) names, texts or integers, such as the article of a sentence: rows of one group match each other.
        ids: (N,) different texts or integers, by which the report names rows; if None, it has their numbers.
        seed: Seed of all that is random.

    Raises:
        ValueError: If an argument is invalid.
        TypeError: If vectors are no dense numbers.

    Example:
        >>> report_vectors(embeddings).numbers["rows"]
        60
    """
    vectors = to_embeddings(parse_vectors(vectors), what="vectors")
    ids = None if ids is None else check_ids(ids, len(vectors))
    names = range(len(vectors)) if groups is None else check_names("groups", groups, len(vectors))
    labels = torch.from_numpy(np.unique(names, return_inverse=True)[1])
    generator = torch.Generator().manual_seed(check_seed(seed))
    norms = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    usable = (norms.isfinite() & (norms > 0)).nonzero()[:, 0]
    copies = usable[repeated_rows(vectors[usable])]
    faults = zip(FAULTS, ((~norms.isfinite()).nonzero()[:, 0], (norms == 0).nonzero()[:, 0], copies), strict=True)
    numbers: dict[str, Any] = {"rows": len(vectors), "dimensions": vectors.shape[1]}
    numbers |= {} if groups is None else {"groups": int(labels.max()) + 1}
    verdicts, drawn, remedies = list[str](), dict[str, Tensor](), list[Remedy]()
    for name, rows in faults:
        if bad := rows.tolist():
            named = bad if ids is None else [ids[row] for row in bad]
            numbers[f"{'rows' if ids is None else 'ids'}_{name.replace(' ', '_')}"] = named
            verdicts.append(f"{len(bad):,} of {len(vectors):,} rows are {name}, the first is {named[0]}: remove them.")
    if not len(usable):
        return VectorReport(numbers, [*verdicts, "No row is left: check the model and its input."])
    norms = drawn["norms"] = norms[usable].sort().values
    numbers["smallest_median_largest_norm"] = norms[[0, len(norms) // 2, -1]].tolist()
    if (ratio := norms[-1] / norms[0]) > 1.02:
        verdicts.append(f"Not normalized: norms differ by a factor of {ratio:.3g}, so compare cosines or normalize.")
    different = usable[~torch.isin(usable, copies)]
    sample, labels = _sample(labels[different], generator)
    points = project_to_sphere(vectors[different][sample])
    if len(usable) > 1 and (points - points[0]).abs().max() < 1e-6:
        verdicts.append("All rows have the same direction, so they are collapsed: check the model and its input.")
    elif len(points) < FEWEST or vectors.shape[1] < 2:
        verdicts.append(f"Nothing more can be said, which takes {FEWEST} different rows of two dimensions or more.")
    else:
        verdicts += _describe(points, labels, numbers, drawn)
        remedies = _measure_remedies(points, labels, generator)
        verdicts += _advise(numbers, remedies)
    return VectorReport(numbers, verdicts, remedies, drawn)


def _sample(groups: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows of whole groups in random order; return them and their groups, numbered from 0."""
    order = torch.randperm(len(groups), generator=generator)
    keys = torch.randperm(int(groups.max()) + 1, generator=generator)[groups[order]]
    order = order[keys.argsort(stable=True)]
    counts = groups[order].unique_consecutive(return_counts=True)[1]
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    order = order[rank < max(MEMBERS, ROWS // len(counts))][:ROWS]
    return order, groups[order].unique_consecutive(return_inverse=True)[1]


def _describe(points: Tensor, groups: Tensor, numbers: dict[str, Any], drawn: dict[str, Tensor]) -> list[str]:
    """Add numbers on unit vectors (n, d) of groups (n,) in increasing order, and return what is wrong with them."""
    (count, dim), keys, exact = points.shape, torch.arange(len(points)), points.double()
    units = groups if groups[-1] + 1 >= FEWEST_GROUPS else keys  # rows of a group are not independent
    of_mean, of_axes = uniformity_test(exact[units.diff(prepend=units[:1] - 1) > 0])
    cosine = float(exact.sum(0).square().sum() - count) / (count * (count - 1))
    centered = exact - exact.mean(0)
    variances = torch.linalg.eigvalsh(centered.T @ centered / count).flip(0).clamp_min(0)
    empty = int((variances < 1e-6 * variances.mean()).sum()) if count > 2 * dim else 0
    distances, rows = NeighborSearch(points, kind="torch").search_others(points, K, keys, keys)
    found, order = rows.flatten().bincount(minlength=count).double(), np.random.default_rng(0).permutation(count)
    pairs = (points[order] * points[np.roll(order, 1)]).sum(1)  # rows are in the order of their groups
    skewness = float((found - K).pow(3).mean() / found.var(correction=0).clamp_min(1e-9).pow(1.5))
    largest, never = int(found.max()), float((found == 0).double().mean())
    numbers |= {"rows_compared": count, "mean_cosine_of_pairs": cosine, "p_value_of_uniform_mean": of_mean}
    numbers["p_value_of_uniform_axes"] = of_axes
    numbers["effective_dimension_and_interval"] = [*effective_dimension_interval(exact, units)]
    numbers |= {"dimensions_without_variance": empty, "hub_skewness": skewness, "largest_hub": largest}
    numbers["fraction_never_found"] = never
    drawn |= {"pairs": pairs, "nearest": 1 - distances[:, 0], "variances": variances, "occurrence": found}
    has_match = groups.bincount()[groups] > 1
    if has_match.any() and groups[-1] > 0:
        numbers["overlap"] = float((groups[rows[:, 0]] != groups)[has_match].double().mean())
    cone, hubs = bool(cosine > pairs.std()) and of_mean < 0.01, skewness > HUBS + 2 * (6 / count) ** 0.5
    often = f"among the nearest {K} of {largest:,} rows"
    means = f"pairs have a mean cosine of {cosine:.2f}, more than its standard deviation; if uniform, it is 0"
    overlap = 100 * numbers.get("overlap", 0.0)
    verdicts = (
        ("overlap" in numbers, f"The nearest row of {overlap:.0f} of 100 rows is of another group."),
        (empty, f"{empty} of {dim} dimensions are collapsed: PCA drops them without loss."),
        (cone, f"The vectors are in a cone: {means}."),
        (hubs, f"There are hubs: one row is {often}, and {100 * never:.1f} % are among those of none."),
        (min(of_mean, of_axes) > 0.025, "The directions look uniform: no significant mean, and no significant axis."),
    )
    return [verdict for holds, verdict in verdicts if holds]


def _advise(numbers: dict[str, Any], remedies: list[Remedy]) -> list[str]:
    """Return what to do."""
    if not remedies:
        needs = f"{FEWEST_GROUPS} groups of two rows or more (groups=, --group_column)"
        return [f"What helps was not measured, which takes {needs}."]
    before, best = f"{100 * remedies[0].recall_at_1:.1f} %", max(remedies, key=lambda remedy: remedy.low)
    shorter = (remedy for remedy in remedies if remedy.dimensions < numbers["dimensions"])
    small = [remedy for remedy in shorter if remedy.low >= -MOST_LOSS * remedies[0].recall_at_1]
    helps = f"What helps most: {best}, instead of {before} on held-out groups."
    nothing = f"No remedy raised the Recall@1 of {before} measurably."
    verdicts = [helps if best.low > 0 else nothing]
    if small:
        least = min(small, key=lambda remedy: remedy.dimensions)
        verdicts.append(f"Fewer dimensions cost at most {100 * MOST_LOSS:.0f} % of the Recall@1: {least}.")
    return verdicts


def _remedies(fit: Tensor, points: Tensor) -> Iterator[tuple[str, Tensor, Tensor | float]]:
    """Yield the name of each remedy that is fitted to some vectors, other vectors with it, and what scores lose."""
    dim, mean = points.shape[1], fit.mean(0)
    centered, axes = points - mean, torch.linalg.eigh((fit - mean).T @ (fit - mean))[1].flip(1)
    yield "nothing", points, 0.0
    yield "mean removed", F.normalize(centered), 0.0
    for count in range(1, min(4, dim)):
        removed = centered @ axes[:, :count] @ axes[:, :count].T
        yield f"mean and {count} component{'s' * (count > 1)} removed", F.normalize(centered - removed), 0.0
    yield "CSLS", points, (points @ fit.T).topk(min(K, len(fit))).values.mean(1)
    for size in sorted({max(1, dim // 2), max(1, dim // 4)}, reverse=True):
        yield f"first {size} dimensions", F.normalize(points[:, :size]), 0.0
        yield f"{size} dimensions by PCA", F.normalize(centered @ axes[:, :size]), 0.0


def _measure_remedies(points: Tensor, groups: Tensor, generator: torch.Generator) -> list[Remedy]:
    """Fit the remedies to half of the groups, which are in random order, search in the other half, and vice versa."""
    sizes = groups.bincount()
    if int((sizes > 1).sum()) < FEWEST_GROUPS:
        return []
    hits, dims = dict[str, Tensor](), dict[str, int]()
    for side in (groups % 2 == 0, groups % 2 == 1):
        labels, rows = groups[side], torch.arange(int(side.sum()))
        for name, vectors, penalties in _remedies(points[~side], points[side]):
            dims[name], total = vectors.shape[1], hits.setdefault(name, torch.zeros(len(sizes)))
            for block in rows.split(1024):
                scores = 2 * vectors[block] @ vectors.T - penalties
                scores[block - block[0], block] = -torch.inf
                total.index_add_(0, labels[block], (labels[scores.argmax(1)] == labels[block]).float())
    values, counts = torch.stack([*hits.values()], 1)[sizes > 1].double(), sizes[sizes > 1].double()
    changes = values - values[:, :1]
    # The bootstrap draws each group as often as a Poisson variable says, and one more row that is lost or gained, so
    # that equal results have an interval, too.
    weights = torch.poisson(torch.ones(RESAMPLES, len(counts) + 1), generator=generator).double()
    totals, tail = (weights @ F.pad(counts, (0, 1), value=1.0))[:, None], 0.025 / (len(dims) - 1)
    means, more = weights[:, :-1] @ changes / totals, weights[:, -1:] / totals * (torch.arange(len(dims)) > 0)
    ends = (means - more).quantile(tail, 0), (means + more).quantile(1 - tail, 0)
    columns = [column.tolist() for column in (values.sum(0) / counts.sum(), changes.sum(0) / counts.sum(), *ends)]
    return [Remedy(*row) for row in zip(dims, dims.values(), *columns, strict=True)]
