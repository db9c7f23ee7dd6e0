"""Compare the margins of `EmbeddingSpace` with scores of speaker verification, all by the same p-values.

python benchmarks/matching_rules.py wikitext.npz omniglot_pixels.npz

Each file has vectors (N, d) and groups (N,), as `benchmarks/matching.py` keeps them. A third of the groups is enrolled
with half of its rows; the other half are queries with a match, and the other groups are queries without one. Scores of
a query and a group, of which the best group counts:

- cosine of the best row;
- AS-norm: the best cosine less the mean of the next ten groups of the query, by their standard deviation, and the same
  for the ten nearest groups of the group's rows; the mean of both;
- impostor: the best cosine to a row less the row's best cosine to another group;
- logistic: a logistic regression of the best cosine, the mean of three, the distance to the next group, both means of
  AS-norm and the logarithm of the size, fitted to a third of the groups.

Each is calibrated by rows whose group is left out, with the sharp rule of `Calibration`, and by the plain 95 %
quantile of their scores. Writes `results/matching_rules.json` (five minutes).
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report, row
from matching import rank_in_group
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hf_sphere.search import EmbeddingSpace
from hf_sphere.search.calibration import Calibration

LEVEL, COHORT, EACH = 0.05, 10, 8
"""Level, groups of a cohort, and most rows of a group that calibrate."""


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the largest values of each row, in decreasing order; what is missing is NaN."""
    found = -np.sort(-values, axis=1)[:, :count]
    return np.where(np.isfinite(found), found, np.nan)


class Gallery:
    """Enrolled rows (N, d), with groups numbered from 0, and what scores need of them."""

    def __init__(self, rows: np.ndarray, groups: np.ndarray) -> None:
        self.rows, self.groups = rows, groups
        self.count = int(groups.max()) + 1
        self.members = [np.flatnonzero(groups == name) for name in range(self.count)]
        self.sizes = np.array([len(rows) for rows in self.members])
        to_groups = self.tables(rows @ rows.T)[0]
        to_groups[np.arange(len(rows)), groups] = -np.inf
        self.cohorts: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for left_out in range(-1, self.count):
            others = to_groups.copy()
            if left_out >= 0:
                others[:, left_out] = -np.inf
            nearest = largest(others, COHORT)
            means, spreads = nearest.mean(1), nearest.std(1)
            by_group = [np.array([values[rows].mean() for rows in self.members]) for values in (means, spreads)]
            self.cohorts[left_out] = (*by_group, nearest[:, 0])

    def tables(self, cosines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the best cosine to each group, and the mean of the three best, (Q, G) each."""
        best = np.stack([cosines[:, rows].max(1) for rows in self.members], 1)
        three = [np.nan_to_num(np.nanmean(largest(cosines[:, rows], 3), 1), nan=-1.0) for rows in self.members]
        return best, np.stack(three, 1)

    def features(self, cosines: np.ndarray, best: np.ndarray, three: np.ndarray, left_out: int) -> dict[str, Any]:
        """Return the scores of groups (Q, G) of queries, and the features (Q, G, 6) of the logistic regression."""
        means, spreads, highest = self.cohorts[left_out]
        ordered = largest(best, COHORT + 1)
        after = ordered[:, 1:]
        mean, spread, second = np.nanmean(after, 1)[:, None], np.nanstd(after, 1)[:, None], ordered[:, 1:2]
        margins = cosines - highest
        impostor = np.stack([margins[:, rows].max(1) for rows in self.members], 1)
        parts = (best, three, best - second, best - mean, best - means, np.broadcast_to(np.log(self.sizes), best.shape))
        return {
            "cosine": best,
            "AS-norm": (best - mean) / spread / 2 + (best - means) / spreads / 2,
            "impostor": np.where(np.isfinite(best), impostor, -np.inf),
            "features": np.stack(parts, -1),
        }

    def find(self, queries: np.ndarray, left_out: np.ndarray | None, own: np.ndarray | None, model: Any) -> Any:
        """Return for each score the two best scores (Q, 2) and groups (Q, 2): the second without the best group.

        The groups `left_out` are not searched, nor are the rows `own`.
        """
        cosines = queries @ self.rows.T
        if own is not None:
            cosines[np.arange(len(queries)), own] = -np.inf
        best, three = self.tables(cosines)
        found: dict[str, Any] = {}
        for name in [-1] if left_out is None else np.unique(left_out):
            at = np.arange(len(queries)) if left_out is None else np.flatnonzero(left_out == name)
            tables = [best[at].copy(), three[at].copy()]
            if name >= 0:
                for table in tables:
                    table[:, name] = -np.inf
            first = self._scores(cosines[at], *tables, name, model)
            for kind, values in first.items():
                top = values.argmax(1)
                rest = [table.copy() for table in tables]
                for table in rest:
                    table[np.arange(len(at)), top] = -np.inf
                others = self._scores(cosines[at], *rest, name, model)[kind]
                scores, groups = found.setdefault(kind, (np.zeros((len(queries), 2)), np.zeros((len(queries), 2), int)))
                scores[at] = np.stack([values.max(1), others.max(1)], 1)
                groups[at] = np.stack([top, others.argmax(1)], 1)
        return found

    def _scores(self, cosines: np.ndarray, best: np.ndarray, three: np.ndarray, left_out: int, model: Any) -> Any:
        found = self.features(cosines, best, three, left_out)
        features = found.pop("features")
        if model is not None:
            known = np.isfinite(best)
            logits = np.full(best.shape, -np.inf)
            logits[known] = model.decision_function(features[known])
            found["logistic"] = logits
        return found


def fit_logistic(rows: np.ndarray, groups: np.ndarray) -> Any:
    """Fit the regression: whether the best group of a row is its own, with and without the own group."""
    gallery = Gallery(rows, np.unique(groups, return_inverse=True)[1])
    own = gallery.groups
    examples, targets = [], []
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    best, three = gallery.tables(cosines)
    for is_known in (True, False):
        for name in range(gallery.count):
            at = gallery.members[name]
            if len(at) < 2:
                continue
            tables = [best[at].copy(), three[at].copy()]
            if not is_known:
                for table in tables:
                    table[:, name] = -np.inf
            found = gallery.features(cosines[at], *tables, -1 if is_known else name)
            top = found["cosine"].argmax(1)
            examples.append(found["features"][np.arange(len(at)), top])
            targets.append(top == own[at])
    model = make_pipeline(StandardScaler(), LogisticRegression())
    return model.fit(np.concatenate(examples), np.concatenate(targets))


def measure(vectors: np.ndarray, groups: np.ndarray, split: int) -> dict[str, tuple[float, float]]:
    """Return the shares that each score and rule names and accepts falsely, in one split."""
    random = np.random.default_rng(split)
    names = np.unique(groups)
    enrolled = np.isin(groups, random.permutation(names)[: len(names) // 3])
    order = random.permutation(np.flatnonzero(enrolled))
    is_gallery = 2 * rank_in_group(groups[order]) < np.bincount(groups)[groups[order]]
    gallery, known = order[is_gallery], order[~is_gallery]
    strangers = random.permutation(np.flatnonzero(~enrolled))[:3_000]
    own_names, numbers = np.unique(groups[gallery], return_inverse=True)
    is_fit = np.isin(numbers, random.permutation(len(own_names))[: len(own_names) // 3])
    model = fit_logistic(vectors[gallery][is_fit], numbers[is_fit])
    enrolled_rows = Gallery(vectors[gallery], numbers)
    calibrating = np.concatenate([rows[:EACH] for rows in enrolled_rows.members])
    of_rows = enrolled_rows.find(vectors[gallery][calibrating], numbers[calibrating], None, model)
    of_known, of_unknown = (enrolled_rows.find(vectors[rows], None, None, model) for rows in (known, strangers))
    true = np.searchsorted(own_names, groups[known])
    results = {}
    for kind, (scores, matches) in of_rows.items():
        used = ~is_fit[calibrating] if kind == "logistic" else np.full(len(calibrating), True)
        own = torch.from_numpy(numbers[calibrating][used])
        tensors = torch.from_numpy(scores[used]), torch.from_numpy(matches[used]), torch.from_numpy(matches[used])
        calibration = Calibration(own, torch.from_numpy(calibrating[used]), *tensors, 0, "sharp")
        is_right = of_known[kind][1][:, 0] == true
        top, top_unknown = of_known[kind][0][:, :1], of_unknown[kind][0][:, :1]
        p, p_unknown = (calibration.p_values(torch.from_numpy(s))[:, 0].numpy() for s in (top, top_unknown))
        results[f"{kind}, sharp"] = ((p <= LEVEL + 1e-12) & is_right).mean(), (p_unknown <= LEVEL + 1e-12).mean()
        bound = np.quantile(scores[used, 0], 1 - LEVEL)
        results[f"{kind}, quantile"] = ((top[:, 0] > bound) & is_right).mean(), (top_unknown > bound).mean()
    space = EmbeddingSpace.fit(vectors[gallery], numbers, seed=split)
    found, unknown = (space.search(vectors[rows], 1, false_accept=LEVEL) for rows in (known, strangers))
    is_hit = found.accepted[:, 0].numpy() & (numbers[found.rows[:, 0].numpy()] == true)
    results["EmbeddingSpace, margin"] = is_hit.mean(), unknown.accepted.double().mean().item()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--splits", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in args.files:
        file = np.load(path)
        each = [measure(file["vectors"], file["groups"], split) for split in range(args.splits)]
        for kind in each[0]:
            values = np.array([results[kind] for results in each])
            (named, false), errors = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
            rows.append(row(f"{path.stem}, {kind}: named at 5%", float(named)))
            rows.append(row(f"{path.stem}, {kind}: false accepts at 5%", float(false)))
            rows.append(row(f"{path.stem}, {kind}: standard error of false accepts at 5%", float(errors[1])))
            print(f"{path.stem:<20}{kind:<24}{100 * named:.1f} {100 * false:.1f} +- {100 * errors[1]:.1f}", flush=True)
    report("matching_rules", rows, splits=args.splits)


if __name__ == "__main__":
    main()
