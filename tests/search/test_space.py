"""EmbeddingSpace: levels, changes, names, files and invalid input; test_matching_formula.py has the p-values."""

import copy
import logging
from unittest import mock

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from clustered import clusters, unit
from scipy import stats

from hf_sphere.metrics import energy_test
from hf_sphere.search import EmbeddingSpace, ImageSource, NeighborSearch, neighbor_search
from hf_sphere.search.vectors import sample_rows


@pytest.fixture
def space():
    return EmbeddingSpace.fit(*clusters(), score="cosine")


@pytest.mark.parametrize("level", [0.05, 0.1])
def test_false_accepts_of_strangers_stay_at_the_level_with_one_row_per_group(level):
    generator = torch.Generator().manual_seed(1)
    counts = []
    for _ in range(100):
        space = EmbeddingSpace.fit(unit(60, 6, generator=generator), score="cosine")
        found = space.search(unit(100, 6, generator=generator), 1, false_accept=level)
        counts.append(int(found.accepted.sum()))
    error = np.std(counts) / 10  # the spaces are independent
    assert level / 2 < np.mean(counts) / 100 <= level + 3 * error / 100


def test_false_accepts_given_a_separate_calibration_follow_their_exact_law():
    generator, level, num_groups, strangers = torch.Generator().manual_seed(2), 0.1, 39, 40
    counts = []
    for _ in range(400):
        space = EmbeddingSpace.fit(
            unit(30, 8, generator=generator), calibration=unit(num_groups, 8, generator=generator), score="cosine"
        )
        counts.append(int(space.search(unit(strangers, 8, generator=generator), 1, false_accept=level).accepted.sum()))
    k = int(level * (num_groups + 1))
    law = stats.betabinom(strangers, k, num_groups + 1 - k)
    edges = [0, 2, 4, 6, 9, strangers + 1]
    observed = np.histogram(counts, edges)[0]
    expected = 400 * np.diff(law.cdf(np.array(edges) - 1))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_a_level_below_the_smallest_p_value_is_refused_and_the_best_match_has_it(space):
    assert space.smallest_p_value == pytest.approx(1 / 41)
    with pytest.raises(ValueError, match=r"false_accept=0.01 needs 99 calibration groups; there are 40"):
        space.search(unit(1, 16), 1, false_accept=0.01)
    found = space.search(space.vectors[:1], 3, false_accept=0.1)
    assert found.rows[0, 0] == 0
    assert found.scores[0, 0] == pytest.approx(1)
    assert found.p_values[0, 0] >= space.smallest_p_value - 1e-12
    space.calibrate(score="cosine", rule="strict")
    assert space.smallest_p_value == pytest.approx(1.2 / 41)
    assert space.search(space.vectors[:1], 1).p_values[0, 0] == pytest.approx(1.2 / 41)
    assert found.accepted.dtype == torch.bool
    assert found.p_values.shape == (1, 3)


@pytest.mark.parametrize("rule", ["sharp", "bounded"])
def test_the_smallest_p_value_is_reached_also_where_twins_stand_out(rule):
    points = unit(30 * 8, 16).view(30, 8, 16)
    points[1] = points[0] + 0.05 * unit(8, 16)  # all of their rows have a better match than any other row
    space = EmbeddingSpace.fit(points.flatten(0, 1), np.arange(240) // 8, score="cosine", rule=rule)
    best = space.search(points[5], 1).p_values.min()
    assert space.smallest_p_value == pytest.approx(2 / 30)
    assert best >= space.smallest_p_value - 1e-12
    for use in (space.threshold, lambda level: space.search(points[5], 1, false_accept=level)):
        with pytest.raises(ValueError, match=r"false_accept=0\.05 needs .* smallest p-value is 0\.06"):
            use(0.05)


@pytest.mark.parametrize("separate", [False, True])
def test_rows_above_the_threshold_are_accepted_and_few_below_it(separate):
    vectors, groups = clusters(60, 4, noise=0.3)
    calibration = {"calibration": unit(80, 16, seed=9)} if separate else {}
    space = EmbeddingSpace.fit(vectors, groups, score="cosine", **calibration)
    found = space.search(unit(500, 16, seed=5), 5, false_accept=0.1)
    above = found.scores >= space.threshold(0.1)
    assert not (above & ~found.accepted).any()
    assert above.sum() == found.accepted.sum() if separate else above.sum() >= found.accepted.sum() / 2


@pytest.mark.parametrize("score", ["cosine", "margin"])
def test_a_changed_space_has_the_calibration_of_a_new_one(score):
    vectors, groups = clusters()
    space = EmbeddingSpace.fit(vectors, groups, score=score, calibration_rows=100)
    added, others = clusters(10, 3, seed=7)
    ids = space.add(others + 100, added)
    assert ids == list(range(200, 230))
    assert space.remove([3, 101]) == 8
    assert space.remove(ids=[0, 229]) == 2
    changed = space.calibration
    space._calibration = None
    for name in ("groups", "scores", "match_groups", "matches", "ids"):
        torch.testing.assert_close(getattr(changed, name), getattr(space.calibration, name))


def test_an_addition_recomputes_only_scores_that_can_change(space, monkeypatch):
    searched, search = [], NeighborSearch.search_others

    def counted(self, queries, k, keys, query_keys):
        searched.append((len(queries), len(self.references)))
        return search(self, queries, k, keys, query_keys)

    monkeypatch.setattr(NeighborSearch, "search_others", counted)
    space.add(99, unit(2, 16, seed=3))
    assert space.calibration.num_groups == 41
    assert searched == [(202, 2), (2, 202)]  # all among the new rows, the new ones among all


def test_identify_returns_the_name_or_none():
    vectors, groups = clusters(30, 4, noise=0.02)
    space = EmbeddingSpace.fit(vectors, [f"person {group}" for group in groups], score="cosine")
    assert space.identify(vectors[8], 0.1) == "person 2"
    stranger = -vectors.mean(0)
    assert space.identify(torch.stack([vectors[0], stranger]), 0.1) == ["person 0", None]


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_samples_of_any_scale_are_compared_alike(scale):
    x, y = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0)).double() + torch.tensor([[[0]], [[0.5]]])
    distance, p_value = energy_test(x, y)
    scaled_distance, scaled_p_value = energy_test(scale * x, scale * y)
    assert scaled_p_value == p_value
    assert scaled_distance == pytest.approx(scale * distance)


def test_a_change_by_someone_else_is_not_overwritten(space, tmp_path):
    space.save(tmp_path / "space")
    first, second = (EmbeddingSpace.load(tmp_path / "space") for _ in range(2))
    for _ in range(2):
        first.add(40, unit(1, 16))
        first.save(tmp_path / "space")
    second.add(41, unit(1, 16))
    with pytest.raises(FileExistsError, match=r"space is not replaced: it has changed since it was loaded\. Load it"):
        second.save(tmp_path / "space")
    assert len(EmbeddingSpace.load(tmp_path / "space")) == 202


def test_margins_are_those_of_the_directions():
    vectors, groups = clusters()
    lengths = 1 + torch.arange(len(vectors))[:, None] % 7
    spaces = [EmbeddingSpace(points, groups) for points in (vectors, lengths * vectors)]  # as an index holds them
    for space in spaces:
        space.calibrate(score="margin")
    scores = [space.calibration.scores for space in spaces]  # of float32 cosines
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


def test_margins_are_refused_for_another_distance_and_have_no_threshold():
    space = EmbeddingSpace(*clusters(), metric={"distance": "euclidean"})
    with pytest.raises(ValueError, match="the distance of margins must be one of cosine; got 'euclidean'"):
        space.calibrate(score="margin")
    assert torch.equal((found := space.search(space.vectors[:2], 3)).distances, -found.scores)
    space = EmbeddingSpace.fit(*clusters(), score="cosine")
    space.calibrate(score="margin")
    with pytest.raises(ValueError, match="score must be one of cosine; got 'margin'"):
        space.threshold(0.2)
    torch.testing.assert_close(space.search(space.vectors[:2], 3).distances[:, 0], torch.zeros(2).double())


def test_an_approximate_search_accepts_no_stranger_more():
    pytest.importorskip("faiss")
    vectors, groups = clusters(400, 5)
    spaces = [EmbeddingSpace.fit(vectors, groups, score="cosine", kind=kind) for kind in ("torch", "ivf")]
    strangers = unit(300, 16, seed=8)
    exact, approximate = (space.search(strangers, 1, false_accept=0.1) for space in spaces)
    assert (approximate.p_values >= exact.p_values - 1e-12).all()


def test_rows_are_added_to_an_index_without_training_and_removed(monkeypatch, tmp_path):
    pytest.importorskip("faiss")
    built, new_index = [], neighbor_search.new_index
    monkeypatch.setattr(neighbor_search, "new_index", lambda *args: built.append(args) or new_index(*args))
    vectors, groups = clusters(400, 5)
    space = EmbeddingSpace.fit(vectors[:1900], groups[:1900], score="cosine", kind="ivf")
    space.save(tmp_path / "space")
    space = EmbeddingSpace.load(tmp_path / "space")
    space.add(groups[1900:], vectors[1900:])
    space.search(vectors[:1], 5)
    assert len(built) == 1
    space.remove([7, 390])
    found = space.search(vectors[1900:], 5, false_accept=0.1)
    expected = EmbeddingSpace(space.vectors, space.groups, kind="torch").search(vectors[1900:], 5)
    assert (found.rows == expected.rows).double().mean() > 0.98
    space.save(tmp_path / "space")
    assert torch.equal(EmbeddingSpace.load(tmp_path / "space").search(vectors[1900:], 5).rows, found.rows)


def test_a_replaced_vector_is_found_at_its_new_place():
    pytest.importorskip("faiss")
    vectors, groups = clusters(400, 5)
    space = EmbeddingSpace(vectors, groups, kind="ivf")
    space.search(vectors[:1], 1)
    kept = torch.tensor([row for row in range(2000) if row != 5])
    space._set(kept, -vectors[:1], torch.tensor([5]), groups[torch.tensor([*kept, 5])], None)
    assert space.search(-vectors[:1], 1).ids == [[5]]
    assert 5 not in space.search(vectors[5:6], 5).ids[0]


def test_unit_vectors_are_not_copied_and_those_of_half_precision_are_unit():
    vectors = unit(20, 8)
    assert EmbeddingSpace.fit(vectors).vectors.data_ptr() == vectors.data_ptr()
    norms = EmbeddingSpace.fit(unit(20, 64).half()).vectors.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(20), atol=1e-6, rtol=0)


def test_a_saved_space_gives_equal_results(tmp_path):
    options = {"score": "cosine", "model": "old", "seed": np.int64(3), "rows_per_group": np.int32(2)}
    vectors, groups = clusters()
    vectors = torch.cat([vectors, torch.zeros(1, 16)])
    space = EmbeddingSpace.fit(vectors, [*groups, 0], invalid="skip", **options)
    space.add(77, unit(3, 16, seed=6))
    space.remove([5])
    space.save(tmp_path / "space")
    loaded = EmbeddingSpace.load(tmp_path / "space")
    queries = unit(20, 16, seed=2)
    first, second = (each.search(queries, 4, false_accept=0.2) for each in (space, loaded))
    for name in ("rows", "scores", "p_values", "accepted"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert (loaded.groups, loaded.model, repr(loaded)) == (space.groups, "old", repr(space))
    assert loaded.skipped == [200]
    assert loaded.add(5, unit(1, 16)) == [203]


@pytest.mark.parametrize("score", ["cosine", "margin"])
def test_a_loaded_space_is_changed_like_the_saved_one(tmp_path, score):
    space = EmbeddingSpace.fit(*clusters(), score=score)
    space.save(tmp_path / "space")
    loaded = EmbeddingSpace.load(tmp_path / "space")
    for each in (space, loaded):
        each.remove([0])
        each.add(50, unit(4, 16, seed=11))
    assert torch.equal(space.calibration.scores, loaded.calibration.scores)


@pytest.mark.parametrize("is_windows", [True, False])
def test_a_space_replaces_its_folder_if_mapped_files_are_locked(
    tmp_path, space, is_windows, monkeypatch, refused_renames
):
    space.save(tmp_path / "space")
    monkeypatch.setattr("hf_sphere.utils.files.IS_WINDOWS", is_windows)
    loaded = EmbeddingSpace.load(tmp_path / "space")
    if is_windows:
        loaded.save(tmp_path / "space")
        assert EmbeddingSpace.load(tmp_path / "space").vectors.equal(space.vectors)
    else:  # the file is mapped, and the stand-in notices it
        with pytest.raises(PermissionError):
            loaded.save(tmp_path / "space")
    assert bool(refused_renames) is not is_windows


def test_rows_are_added_behind_the_others_without_a_copy_while_there_is_room(tmp_path, space):
    space.save(tmp_path / "space")
    loaded, new = EmbeddingSpace.load(tmp_path / "space"), unit(2, 16, seed=3)
    loaded.add(99, new)  # into memory with room for more
    start, old = loaded.vectors.data_ptr(), loaded.vectors
    loaded.add(100, unit(1, 16, seed=4))
    assert loaded.vectors.data_ptr() == start
    assert len(old) == len(space) + 2
    loaded.add(101, unit(len(space), 16, seed=5))  # more than the room
    assert loaded.vectors[: len(space) + 2].equal(torch.cat([space.vectors, new]))
    assert EmbeddingSpace.load(tmp_path / "space").vectors.equal(space.vectors)  # the file has not changed


def test_copies_of_a_space_do_not_overwrite_rows_of_each_other(space):
    space.add(99, unit(1, 16, seed=3))
    other = copy.copy(space)
    space.add(100, unit(1, 16, seed=4))
    other.add(100, unit(1, 16, seed=5))
    assert space.vectors[-1:].equal(unit(1, 16, seed=4))
    assert other.vectors[-1:].equal(unit(1, 16, seed=5))


def test_separate_queries_are_saved(tmp_path):
    space = EmbeddingSpace.fit(unit(20, 8), calibration=unit(30, 8, seed=1), calibration_groups=[0, 1, 2] * 10)
    space.save(tmp_path / "space")
    loaded = EmbeddingSpace.load(tmp_path / "space")
    for each in (space, loaded):
        each.add(None, unit(5, 8, seed=2))
    assert torch.equal(space.calibration.scores, loaded.calibration.scores)
    assert loaded.smallest_p_value == 1 / 4


def test_separate_queries_without_names_count_alike_whatever_groups_the_space_has():
    persons = unit(15, 16)
    rows, queries = (persons.repeat_interleave(n, 0) + 0.7 * unit(15 * n, 16, seed=n) for n in (4, 1))
    strangers = unit(19, 16, seed=2)
    space = EmbeddingSpace.fit(rows, [n // 4 for n in range(60)], calibration=strangers, score="margin")
    found = space.search(queries, 1, false_accept=0.05)
    at_least = (space.calibration.scores[:, 0] >= found.scores).sum(1)
    torch.testing.assert_close(found.p_values[:, 0], (1 + at_least).double() / 20)
    assert found.accepted.sum() > 7
    assert space.expected_found(0.05).share > 0.5


def test_vectors_that_are_not_unit_are_normalized_and_counted(caplog):
    vectors = unit(20, 8)
    with caplog.at_level(logging.WARNING):
        space = EmbeddingSpace.fit(torch.cat([vectors[:15], 3 * vectors[15:]]))
    assert "5 of 20 vectors are not unit vectors (norms from 3 to 3)" in caplog.text
    torch.testing.assert_close(space.vectors, vectors)


@pytest.mark.parametrize("convert", [np.int64, torch.tensor, int, lambda name: [np.int64(name)]])
def test_names_of_numpy_and_torch_are_those_of_python(space, convert):
    assert space.remove(convert(3)) == 5
    space.add(convert(3), unit(1, 16))
    assert space.groups[-1] == 3
    assert space.remove(ids=convert(7)) == 1


def test_groups_and_queries_of_many_kinds_are_accepted(space):
    for names in ([np.str_("a"), np.str_("b")], np.array(["a", "b"])):
        assert EmbeddingSpace.fit(unit(2, 4), names).groups == ["a", "b"]
    assert space.search(space.vectors[3].tolist(), 1).rows.tolist() == [[3]]
    assert space.identify(space.vectors[5].tolist(), 0.5) == 1


def test_the_last_group_is_searched_without_a_level_and_saved(tmp_path, space):
    space.remove(range(1, 40))
    assert space.search(space.vectors[:2], 3).p_values is None
    with pytest.raises(ValueError, match="of one group"):
        space.search(space.vectors[:1], 1, false_accept=0.9)
    space.save(tmp_path / "space")
    space.add(50, unit(3, 16))
    assert space.calibration.num_groups == 2


def test_decisions_by_margins_do_not_depend_on_k():
    space = EmbeddingSpace.fit(*clusters(80, 5, noise=0.3))
    queries = unit(50, 16, seed=2)
    one, many = (space.search(queries, k, false_accept=0.2) for k in (1, 400))
    torch.testing.assert_close(many.p_values[:, :1], one.p_values)
    assert torch.equal(many.rows[:, :1], one.rows)
    assert torch.equal(many.p_values.amin(1, keepdim=True), one.p_values)


def test_a_query_whose_best_rows_are_of_one_group_finds_the_next_group():
    vectors, groups = clusters(5, 600, noise=0.01)
    space = EmbeddingSpace.fit(vectors, groups, score="cosine")
    found = space._find_groups(vectors[:4], space._candidates(vectors[:4], 20))
    expected = (vectors[:4] @ vectors[600:].T).max(1).values.double()
    torch.testing.assert_close(found.scores[:, 1], expected)
    assert (found.groups[:, 1] == groups[600:][(vectors[:4] @ vectors[600:].T).argmax(1)]).all()


def test_a_group_of_the_calibration_cannot_be_added_later(tmp_path):
    fit = {"calibration": unit(30, 4, seed=1), "calibration_groups": [f"new {n}" for n in range(30)]}
    EmbeddingSpace.fit(unit(2, 4), ["a", "b"], score="cosine", **fit).save(tmp_path / "space")
    space = EmbeddingSpace.load(tmp_path / "space")
    with pytest.raises(ValueError, match="groups of calibration queries, such as 'new 7'"):
        space.add("new 7", unit(1, 4))
    assert (len(space), space.groups) == (2, ["a", "b"])
    assert len(space.add("c", unit(1, 4))) == 1


@pytest.mark.parametrize("score", ["cosine", "margin"])
def test_calibration_queries_that_are_rows_are_refused_and_those_that_become_rows_counted(tmp_path, caplog, score):
    vectors, groups = clusters(30)
    strangers = unit(20, 16, seed=1)
    with pytest.raises(ValueError, match=r"2 of 22 calibration queries are rows of the space: 0, 1\. .* leave"):
        EmbeddingSpace.fit(vectors, groups, calibration=torch.cat([vectors[5:7], strangers]), score=score)
    space = EmbeddingSpace.fit(vectors, groups, calibration=strangers, score=score)
    scores = space.calibration.scores
    with pytest.raises(ValueError, match=r"1[45]\d of 150 calibration queries are rows"):
        space.calibrate(3 * vectors, score=score)  # which rounds them
    assert torch.equal(space.calibration.scores, scores)
    space.save(tmp_path / "space")
    for each in (space, EmbeddingSpace.load(tmp_path / "space")):
        each.add(99, unit(5, 16, seed=2))
        assert "are rows" not in caplog.text
        each.add(100, torch.cat([unit(1, 16, seed=3), strangers[5:9]]))
        assert "4 of 20 calibration queries are rows of the space: 5, 6, 7, 8. " in caplog.text
        caplog.clear()


def test_nothing_is_changed_by_an_invalid_addition_or_calibration(space):
    with pytest.raises(ValueError, match="16 dimensions"):
        space.add(3, unit(2, 5))
    assert len(space) == 200
    space = EmbeddingSpace.fit(*clusters(), calibration=unit(30, 16, seed=1), score="cosine")
    with pytest.raises(ValueError, match="16 dimensions"):
        space.calibrate(unit(3, 5))
    space.add(99, unit(1, 16))
    assert (space.calibration.ids < 0).all()


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "hyperbolic"])
@pytest.mark.parametrize("kind", ["torch", "flat"])
def test_search_others_leaves_out_the_own_group(distance, kind):
    if kind == "flat":
        pytest.importorskip("faiss")
        if distance == "hyperbolic":
            pytest.skip("FAISS has no hyperbolic distance")
    vectors, groups = clusters(10, 7)
    vectors = torch.cat([vectors, vectors[:3]])  # with copies in another group
    groups = torch.cat([groups, torch.tensor([10, 10, 10])])
    search = NeighborSearch(vectors, distance=distance, kind=kind)
    distances, rows = search.search_others(vectors, 70, groups, groups)
    everything = NeighborSearch(vectors, distance=distance, kind="torch").search(vectors, 73)
    for row in range(0, 73, 9):
        kept = groups[everything[1][row]] != groups[row]
        count = int(kept.sum())
        torch.testing.assert_close(distances[row, :count][:70], everything[0][row][kept][:70])
        assert (rows[row, count:] == -1).all()
        assert distances[row, count:].isinf().all()


def test_the_energy_test_has_uniform_p_values_for_equal_distributions():
    generator = torch.Generator().manual_seed(4)
    values = [
        energy_test(unit(20, 5, generator=generator), unit(15, 5, generator=generator), permutations=99, seed=seed)[1]
        for seed in range(300)
    ]
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_the_energy_distance_is_that_of_its_definition():
    x, y = unit(6, 3).double(), unit(9, 3, seed=1).double() + 1
    between, within = torch.cdist(x, y).mean(), torch.cdist(x, x).mean() + torch.cdist(y, y).mean()
    assert energy_test(x, y)[0] == pytest.approx(float(2 * between - within))


TABLES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table, "mapping": dict}
USES = {
    "fit": lambda x: EmbeddingSpace.fit(unit(2, 4), x),
    "calibration": lambda x: EmbeddingSpace.fit(unit(4, 4), calibration=unit(2, 4), calibration_groups=x),
    "add": lambda x: EmbeddingSpace.fit(unit(4, 4), [*"abcd"]).add(x, unit(2, 4)),
    "remove": lambda x: EmbeddingSpace.fit(unit(4, 4), [*"abcd"]).remove(x),
    "source": lambda x: ImageSource.of(unit(2, 4), content="vector").read_groups(x),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("table", TABLES)
def test_a_table_or_mapping_is_no_column_of_names(table, use):
    with pytest.raises(ValueError, match="must be a list, an array or a column"):
        USES[use](TABLES[table]({"a": ["a", "b"]}))


@pytest.mark.parametrize("name", [3.0, b"a", True, object(), [1.5]], ids=lambda name: type(name).__name__)
@pytest.mark.parametrize("use", ["add", "remove"])
def test_what_is_no_name_is_an_error_that_says_so(name, use):
    with pytest.raises(ValueError, match=r"must be all texts or all integers|there is no group"):
        USES[use](name)


def test_a_space_searches_once_and_samples_its_rows_once():
    vectors, groups = clusters()
    with (
        mock.patch.object(
            NeighborSearch, "search_others", autospec=True, side_effect=NeighborSearch.search_others
        ) as search,
        mock.patch("hf_sphere.search.rows.sample_rows", side_effect=sample_rows) as sample,
    ):
        EmbeddingSpace.fit(vectors, groups)
    assert search.call_count == 1  # by the rows that calibrate
    assert sample.call_count == 1


def test_scores_and_rules_by_default_depend_on_groups_and_calibration():
    vectors, groups = clusters()
    assert (EmbeddingSpace.fit(vectors, groups).score, EmbeddingSpace.fit(vectors).score) == ("margin", "cosine")
    assert EmbeddingSpace(vectors, groups, metric={"distance": "euclidean"}).score == "cosine"
    calibration = {"calibration": unit(60, 16, seed=3), "calibration_groups": 100 + np.arange(60) // 3}
    assert EmbeddingSpace.fit(vectors, groups, score="cosine", **calibration).calibration.rule == "bounded"
    assert EmbeddingSpace.fit(vectors, groups, score="cosine", rule="sharp", **calibration).calibration.rule == "sharp"
    assert EmbeddingSpace.fit(vectors, groups, score="cosine").calibration.rule == "bounded"


def test_queries_and_calibration_are_scored_alike_with_large_groups():
    """The first 50 rows are of one group of 60, so that more are searched."""
    space = EmbeddingSpace.fit(*clusters(30, 60, noise=0.05))
    queries = unit(40, 16, seed=5)
    found = space.search(queries, 1, false_accept=0.2)
    as_calibration = space._find(queries, torch.full((40,), 10**9))
    torch.testing.assert_close(found.scores[:, 0], as_calibration.scores[:, 0], atol=1e-9, rtol=0)


def test_a_space_that_is_calibrated_again_after_loading_leaves_groups_out_of_margins(tmp_path):
    space = EmbeddingSpace.fit(*clusters())
    space.save(tmp_path / "space")
    loaded = EmbeddingSpace.load(tmp_path / "space")
    loaded.calibrate()
    assert torch.equal(loaded.calibration.scores, space.calibration.scores)


@pytest.mark.parametrize("size", [1, 5])
def test_margins_of_two_groups_are_above_the_other_group(size):
    """The third nearest group of a row does not exist."""
    space = EmbeddingSpace.fit(*clusters(2, size))
    assert space._offsets(torch.arange(2 * size)).isfinite().all()
    assert space.calibration.scores[:, 0].isfinite().all()
    assert space.search(space.vectors, 1).rows[:, 0].tolist() == list(range(2 * size))
