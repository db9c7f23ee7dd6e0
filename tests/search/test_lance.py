"""LanceSpace: the numbers of an EmbeddingSpace, several writers, interrupted writes, filters, the index, bad input."""

import signal
import sys
import time

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from clustered import clusters, unit
from datasets import Dataset
from fresh_python import FreshPython
from two_processes import run_two

from hf_sphere.search import EmbeddingSpace, LanceSpace

lancedb = pytest.importorskip("lancedb", reason="needs pip install 'hf_sphere[lance]'")


def batches(vectors, groups, size=70):
    names = np.array([f"group '{group}'" for group in groups])
    for start in range(0, len(vectors), size):
        part = slice(start, start + size)
        yield {"vector": vectors[part], "name": names[part], "is_odd": (groups[part] % 2).bool()}


@pytest.fixture
def space(tmp_path):
    return LanceSpace.create(tmp_path / "space", batches(*clusters(60)), group_column="name")


def check_equal(space, memory, queries):
    """Compare the results with those of an EmbeddingSpace."""
    found, expected = (each.search(queries, 6, false_accept=0.1) for each in (space, memory))
    assert found.ids == expected.ids
    rounding = 1e-12 if memory.score == "cosine" else 1e-6  # margins are above cosines of float32
    for name in ("scores", "p_values", "accepted"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=rounding)
    assert space.smallest_p_value == pytest.approx(memory.smallest_p_value)
    if memory.score == "cosine":
        assert space.threshold(0.2) == pytest.approx(memory.threshold(0.2))


def test_row_numbers_of_pandas_are_no_column(tmp_path):
    frame = pandas.DataFrame({"vector": [*unit(30, 4).numpy()]})
    space = LanceSpace.create(tmp_path / "space", frame[frame.index > 9])
    assert space.table.schema.names == ["vector"]
    assert (space.add(frame), space.add(frame[::2])) == (30, 15)


def test_ids_of_many_small_batches_are_compared_at_once(tmp_path, monkeypatch):
    small = ({"vector": rows, "id": [*range(2 * at, 2 * at + 2)]} for at, rows in enumerate(unit(40, 4).split(2)))
    space, conditions, rows_of = LanceSpace.create(tmp_path / "space", small, id_column="id"), [], LanceSpace._rows
    monkeypatch.setattr(LanceSpace, "_rows", lambda *words: conditions.append(words[2]) or rows_of(*words))
    space.add({"vector": rows, "id": [100 + 2 * at, 101 + 2 * at]} for at, rows in enumerate(unit(40, 4).split(2)))
    assert len(conditions) == 1


def test_an_id_of_two_batches_is_refused(tmp_path):
    rows = [{"vector": unit(2, 4), "id": ids} for ids in ([1, 2], [2, 3])]
    with pytest.raises(ValueError, match="ids must be different; 1 are repeated: 2"):
        LanceSpace.create(tmp_path / "space", rows, id_column="id")


SCORES = {
    "cosine": {"score": "cosine"},
    "margin": {},
    "strict": {"rule": "strict"},
    "sharp": {"rule": "sharp"},
    "no groups": {},
}


@pytest.mark.settings(calibration_rows=lambda rows: {"rows": rows}, score=lambda score: {"score": score})
@pytest.mark.parametrize("calibration_rows", [5_000, 40])
@pytest.mark.parametrize("score", SCORES)
def test_results_are_those_of_a_space_in_memory_also_after_changes(tmp_path, score, calibration_rows):
    has_groups = score != "no groups"
    vectors, groups = clusters(25, 12)  # more rows than are calibration queries of a group
    names = [f"group '{group}'" for group in groups] if has_groups else None
    memory = EmbeddingSpace.fit(vectors, names, **SCORES[score], calibration_rows=calibration_rows)
    rows = batches(vectors, groups) if has_groups else vectors.split(70)
    options = {"group_column": "name" if has_groups else None, "calibration_rows": calibration_rows}
    options |= SCORES[score]
    space = LanceSpace.create(tmp_path / "space", rows, **options)
    queries = torch.cat([clusters(60, seed=5)[0][::10], vectors[:20] + 0.1])
    check_equal(space, memory, queries)
    added, others = clusters(8, 3, seed=7)
    assert space.add(batches(added, others + 23) if has_groups else added) == 24
    memory.add([f"group '{group}'" for group in others + 23] if has_groups else None, added)
    removed = {"groups": ["group '3'", "group '26'"]} if has_groups else {"ids": [15, 312]}
    assert space.remove(**removed) == memory.remove(**removed)
    assert space.remove(ids=[0, 320]) == memory.remove(ids=[0, 320]) == 2
    check_equal(space, memory, queries)
    opened = LanceSpace.open(tmp_path / "space")
    check_equal(opened, memory, queries)
    if has_groups:
        assert opened.identify(queries, 0.1) == memory.identify(queries, 0.1)
        assert opened.identify(vectors[20], 0.5) == "group '1'"


def moved(table):
    """Replace the vectors of 100 rows by some near to those of other groups."""
    rows = table.search().where("id >= 200").to_arrow().to_pydict() | {"id": [*range(100)]}
    table.merge_insert("id").when_matched_update_all().execute(pa.table(rows, table.schema))


CHANGES = {
    "merge": moved,
    "update of names": lambda table: table.update(where="id < 150", values_sql={"name": "concat('group ', id / 10)"}),
    "update of a vector": lambda table: table.update(where="id = 7", values={"vector": unit(16).tolist()}),
    "removal": lambda table: table.delete("id < 100"),
}


@pytest.mark.parametrize("undo", ["restore", "checkout"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_calibration_follows_changes_by_lancedb_itself(tmp_path, change, undo):
    vectors, groups = clusters(60, noise=0.3)
    rows = {"vector": vectors, "name": [f"group {group}" for group in groups], "id": [*range(300)]}
    space = LanceSpace.create(tmp_path / "space", rows, group_column="name", id_column="id", score="cosine")
    table, first = space.table, space.table.version
    scores = space.calibration.scores.sort(0).values
    for step in (CHANGES[change], lambda table: getattr(table, undo)(first)):
        step(table)
        stored = table.to_arrow().sort_by("id").to_pydict()
        memory = EmbeddingSpace.fit(stored["vector"], stored["name"], score="cosine")
        expected = memory.calibration.scores.sort(0).values
        if step is CHANGES[change] or undo == "restore":  # a version that one space looks at is not that of others
            opened = LanceSpace.open(tmp_path / "space")
            torch.testing.assert_close(opened.calibration.scores.sort(0).values, expected)
        torch.testing.assert_close(space.calibration.scores.sort(0).values, expected)
    torch.testing.assert_close(expected, scores)


@pytest.mark.parametrize(
    "convert",
    [
        lambda vectors: vectors.numpy(),
        lambda vectors: (5 * part.numpy() for part in vectors.split(70)),
        lambda vectors: {"vector": vectors.tolist()},
        lambda vectors: vectors.requires_grad_(),
        lambda vectors: pandas.DataFrame({"vector": [*vectors.numpy()]}),
        lambda vectors: [pandas.DataFrame({"vector": [*part.numpy()]}) for part in vectors.split(70)],
        lambda vectors: Dataset.from_dict({"vector": vectors.numpy()}),
        lambda vectors: Dataset.from_dict({"vector": vectors.numpy()}).data.table.to_batches(50),
    ],
)
def test_rows_of_many_kinds_are_written(tmp_path, convert):
    vectors = unit(300, 8)
    space = LanceSpace.create(tmp_path / "space", convert(vectors))
    found = space.search(vectors, 1)
    assert found.rows[:, 0].tolist() == list(range(300))
    torch.testing.assert_close(found.scores, torch.ones(300, 1, dtype=torch.float64))
    assert found.p_values is None


def test_rows_in_double_precision_match_themselves_as_in_memory(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((300, 8))
    space = LanceSpace.create(tmp_path / "space", vectors)
    check_equal(space, EmbeddingSpace.fit(vectors, score="cosine"), vectors[::9])


def test_rows_are_sampled_after_the_first_ones_were_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_sphere.search.lance.COMPARED", 10)
    space = LanceSpace.create(tmp_path / "space", unit(40, 8))
    assert space.remove(ids=[]) == 0
    space.remove(ids=range(20))
    assert sorted(space.calibration.ids.tolist()) == list(range(20, 40))


@pytest.mark.parametrize("name", ["index", "calibration"])
def test_tables_that_are_there_are_neither_used_nor_replaced(tmp_path, name):
    lancedb.connect(tmp_path / "space").create_table(name, [{"x": 1}])
    with pytest.raises(FileExistsError, match=rf"has tables already \({name}\)"):
        LanceSpace.create(tmp_path / "space", unit(3, 4))


def test_a_calibration_that_cannot_be_stored_is_used(space, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Retryable commit conflict")

    monkeypatch.setattr(space._database, "create_table", fail)
    assert space.search(unit(2, 16), 1, false_accept=0.5).p_values is not None


def write(number, folder):
    space = LanceSpace.open(folder)
    for part in range(10):
        space.add(batches(unit(40, 16, seed=10 * number + part), torch.full((40,), 100 + number)))


def test_two_processes_lose_no_rows_and_share_no_ids(tmp_path, space):
    run_two(write, tmp_path / "space")
    opened = LanceSpace.open(tmp_path / "space")
    ids = opened.table.search().select(["_rowid"]).to_arrow()["_rowid"].to_pylist()
    assert sorted(ids) == list(range(300 + 800))
    added = torch.cat([unit(40, 16, seed=seed) for seed in range(20)])
    torch.testing.assert_close(opened.search(added, 1).scores, torch.ones(800, 1, dtype=torch.float64))
    assert len(space) == 300
    space.search(added[:1], 1, false_accept=0.5)  # what it knows is not what was added by others


def test_a_killed_write_leaves_a_space_of_whole_batches(tmp_path):
    code = (
        "import sys, itertools, numpy as np\n"
        "from hf_sphere.search import LanceSpace\n"
        "random = np.random.default_rng(0)\n"
        "rows = (random.standard_normal((1_000, 512), dtype=np.float32) for _ in itertools.count())\n"
        "LanceSpace.create(sys.argv[1], rows)\n"
    )
    writer = FreshPython([sys.executable, "-c", code, tmp_path / "space"])
    manifests = tmp_path / "space" / "vectors.lance" / "_versions"
    start = time.monotonic()
    while len([*manifests.glob("*.manifest")]) < 3 and writer.poll() is None and time.monotonic() < start + 120:
        time.sleep(0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    space = LanceSpace.open(tmp_path / "space")
    written = len(space)
    assert written >= 1_000
    assert written % 1_000 == 0
    assert space.add(np.eye(512)) == 512
    assert len(LanceSpace.open(tmp_path / "space")) == written + 512


def test_a_filter_changes_no_p_value_of_a_row(space):
    queries = clusters(60, seed=5)[0][::7]
    every = space.search(queries, len(space), false_accept=0.1)
    found = space.search(queries, 4, false_accept=0.1, where="is_odd AND name <> 'group ''7'''")
    for query in range(len(queries)):
        is_allowed = (every.rows[query] // 5 % 2 == 1) & (every.rows[query] // 5 != 7)
        for name in ("rows", "scores", "p_values", "accepted"):
            assert torch.equal(getattr(found, name)[query], getattr(every, name)[query][is_allowed][:4])
    assert not (found.accepted.any(1) & ~every.accepted.any(1)).any()


def test_a_filter_that_few_rows_fulfill_is_filled_up(space):
    found = space.search(unit(2, 16), 7, false_accept=0.2, where="name = 'group ''7'''")
    assert found.rows.sort().values[0].tolist() == [-1, -1, 35, 36, 37, 38, 39]
    assert found.p_values[0, -1] == 1
    assert not space.search(unit(2, 16), 2, false_accept=0.2, where="name = 'x'").accepted.any()


def test_an_index_finds_what_an_exact_search_finds(tmp_path):
    vectors, groups = clusters(1_500, 4, 32)
    space = LanceSpace.create(tmp_path / "space", batches(vectors, groups, 1_000), group_column="name")
    queries = torch.cat([unit(40, 32, seed=9), vectors[::600] + 0.05])
    exact, filtered = (space.search(queries, 10, false_accept=0.05, where=where) for where in (None, "is_odd"))
    assert space.recall == 1
    assert space.build_index() >= 0.98
    assert space.build_index(queries) == pytest.approx(LanceSpace.open(tmp_path / "space").recall)
    opened = LanceSpace.open(tmp_path / "space")
    for where, expected in ((None, exact), ("is_odd", filtered)):
        found = opened.search(queries, 10, false_accept=0.05, where=where)
        is_same = found.rows == expected.rows
        assert is_same.double().mean() > 0.9  # a row that is missed moves those after it
        torch.testing.assert_close(found.distances[is_same], expected.distances[is_same], rtol=0, atol=1e-12)
        both = found.scores[is_same], expected.scores[is_same]
        assert torch.isclose(*both, rtol=0, atol=1e-12).double().mean() > 0.95
        torch.testing.assert_close(*both, rtol=0, atol=0.05)  # of a group of which a candidate is missed
        assert not (found.accepted & ~expected.accepted).any()
    opened.table.create_index("vector", config=lancedb.index.IvfRq(distance_type="l2", num_partitions=300))
    found = opened.search(queries[:20], 4, where="name LIKE '%700%'")
    assert (found.rows.sort(1).values == torch.arange(2_800, 2_804)).all()
    opened.add(batches(queries, torch.arange(2_000, 2_050)))
    assert torch.equal(opened.search(queries, 1).rows[:, 0], torch.arange(6_000, 6_050))
    opened.remove(ids=[6_000])
    assert opened.build_index(queries) >= 0.98
    assert opened.table.index_stats("vector_idx").num_unindexed_rows == 0
    assert opened.search(queries, 1).rows[1:, 0].tolist() == list(range(6_001, 6_050))


@pytest.mark.parametrize("count", [10, 6_000])
def test_equal_rows_and_few_rows_are_searched(tmp_path, count):
    space = LanceSpace.create(tmp_path / "space", np.ones((count, 8)))
    assert space.build_index() == 1
    found = space.search(np.ones(8), 3, false_accept=0.9)
    assert found.scores.min() == pytest.approx(1)
    assert (found.p_values == 1).all()


def bad_batch(value):
    vectors = unit(3, 16)
    vectors[1] = value
    return [unit(4, 16), vectors]


def other(tmp_path):
    lancedb.connect(tmp_path / "other").create_table("vectors", [{"vector": [1.0, 2.0]}])
    return LanceSpace.open(tmp_path / "other")


CREATE = {
    "zero": (bad_batch(0), "batch 1, from row 4 on: rows must be finite and not zero; 1 of 3 .* index 1"),
    "nan": (bad_batch(torch.nan), "batch 1, from row 4 on: rows must be finite .* 0 rows were written"),
    "dimensions": ([unit(2, 3), unit(2, 4)], "batch 1, .* Size of FixedSizeList is not the same"),
    "columns": ([{"vector": unit(1, 3), "a": [1]}, {"vector": unit(1, 3)}], r"the columns are \['vector'\]"),
    "no vectors": ([{"x": [1]}], "batch 0, from row 0 on: 'vector'"),
    "lengths": ([{"vector": unit(3, 3), "a": [1]}], "batch 0"),
    "types": ([{"vector": unit(1, 3), "a": [1]}, {"vector": unit(1, 3), "a": ["x"]}], "batch 1"),
    "one row": ([unit(3)], "batch 0, .* must have the shape"),
    "empty": ([], "batches are empty"),
}
INVALID = {
    "group": (lambda s: s.add({"vector": unit(1, 16), "name": [1.5], "is_odd": [True]}), "'name' must be all texts or"),
    "no group": (lambda s: s.add({"vector": unit(1, 16), "name": [None], "is_odd": [True]}), "'name' must be all tex"),
    "filter": (lambda s: s.search(unit(1, 16), where="size > 3"), "No field named size"),
    "syntax": (lambda s: s.search(unit(1, 16), where="is_odd AND"), "is_odd AND"),
    "dimensions": (lambda s: s.search(unit(1, 5)), "queries must have 16 dimensions, as the space; got 5"),
    "k": (lambda s: s.search(unit(1, 16), 301), "k must be an integer from 1 to 300; got 301"),
    "level": (lambda s: s.search(unit(1, 16), 1, false_accept=0.001), "needs .* calibration groups; there are 60"),
    "open": (lambda s: s.search(unit(1, 16), where="is_odd) OR (is_odd"), "not supported"),
    "two": (lambda s: s.search(unit(1, 16), where="is_odd; DROP TABLE vectors"), "is_odd; DROP"),
    "type of id": (lambda s: s.remove(ids=[1.5]), "there is no id 1.5 in the space"),
    "true": (lambda s: s.remove(ids=[True]), "there is no id True in the space"),
    "unknown id": (lambda s: s.remove(ids=[300]), "there is no id 300 in the space"),
    "unknown group": (lambda s: s.remove("x"), "there is no group 'x' in the space"),
    "all": (lambda s: s.remove(ids=range(300)), "no row would remain"),
    "nothing": (lambda s: s.remove(), "there is no group None"),
}


@pytest.mark.parametrize("name", CREATE)
def test_an_invalid_batch_is_named(tmp_path, name):
    rows, message = CREATE[name]
    with pytest.raises(ValueError, match=message):
        LanceSpace.create(tmp_path / "space", rows)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input_is_an_error_that_says_what_is_wrong(space, name):
    call, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        call(space)


def test_rows_before_an_invalid_batch_are_written_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_sphere.search.vectors.WRITTEN", 1)
    with pytest.raises(ValueError, match=r"batch 1, from row 4 on: .* Before it, 4 rows were written"):
        LanceSpace.create(tmp_path / "space", bad_batch(0))
    assert len(LanceSpace.open(tmp_path / "space")) == 4


def test_a_space_is_not_replaced(tmp_path, space):
    with pytest.raises(ValueError, match="not found"):
        LanceSpace.open(tmp_path / "none")
    with pytest.raises(FileExistsError, match=r"has tables already \(vectors\)"):
        LanceSpace.create(tmp_path / "space", unit(3, 4))
    with pytest.raises(TypeError):
        other(tmp_path)


def test_rows_of_one_group_have_no_level(tmp_path):
    space = LanceSpace.create(tmp_path / "space", [{"vector": unit(4, 3), "name": [1] * 4}], group_column="name")
    with pytest.raises(ValueError, match="the rows are of one group"):
        space.search(unit(1, 3), 1, false_accept=0.9)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_vectors_that_another_program_wrote_are_not_compared(tmp_path, value):
    space = LanceSpace.create(tmp_path, {"vector": unit(20, 4)})
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.full(4, value, np.float32)), 4)
    space.table.add(pa.table({"vector": vectors}))
    with pytest.raises(ValueError, match="another program wrote are no unit vectors"):
        space.search(unit(1, 4))
