import pytest


@pytest.mark.slow
def test_runs_killed_twenty_times_end_like_undisturbed_ones(start):
    words = ["--tasks", "classification", "--processes", "1", "--kinds", "kill", "--kills", "20"]
    printed, _ = start("tests/recipes/soak.py", *words).communicate(timeout=600)
    assert "20 x kill: 0 failures" in printed
