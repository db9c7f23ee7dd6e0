import pytest


@pytest.mark.slow
def test_disturbed_runs_end_like_undisturbed_ones(start):
    words = ["--tasks", "classification", "--processes", "1", "--kinds", "kill", "--kills", "4"]
    printed, _ = start("tests/recipes/soak.py", *words).communicate(timeout=600)
    assert ": 0 failures" in printed
    assert "4 x kill" in printed
