import multiprocessing
import os
import signal
import sqlite3

import pytest
from hypothesis import given, settings, strategies as st

from hf_sphere.analogies.likelihoods import Score, ScoreCache, SentenceKey

ranges = st.tuples(st.integers(0, 99), st.integers(0, 99))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
keys = st.builds(SentenceKey, texts, st.lists(ranges, max_size=3).map(tuple))
scores = st.builds(Score, st.floats(0, 1e6), st.integers(1, 999))


@pytest.fixture
def cache(tmp_path):
    return ScoreCache(tmp_path / "folder" / "scores.sqlite")


@settings(max_examples=20, deadline=None)
@given(written=st.dictionaries(keys, scores, max_size=8), others=st.lists(keys, max_size=4))
def test_written_scores_are_read(tmp_path_factory, written, others):
    cache = ScoreCache(tmp_path_factory.mktemp("cache") / "scores.sqlite")
    cache.write("model", written)
    assert ScoreCache(cache.path).read("model", [*others, *written]) == {
        key: written[key] for key in [*others, *written] if key in written
    }
    assert len(cache) == len(written)


def test_an_empty_cache_returns_no_scores(cache):
    assert cache.read("model", [SentenceKey("cat")]) == {}
    assert cache.read("model", []) == {}
    assert len(cache) == 0


def test_scores_are_cached_per_model(cache):
    key = SentenceKey("cat")
    cache.write("one", {key: Score(1.0, 2)})
    cache.write("other", {key: Score(3.0, 4)})
    assert [cache.read(name, [key]) for name in ("one", "other", "third")] == [
        {key: Score(1.0, 2)},
        {key: Score(3.0, 4)},
        {},
    ]


def test_hidden_words_are_part_of_the_key(cache):
    seen = {SentenceKey("cat is", hidden): Score(float(number), 1) for number, hidden in enumerate([(), ((0, 3),)])}
    cache.write("model", seen)
    assert cache.read("model", list(seen)) == seen
    assert cache.read("model", [SentenceKey("cat is", ((0, 3), (4, 6)))]) == {}


def test_a_later_score_replaces_an_earlier_one(cache):
    key = SentenceKey("cat")
    cache.write("model", {key: Score(1.0, 2)})
    cache.write("model", {key: Score(5.0, 2)})
    assert cache.read("model", [key]) == {key: Score(5.0, 2)}


def test_many_sentences_are_read_in_one_call(cache):
    seen = {SentenceKey(f"sentence {number}"): Score(number / 7, number) for number in range(1, 25_000)}
    cache.write("model", seen)
    assert cache.read("model", list(seen)) == seen


def _write_many(path, name, count):
    cache = ScoreCache(path)
    for number in range(count):
        cache.write(name, {SentenceKey(f"{name} {number}"): Score(number, 1), SentenceKey("both"): Score(1.0, 1)})


def test_processes_can_write_concurrently(tmp_path):
    path = tmp_path / "scores.sqlite"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_many, args=(path, name, 40)) for name in ("one", "other")]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for name in ("one", "other"):
        found = ScoreCache(path).read(name, [SentenceKey(f"{name} {number}") for number in range(40)])
        assert found == {SentenceKey(f"{name} {number}"): Score(number, 1) for number in range(40)}


def _write_and_die(path):
    cache = ScoreCache(path)
    cache.write("model", {SentenceKey("done"): Score(1.0, 1)})

    def lines():
        yield SentenceKey("half"), Score(2.0, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(dict):
        def items(self):
            return lines()

    cache.write("model", Dying())


def test_a_killed_process_leaves_only_complete_writes(tmp_path):
    path = tmp_path / "scores.sqlite"
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    cache = ScoreCache(path)
    assert cache.read("model", [SentenceKey("done"), SentenceKey("half")]) == {SentenceKey("done"): Score(1.0, 1)}
    cache.write("model", {SentenceKey("half"): Score(2.0, 1)})
    assert len(cache) == 2


def test_a_file_that_is_not_a_database_is_rejected(tmp_path):
    path = tmp_path / "scores.sqlite"
    path.write_text("scores\n" * 200)
    with pytest.raises(
        ValueError, match=r"scores.sqlite is damaged or not a score cache .* Delete it, or choose another"
    ):
        ScoreCache(path)
    assert path.read_text().startswith("scores")  # unchanged


def test_a_damaged_file_is_rejected(cache):
    cache.write("model", {SentenceKey(f"sentence {number}"): Score(1.0, 1) for number in range(2000)})
    content = bytearray(cache.path.read_bytes())
    content[4096 * 3 : 4096 * 20] = b"\xff" * (4096 * 17)
    cache.path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or not a score cache"):
        cache.read("model", [SentenceKey(f"sentence {number}") for number in range(2000)])


def test_a_truncated_file_is_rejected(cache):
    cache.write("model", {SentenceKey(f"sentence {number}"): Score(1.0, 1) for number in range(2000)})
    os.truncate(cache.path, cache.path.stat().st_size // 2)
    with pytest.raises(ValueError, match="is damaged or not a score cache"):
        ScoreCache(cache.path).read("model", [SentenceKey(f"sentence {number}") for number in range(2000)])


def test_a_database_of_another_program_is_rejected(tmp_path):
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE scores (text TEXT)")
    connection.close()
    with pytest.raises(
        ValueError, match=r"other.sqlite was written by another program. Delete it, or choose another file"
    ):
        ScoreCache(path)


def test_a_cache_of_another_version_is_rejected(cache):
    connection = sqlite3.connect(cache.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ValueError, match="was written by version 99 of this cache"):
        ScoreCache(cache.path)


def test_an_invalid_path_is_rejected(tmp_path):
    with pytest.raises(OSError, match=r"the score cache .* cannot be used: unable to open database file"):
        ScoreCache(tmp_path)


def test_the_repr_contains_the_path(tmp_path):
    assert repr(ScoreCache(tmp_path / "a.sqlite")) == f"ScoreCache('{tmp_path / 'a.sqlite'}')"
