import pytest


@pytest.mark.slow
def test_runs_killed_ten_times_end_like_undisturbed_ones(start):
    words = ["--tasks", "classification", "--processes", "1", "--kinds", "kill", "--kills", "10"]
    printed, _ = start("tests/recipes/soak.py", *words).communicate(timeout=600)
    assert "10 x kill: 0 failures" in printed


@pytest.mark.slow
@pytest.mark.parametrize("task", ["index", "embeddings", "predictions"])
def test_disturbed_results_are_complete(start, task):
    printed, _ = start("tests/recipes/soak.py", "--tasks", task, "--minutes", "0.3").communicate(timeout=600)
    assert ": 0 failures" in printed
