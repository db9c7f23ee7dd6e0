import pytest
from hypothesis import given, strategies as st
from two_processes import run_two

from hf_sphere.utils.files import JsonLines

texts = st.text('aZ0 \n\r\x00"\\[]{},\u2028\u00e9\U0001f600', max_size=20)
keys = st.recursive(texts | st.integers(), lambda part: st.tuples(part, part), max_leaves=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "values.jsonl"


@given(values=st.dictionaries(keys, st.tuples(st.floats(0, 1e6), st.integers(1, 999)), max_size=8))
def test_written_values_are_read(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("values") / "values.jsonl"
    lines = JsonLines(path)
    for key, value in values.items():
        lines[key] = value
    assert dict(JsonLines(path)) == values


def test_later_values_replace_earlier_ones_and_a_file_is_prepared_once_and_not_read_on_request(path):
    prepared = []
    lines = JsonLines(path, prepare=lambda: prepared.append(path.exists()))
    assert prepared == []
    lines["one"] = 1
    lines["one"] = 2
    assert prepared == [False]
    assert dict(lines) == dict(JsonLines(path)) == {"one": 2}
    assert JsonLines(path, read=False) == {}


def _write_many(rank, path):
    lines = JsonLines(path)
    for number in range(200):
        lines[rank, number] = number
        lines["both"] = 1


def test_processes_can_write_concurrently(path):
    run_two(_write_many, path)
    assert dict(JsonLines(path)) == {(rank, number): number for rank in (0, 1) for number in range(200)} | {"both": 1}


def test_reading_keeps_half_a_line_of_another_process_and_writing_replaces_it_if_that_was_killed(path):
    JsonLines(path)["done"] = 1
    with path.open("a") as file:
        file.write('["half", ')
        file.flush()
        assert dict(JsonLines(path)) == {"done": 1}
        file.write("2]\n")
    lines = JsonLines(path)
    assert dict(lines) == {"done": 1, "half": 2}
    for opened, name in ((lines, "before"), (None, "after")):
        with path.open("a") as file:
            file.write(f'["{name}", ')
        (JsonLines(path) if opened is None else opened)[name] = 3
        assert dict(JsonLines(path))[name] == 3
    assert dict(JsonLines(path)) == {"done": 1, "half": 2, "before": 3, "after": 3}


@pytest.mark.parametrize(
    "content",
    [
        "values\n" * 20,
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
