"""p-values of `EmbeddingSpace` beside their definitions, in plain numpy."""

import itertools

import numpy as np
import pytest

from hf_sphere.search import EmbeddingSpace

ALL = {"rows_per_group": 10_000, "calibration_rows": 10_000}


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


def leave_one_group_out(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.array([row[groups != group].max() for row, group in zip(scores, groups, strict=True)])


SIZES = {
    "one row": np.arange(30),
    "five rows": np.arange(60) // 5,
    "unequal": np.repeat(np.arange(6), [1, 2, 3, 5, 8, 13]),
}


@pytest.mark.parametrize("groups", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rows_per_group", [1, 3, 10_000])
def test_leave_one_group_out_follows_its_definition(groups, rows_per_group):
    centers, dim = unit(groups.max() + 1, 6, 0), 6
    rows = centers[groups] + 0.5 * unit(len(groups), dim, 1)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    queries = unit(40, dim, 2)
    queries[:10] = rows[:10] * np.float32(0.9) + np.float32(0.2) * queries[:10]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    space = EmbeddingSpace.fit(rows, groups, score="cosine", rows_per_group=rows_per_group, calibration_rows=10_000)
    calibration = space.calibration.ids.tolist()
    assert max(np.bincount(groups[calibration])) <= rows_per_group
    found = space.search(queries, 4)
    own = leave_one_group_out(rows @ rows.T, groups)
    expected = p_values(found, queries @ rows.T, groups, calibration, own)
    np.testing.assert_allclose(found.p_values, expected, atol=1e-12)


@pytest.mark.parametrize("groups", [np.arange(24), np.arange(24) // 2], ids=["one row", "two rows"])
def test_tied_scores_count_as_reached(groups):
    rows = vertices()
    space = EmbeddingSpace.fit(rows, groups, score="cosine", **ALL)
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
    space = EmbeddingSpace.fit(
        rows, groups, calibration=calibration, calibration_groups=calibration_groups, score="cosine"
    )
    found = space.search(queries, 2)
    best, names = (calibration @ rows.T).max(1), np.arange(36) if calibration_groups is None else calibration_groups
    top = -np.sort(-(queries @ rows.T), axis=1)[:, :2]
    shares = [(best[names == name, None, None] >= top).mean(0) for name in np.unique(names)]
    expected = (1 + np.sum(shares, axis=0)) / (len(shares) + 1)
    np.testing.assert_allclose(found.p_values, expected, atol=1e-12)


def test_density_leaves_out_the_groups_of_the_query_and_of_the_row():
    rows, queries, groups = unit(18, 4, 0), unit(20, 4, 1), np.arange(18) // 3
    space = EmbeddingSpace.fit(rows, groups, score="density", **ALL)
    cosines, to_rows = (rows @ rows.T).astype(float), (queries @ rows.T).astype(float)

    def density(to_all, *left_out):
        return np.sort(to_all[~np.isin(groups, left_out)])[-10:].mean()

    scores = np.array([[2 * q[j] - density(q) - density(cosines[j], groups[j]) for j in range(18)] for q in to_rows])
    own = [
        max(
            2 * cosines[i, j] - density(cosines[i], groups[i]) - density(cosines[j], groups[i], groups[j])
            for j in range(18)
            if groups[i] != groups[j]
        )
        for i in range(18)
    ]

    def others(query, group):
        q = to_rows[query]
        return max(
            2 * q[j] - density(q, group) - density(cosines[j], group, groups[j])
            for j in range(18)
            if groups[j] != group
        )

    found = space.search(queries, 2)
    np.testing.assert_allclose(found.scores[:, 0], scores.max(1), atol=1e-6)
    np.testing.assert_allclose(found.p_values, p_values(found, scores, groups, range(18), own, others), atol=1e-12)


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
