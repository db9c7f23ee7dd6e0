"""p-values of `EmbeddingSpace` beside their definitions, in plain numpy."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf_shrinkage

from hf_sphere.search import EmbeddingSpace
from hf_sphere.search.fitted import FittedScore, _ledoit_wolf, transforms

ALL = {"rows_per_group": 10_000, "calibration_rows": 10_000}


def with_score(space, transform, cohort):
    """Calibrate a space by a score that is fitted to a third of its groups."""
    is_fitted = torch.from_numpy(space._keys() % 3 == 0)
    fit = transforms(space.vectors[is_fitted], space._groups[is_fitted])[transform]
    space._use(FittedScore(*fit, cohort, transform), is_chosen=True)
    space._calibration = None


def unit(count: int, dim: int, seed: int) -> np.ndarray:
    points = np.random.default_rng(seed).standard_normal((count, dim))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def vertices() -> np.ndarray:
    """The 24-cell: unit vectors whose cosines are 0, 1/2 and 1, or their negatives, without rounding."""
    axes = np.concatenate([np.eye(4), -np.eye(4)])
    return np.concatenate([axes, list(itertools.product((-0.5, 0.5), repeat=4))]).astype(np.float32)


def p_values(found, to_rows, groups, calibration, own_scores, others=None) -> list[list[float]]:
    """Return the p-values of the rows that queries found.

    Args:
        found: Matches of the queries.
        to_rows: (Q, N), scores of the queries and all rows.
        groups: (N,) of the rows.
        calibration: Rows that are calibration queries.
        own_scores: (N,), their best scores among other groups.
        others: Function of a query and a group, the best score without this group; if None, that of `to_rows`.
    """
    names = sorted({groups[row] for row in calibration})
    p = []
    for query, (scores, rows) in enumerate(zip(to_rows, found.rows.tolist(), strict=True)):
        best = rows[0]
        assert scores[best] == pytest.approx(scores.max(), abs=1e-6)
        second = others(query, groups[best]) if others else scores[groups != groups[best]].max()
        p.append([])
        for row in rows:
            total = 0.0
            for name in names:
                own = [own_scores[i] >= scores[row] or i == best for i in calibration if groups[i] == name]
                share = np.mean(own)
                if name == groups[best]:  # compared with the query where both are searched among the same groups
                    at = min(second, scores[row])
                    share = max(share, np.mean([own_scores[i] >= at for i in calibration if groups[i] == name]))
                total += share
            p[-1].append((1 + total) / (len(names) + 1))
    return p


def sharp_p_values(scores, best, groups) -> np.ndarray:
    """Return the sharp p-values of scores.

    Args:
        scores: (Q,), of queries of new groups.
        best: (C, G), of each calibration query and each group of the gallery, -inf for its own.
        groups: (C,), the own groups of the calibration queries, which are among those of the gallery or new.
    """
    names = sorted(set(groups))

    def matches(score, without=None):
        """The groups whose queries have at least a score, where one group is not there."""
        total = 0.0
        for name in names:
            if name != without:
                rows = best[groups == name].copy()
                if without is not None and without < rows.shape[1]:
                    rows[:, without] = -np.inf
                total += np.mean(rows.max(1) >= score)
        return total

    own = {name: [matches(row.max(), name) for row in best[groups == name]] for name in names}
    shares = [np.mean([np.mean(np.array(own[n]) <= matches(score) + 1e-9) for n in names]) for score in scores]
    return np.maximum(1 / (len(names) + 1), shares)


def to_groups(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the best score in each group, (Q, G), of scores (Q, N)."""
    return np.stack([scores[:, groups == name].max(1) for name in np.unique(groups)], 1)


def leave_one_group_out(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.array([row[groups != group].max() for row, group in zip(scores, groups, strict=True)])


SIZES = {
    "one row": np.arange(30),
    "five rows": np.arange(60) // 5,
    "unequal": np.repeat(np.arange(6), [1, 2, 3, 5, 8, 13]),
}


def rows_and_queries(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    centers, dim = unit(groups.max() + 1, 6, 0), 6
    rows = centers[groups] + 0.5 * unit(len(groups), dim, 1)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    queries = unit(40, dim, 2)
    queries[:10] = rows[:10] * np.float32(0.9) + np.float32(0.2) * queries[:10]
    return rows, queries / np.linalg.norm(queries, axis=1, keepdims=True)


@pytest.mark.parametrize("groups", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rows_per_group", [10_000, 3, 1])
def test_the_strict_rule_leaves_one_group_out_by_its_definition(groups, rows_per_group):
    rows, queries = rows_and_queries(groups)
    options = {"rows_per_group": rows_per_group, "calibration_rows": 10_000}
    space = EmbeddingSpace.fit(rows, groups, score="cosine", rule="strict", **options)
    calibration = space.calibration.ids.tolist()
    assert max(np.bincount(groups[calibration])) <= rows_per_group
    found = space.search(queries, 4)
    own = leave_one_group_out(rows @ rows.T, groups)
    expected = p_values(found, queries @ rows.T, groups, calibration, own)
    np.testing.assert_allclose(found.p_values, expected, atol=1e-12)


@pytest.mark.parametrize("groups", [SIZES["five rows"], SIZES["unequal"]], ids=["five rows", "unequal"])
@pytest.mark.parametrize("rows_per_group", [10_000, 3])
def test_the_sharp_rule_leaves_one_group_out_by_its_definition(groups, rows_per_group):
    rows, queries = rows_and_queries(groups)
    space = EmbeddingSpace.fit(rows, groups, score="cosine", rows_per_group=rows_per_group, calibration_rows=10_000)
    calibration = space.calibration.ids.numpy()
    best = to_groups(rows @ rows.T, groups)
    best[np.arange(len(rows)), groups] = -np.inf
    expected = sharp_p_values((queries @ rows.T).max(1), best[calibration], groups[calibration])
    found = space.search(queries, 1)
    np.testing.assert_allclose(found.p_values[:, 0], expected, atol=1e-12)
    for level in (0.2, 0.5):  # one number decides
        above = found.scores[:, 0] >= space.threshold(level)
        np.testing.assert_array_equal(above, found.p_values[:, 0] <= level + 1e-12)


def test_one_row_per_group_has_the_exact_rule():
    rows, queries = rows_and_queries(np.arange(30))
    sharp, strict = (EmbeddingSpace.fit(rows, rule=rule).search(queries, 2).p_values for rule in ("sharp", "strict"))
    assert torch.equal(sharp, strict)


@pytest.mark.parametrize("groups", [np.arange(24), np.arange(24) // 2], ids=["one row", "two rows"])
def test_tied_scores_count_as_reached(groups):
    rows = vertices()
    space = EmbeddingSpace.fit(rows, groups, score="cosine", rule="strict", **ALL)
    queries = rows[[0, 8, 13]]
    found, scores = space.search(queries, 3), queries @ rows.T
    expected = p_values(found, scores, groups, list(range(24)), leave_one_group_out(rows @ rows.T, groups))
    np.testing.assert_allclose(found.p_values, expected, atol=1e-12)


@pytest.mark.parametrize(
    "calibration_groups", [None, 50 + np.arange(36) // 3, np.repeat([50, 51, 52, 53], [1, 5, 10, 20])]
)
def test_separate_calibration_follows_its_definition(calibration_groups):
    rows, calibration, queries = unit(50, 5, 0), unit(36, 5, 1), unit(30, 5, 2)
    groups = np.arange(50) // 5
    names = np.arange(36) if calibration_groups is None else calibration_groups
    options = {"calibration": calibration, "calibration_groups": calibration_groups, "score": "cosine"}
    strict, sharp = (EmbeddingSpace.fit(rows, groups, rule=rule, **options) for rule in ("strict", "sharp"))
    best, top = (calibration @ rows.T).max(1), -np.sort(-(queries @ rows.T), axis=1)[:, :2]
    shares = [(best[names == name, None, None] >= top).mean(0) for name in np.unique(names)]
    expected = (1 + np.sum(shares, axis=0)) / (len(shares) + 1)
    np.testing.assert_allclose(strict.search(queries, 2).p_values, expected, atol=1e-12)
    if calibration_groups is not None:
        expected = sharp_p_values(top[:, 0], to_groups(calibration @ rows.T, groups), names)
    np.testing.assert_allclose(
        sharp.search(queries, 2).p_values[:, 0], np.ravel(expected)[:: expected.ndim], atol=1e-12
    )


def group_scores(cosines, groups, cohort, left_out=()) -> dict[int, float]:
    """Return the score of each group by the cosines of its rows: the best one, or log-sum-exp."""
    names = sorted({*groups.tolist()} - {*left_out})
    members = {name: cosines[groups == name] for name in names}
    if cohort == "none":
        return {name: rows.max() for name, rows in members.items()}
    return {name: np.log(np.exp(20 * rows).sum()) / 20 for name, rows in members.items()}


@pytest.mark.parametrize("cohort", ["both", "query", "none"])
def test_fitted_scores_follow_their_definition(cohort):
    groups = np.repeat(np.arange(16), 3)
    rows, queries = rows_and_queries(groups)
    space = EmbeddingSpace.fit(rows, groups, score="cosine", rule="strict", **ALL)
    with_score(space, "within groups", cohort)
    points, own = space.transform(rows).double().numpy(), space.calibration.ids.numpy()

    def of_twelve(scores):
        return dict(sorted(scores.items(), key=lambda pair: -pair[1])[:12])

    def of_group(name, left_out):
        """The mean over rows of the means over the ten nearest groups."""
        means = []
        for row in np.flatnonzero(groups == name):
            nearest = group_scores(points[row] @ points.T, groups, cohort, {name})
            nearest = dict(sorted(nearest.items(), key=lambda pair: -pair[1])[:11])
            means.append(np.mean([score for other, score in nearest.items() if other != left_out][:10]))
        return np.mean(means)

    def above(scores, left_out=None):
        values = np.array([*scores.values()])
        mean = values[1:11].mean() if cohort != "none" else 0.0
        of_groups = [of_group(name, left_out) if cohort == "both" else 0.0 for name in scores]
        return dict(zip(scores, values - mean - of_groups, strict=True))

    best, second = [], []
    for row in own:
        name = groups[row]
        scores = of_twelve(group_scores(points[row] @ points.T, groups, cohort, {name}))
        found = above(scores, name)
        first = max(found, key=found.get)
        others = above({other: score for other, score in scores.items() if other != first}, name)
        best.append(found[first])
        second.append(max(others.values()))
    np.testing.assert_allclose(space.calibration.scores, np.stack([best, second], 1), atol=2e-6)
    to_rows = space.transform(queries).double().numpy() @ points.T
    expected = [max(above(of_twelve(group_scores(cosines, groups, cohort))).values()) for cosines in to_rows]
    found = space.search(queries, 3)
    np.testing.assert_allclose(found.scores[:, 0], expected, atol=2e-6)
    if cohort != "none":
        same = groups[found.rows] == groups[found.rows[:, :1]]
        assert (found.p_values == found.p_values[:, :1])[same].all()


def test_within_group_whitening_makes_the_noise_of_groups_alike():
    generator, groups = np.random.default_rng(0), np.repeat(np.arange(200), 5)
    noise = generator.standard_normal((1000, 6)) * [3, 1, 1, 1, 1, 0.3]
    vectors = torch.from_numpy(unit(200, 6, 0)[groups] + 0.1 * noise).double()
    mean, matrix = transforms(vectors, torch.from_numpy(groups))["within groups"]
    np.testing.assert_allclose(mean, vectors.mean(0), atol=1e-6)
    within = vectors - torch.stack([vectors[groups == n].mean(0) for n in range(200)])[groups]
    covariance = within.T @ within / 800
    shrunk = 0.7 * covariance + 0.3 * covariance.trace() / 6 * torch.eye(6).double()
    spread = matrix.double() @ shrunk @ matrix.double()
    torch.testing.assert_close(spread / spread.diagonal().mean(), torch.eye(6).double(), atol=1e-5, rtol=0)


def test_the_shrinkage_is_that_of_ledoit_and_wolf():
    for shape in ((50, 80), (500, 20)):
        rows = np.random.default_rng(0).standard_normal(shape) * np.random.default_rng(1).random(shape[1])
        rows -= rows.mean(0)
        exact = torch.from_numpy(rows)
        found = _ledoit_wolf(exact, torch.linalg.eigvalsh(exact.T @ exact / len(exact)))
        assert found == pytest.approx(ledoit_wolf_shrinkage(rows, assume_centered=True))


def noisy_groups(num_groups: int, size: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Groups in 20 of 60 dimensions, and more noise in the others."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), size)
    centers = np.pad(generator.standard_normal((num_groups, 20)), ((0, 0), (0, 40)))
    noise = generator.standard_normal((len(groups), 60)) * np.repeat([0.6, 2.0], [20, 40])
    return torch.from_numpy(centers[groups] + noise).float(), groups


def test_a_fitted_score_names_twice_as_many_at_the_same_level():
    vectors, groups = noisy_groups(150, 12, 0)
    is_known = groups < 90
    is_query = (np.arange(len(groups)) % 12 >= 8) & is_known
    gallery = is_known & ~is_query
    named = {}
    for score in ("cosine", "auto"):
        space = EmbeddingSpace.fit(vectors[gallery], groups[gallery], score=score)
        found = space.search(vectors[is_query], 1, false_accept=0.1)
        is_right = found.accepted[:, 0].numpy() & (groups[gallery][found.rows[:, 0]] == groups[is_query])
        named[score] = is_right.mean()
        assert space.search(vectors[~is_known], 1, false_accept=0.1).accepted.double().mean() <= 0.15
        expected = space.expected_found(0.1)
        assert expected.low - 0.05 <= named[score] <= expected.high + 0.05
    assert space.fitted.name in ("ledoit-wolf", "within groups")
    assert named["auto"] >= 2 * named["cosine"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_at_most_the_level_of_points_is_accepted_when_each_is_left_out(seed):
    """Exchangeability of the scores of all points bounds the number that is accepted, for every set of points."""
    points = unit(40, 3, seed)
    p = []
    for left_out in range(len(points)):
        space = EmbeddingSpace.fit(np.delete(points, left_out, 0), score="cosine", **ALL)
        p.append(float(space.search(points[left_out], 1).p_values))
    for level in (0.05, 0.1, 0.25, 0.5):
        assert np.mean(np.array(p) <= level + 1e-12) <= level


@pytest.mark.parametrize("rows_per_group", [1, 4, 10_000])
def test_tight_groups_keep_the_level(rows_per_group):
    """Photographs of one person, copies of a text: once their group is left out, the siblings of the best row match far
    worse than a query of a new group does."""
    accepted = []
    for seed in range(3):
        rows = unit(21, 16, seed)[:, None] + 0.02 * unit(21 * 20, 16, seed + 10).reshape(21, 20, 16)
        for left_out in range(21):
            known = np.delete(rows, left_out, 0).reshape(400, 16)
            known /= np.linalg.norm(known, axis=1, keepdims=True)
            options = {"rows_per_group": rows_per_group, "calibration_rows": 10_000}
            space = EmbeddingSpace.fit(known, np.arange(400) // 20, score="cosine", **options)
            accepted.append((space.search(rows[left_out, :5], 1).p_values <= 0.05 + 1e-12).double().mean())
    assert np.mean(accepted) <= 0.05
