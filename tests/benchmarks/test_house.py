import ast

import pytest
import torch

from benchmarks import house
from hf_sphere.geometry import separation


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def fail(a):\n    text = f'{a}'\n    raise ValueError(text)", True),
        ("def fail(a):\n    'Fail.'\n    raise ValueError(a)", True),
        ("def check(a):\n    if a:\n        raise ValueError(a)", False),
        ("def check(a):\n    with a:\n        pass\n    raise ValueError(a)", False),
    ],
)
def test_a_helper_that_only_raises_is_recognized(source, expected):
    assert house.only_raises(ast.parse(source).body[0]) is expected


def test_a_walk_has_the_functions_of_the_library_that_run():
    with house.walk() as found:
        separation(torch.eye(3))
        ast.parse("1")
    assert "separation" in {code.co_name for code in found}
    assert all(code.co_filename.startswith(house.PACKAGE) for code in found)


def test_calls_of_helpers_that_only_raise_count_as_errors(tmp_path, monkeypatch):
    text = "def fail():\n    raise ValueError\n\ndef use(a):\n    if a:\n        fail()\n    raise OSError\n"
    for name in ("hf_sphere", "recipes"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf_sphere" / "part.py").write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert (house.count_raises(), house.count_lines("hf_sphere")) == (3, 7)
