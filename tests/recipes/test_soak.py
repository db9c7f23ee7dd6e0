import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("classification", "--processes 1 --kinds kill --kills 4"),
        *((task, "--minutes 0.1") for task in ("index", "embeddings", "predictions")),
    ],
)
@pytest.mark.settings(task=lambda task: {"trains": task == "classification"})
def test_disturbed_runs_and_results_end_like_undisturbed_ones(start, task, words):
    printed, _ = start("tests/recipes/soak.py", "--tasks", task, *words.split()).communicate(timeout=600)
    assert ": 0 failures" in printed
    assert task != "classification" or "4 x kill" in printed
