"""p-values of `EmbeddingSpace` beside their definitions, in plain numpy."""

import itertools

import numpy as np
import pytest
import torch

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
def test_the_sharp_and_the_bounded_rule_leave_one_group_out_by_their_definition(groups, rows_per_group):
    rows, queries = rows_and_queries(groups)
    options = {"score": "cosine", "rows_per_group": rows_per_group, "calibration_rows": 10_000}
    space = EmbeddingSpace.fit(rows, groups, rule="sharp", **options)
    calibration = space.calibration.ids.numpy()
    best = to_groups(rows @ rows.T, groups)
    best[np.arange(len(rows)), groups] = -np.inf
    expected = sharp_p_values((queries @ rows.T).max(1), best[calibration], groups[calibration])
    found = space.search(queries, 1)
    np.testing.assert_allclose(found.p_values[:, 0], expected, atol=1e-12)
    for level in (0.2, 0.5):  # one number decides
        above = found.scores[:, 0] >= space.threshold(level)
        np.testing.assert_array_equal(above, found.p_values[:, 0] <= level + 1e-12)
    bounded = EmbeddingSpace.fit(rows, groups, **options)
    to_rows, own = queries @ rows.T, leave_one_group_out(rows @ rows.T, groups)
    strict = np.array(p_values(found, to_rows, groups, calibration.tolist(), own))[:, 0]
    p_bounded = bounded.search(queries, 1).p_values[:, 0].numpy()
    np.testing.assert_allclose(p_bounded, np.maximum(expected, strict / 1.2), atol=1e-12)
    assert (p_bounded > expected + 1e-9).any()
    assert (p_bounded < strict - 1e-9).any()
    above = found.scores[:, 0] >= bounded.threshold(0.5)  # one number accepts what search does, or less
    assert above.any()
    assert (p_bounded[above] <= 0.5).all()


@pytest.mark.parametrize("rule", ["bounded", "sharp"])
def test_one_row_per_group_has_the_exact_rule(rule):
    rows, queries = rows_and_queries(np.arange(30))
    given, strict = (EmbeddingSpace.fit(rows, rule=rule).search(queries, 2).p_values for rule in (rule, "strict"))
    assert torch.equal(given, strict)


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
    strict, bounded, sharp = (
        EmbeddingSpace.fit(rows, groups, rule=rule, **options) for rule in ("strict", "bounded", "sharp")
    )
    best, top = (calibration @ rows.T).max(1), -np.sort(-(queries @ rows.T), axis=1)[:, :2]
    shares = [(best[names == name, None, None] >= top).mean(0) for name in np.unique(names)]
    expected = (1 + np.sum(shares, axis=0)) / (len(shares) + 1)
    np.testing.assert_allclose(strict.search(queries, 2).p_values, expected, atol=1e-12)
    assert (2 * sharp.search(queries, 2).p_values >= strict.search(queries, 2).p_values).all()
    if calibration_groups is not None:
        expected = sharp_p_values(top[:, 0], to_groups(calibration @ rows.T, groups), names)
    np.testing.assert_allclose(
        sharp.search(queries, 2).p_values[:, 0], np.ravel(expected)[:: expected.ndim], atol=1e-12
    )
    if calibration_groups is not None:
        larger = torch.maximum(sharp.search(queries, 2).p_values, strict.search(queries, 2).p_values / 1.2)
        torch.testing.assert_close(bounded.search(queries, 2).p_values, larger)


def margins(cosines, points, groups, left_out=None) -> dict[int, float]:
    """Return the score of each group by the cosines of a query to its rows, as if the group left out were not there."""
    names = [name for name in np.unique(groups) if name != left_out]
    above = np.full(len(groups), np.nan)
    for row, own in enumerate(groups):
        others = [(points[row] @ points[groups == name].T).max() for name in names if name != own]
        above[row] = cosines[row] - np.mean(np.sort(others)[-3:])
    return {name: np.log(np.exp(20 * above[groups == name]).sum()) / 20 for name in names}


def test_margins_follow_their_definition():
    groups = np.repeat(np.arange(16), 3)
    rows, queries = rows_and_queries(groups)
    space = EmbeddingSpace.fit(rows, groups, score="margin", rule="sharp", **ALL)
    points, own = rows.astype(float), space.calibration.ids.numpy()
    table = np.full((len(own), 16), -np.inf)
    for line, row in zip(table, own, strict=True):
        scores = margins(points[row] @ points.T, points, groups, groups[row])
        line[[*scores]] = [*scores.values()]
    np.testing.assert_allclose(space.calibration.scores, -np.sort(-table, axis=1)[:, :2], atol=2e-6)
    found = space.search(queries, 3)
    expected = np.array([max(margins(query @ points.T, points, groups).values()) for query in queries.astype(float)])
    np.testing.assert_allclose(found.scores[:, 0], expected, atol=2e-6)
    same = groups[found.rows] == groups[found.rows[:, :1]]
    assert (found.p_values == found.p_values[:, :1])[same].all()
    np.testing.assert_allclose(found.p_values[:, 0], sharp_p_values(expected, table, groups[own]), atol=1e-12)


def noisy_groups(num_groups: int, size: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Groups in 20 of 60 dimensions, and more noise in the others."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), size)
    centers = np.pad(generator.standard_normal((num_groups, 20)), ((0, 0), (0, 40)))
    noise = generator.standard_normal((len(groups), 60)) * np.repeat([0.6, 2.0], [20, 40])
    return torch.from_numpy(centers[groups] + noise).float(), groups


def test_margins_name_more_at_the_same_level():
    vectors, groups = noisy_groups(150, 12, 0)
    is_known = groups < 90
    is_query = (np.arange(len(groups)) % 12 >= 8) & is_known
    gallery = is_known & ~is_query
    named = {}
    for score in ("cosine", "margin"):
        space = EmbeddingSpace.fit(vectors[gallery], groups[gallery], score=score)
        found = space.search(vectors[is_query], 1, false_accept=0.1)
        is_right = found.accepted[:, 0].numpy() & (groups[gallery][found.rows[:, 0]] == groups[is_query])
        named[score] = is_right.mean()
        assert space.search(vectors[~is_known], 1, false_accept=0.1).accepted.double().mean() <= 0.15
        expected = space.expected_found(0.1)
        assert expected.low - 0.05 <= named[score] <= expected.high + 0.05
    assert named["margin"] >= 1.3 * named["cosine"] > 0


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
