"""Progress bars of commands."""

import pytest

from hf_sphere.utils import progress
from hf_sphere.utils.commands import running


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, True), (60.0, False)])
def test_a_command_without_a_terminal_prints_a_line_each_minute(seconds, lines, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", seconds)
    token = running.set("hf-sphere index")
    try:
        for _ in progress.progress_bar(range(4), desc="embedding", unit="image", mininterval=0):
            pass
    finally:
        running.reset(token)
    printed = capsys.readouterr().err.splitlines()
    expected = [f"embedding: {done} of 4 images" for done in range(4)]  # the first line is of the start
    assert [line.partition(",")[0] for line in printed] == (expected if lines else [])
