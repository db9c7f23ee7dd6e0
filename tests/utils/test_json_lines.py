import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from two_processes import run_two

from hf_sphere.utils.json_lines import JsonLines

keys = st.recursive(st.text(max_size=20) | st.integers(), lambda part: st.tuples(part, part), max_leaves=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "values.jsonl"


@given(values=st.dictionaries(keys, st.tuples(st.floats(0, 1e6), st.integers(1, 999)), max_size=8))
def test_written_values_are_read(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("values") / "values.jsonl"
    JsonLines(path).add(values)
    assert dict(JsonLines(path)) == values


def test_a_later_value_replaces_an_earlier_one(path):
    lines = JsonLines(path)
    lines["one"] = 1
    lines["one"] = 2
    assert dict(lines) == dict(JsonLines(path)) == {"one": 2}


def test_an_existing_file_is_not_read_on_request(path):
    JsonLines(path)["one"] = 1
    assert JsonLines(path, read=False) == {}


def test_the_preparation_runs_once_before_the_first_line(path):
    prepared = []
    lines = JsonLines(path, prepare=lambda: prepared.append(path.exists()))
    assert prepared == []
    lines["one"], lines["two"] = 1, 2
    assert prepared == [False]


def _write_many(rank, path):
    lines = JsonLines(path)
    for number in range(200):
        lines.add({(rank, number): number, "both": 1})


def test_processes_can_write_concurrently(path):
    run_two(_write_many, path)
    assert dict(JsonLines(path)) == {(rank, number): number for rank in (0, 1) for number in range(200)} | {"both": 1}


KILLED = """
import os, pathlib, sys
from hf_sphere.utils.json_lines import JsonLines
path = pathlib.Path(sys.argv[1])
JsonLines(path)["done"] = 1
with path.open("a") as file:
    file.write('["half", ')
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_only_complete_values(path):
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    lines = JsonLines(path)
    lines["half"] = 2
    assert dict(JsonLines(path)) == {"done": 1, "half": 2}


def test_reading_keeps_the_line_that_another_process_is_writing(path):
    JsonLines(path)["done"] = 1
    with path.open("a") as file:
        file.write('["half", ')
        file.flush()
        assert dict(JsonLines(path)) == {"done": 1}
        file.write("2]\n")
    assert dict(JsonLines(path)) == {"done": 1, "half": 2}


def test_half_a_line_of_a_process_killed_later_is_replaced_by_the_next_value(path):
    lines = JsonLines(path)
    lines["done"] = 1
    with path.open("a") as file:
        file.write('["half", ')
    lines["more"] = 2
    assert dict(JsonLines(path)) == {"done": 1, "more": 2}


@pytest.mark.parametrize(
    "content",
    [
        "values\n" * 20,
        "no line",
        '["one", 1]\n["two"]\n',
        '["one", 1]\n{"two": 2}\n',
        '[{"one": 1}, 1]\n',
        "[" * 9999 + "\n",
    ],
)
def test_a_file_with_other_content_is_refused_and_kept(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match=r"values.jsonl is damaged: .* Remove it, or choose another file"):
        JsonLines(path)
    assert path.read_text() == content
    with pytest.raises(OSError, match="directory"):
        JsonLines(path.parent)
