"""What the text of a comparison claims about its parts, intervals and arms, and its file of numbers."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hf_sphere.comparison.arms import Arm, Division
from hf_sphere.comparison.measures import MEASURES
from hf_sphere.comparison.plan import Plan
from hf_sphere.comparison.study import Results, Study
from hf_sphere.comparison.training_runs import FrozenRuns
from hf_sphere.losses import HeadLoss

VALUES = {"softmax": [90.0, 91.0, 92.0], "cosine": [91.0, 90.0, 92.5]}
TEST = Division("train", "test")


def results(tmp_path, division: Division = TEST, values=VALUES, setting=None, **options) -> Results:
    """Make the results of heads with an accuracy of each seed and the same setting."""
    arms = [Arm(name, {"head": name, **options}) for name in values]
    plan = Plan(dataset_name="digits", seeds=3, output_dir=str(tmp_path))
    study = Study(FrozenRuns({}, {}, None, [], ""), arms, division, plan, 18, tmp_path)
    (tmp_path / "trials.jsonl").unlink(missing_ok=True)
    trials = study.read_trials()
    for name, run in values.items():
        trials["tuned", name] = {"setting": setting or {}, "at_end": (), "count": 3}
        for seed, value in enumerate(run):
            outcomes = {"ids": [1, 2], "outcomes": [value - 1, value + 1]}
            trials["run", name, seed] = {"values": dict.fromkeys(MEASURES, value), **outcomes}
    return Results(study)


@pytest.mark.parametrize(
    ("division", "start"),
    [
        (Division("train", None), "20 % of the images, stratified by class, are for tuning only. Each seed divides"),
        (
            Division("train", "test", group="patient"),
            "20 % of the training images, with the groups of patient undivided, are for tuning only. "
            "All runs are tested on the split test. ",
        ),
    ],
)
def test_how_images_are_drawn_is_said_of_the_parts_that_are_drawn(tmp_path, division, start):
    assert results(tmp_path, division).describe().startswith(start)


def test_intervals_are_described_by_their_variation_if_there_are_any(tmp_path):
    assert "The intervals account for seeds, " in results(tmp_path).describe()
    assert "intervals" not in results(tmp_path, values={"softmax": [90.0], "cosine": [91.0]}).describe()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (VALUES, "cosine has the best mean accuracy, 91.17 %. None is shown to be better than softmax: keep it."),
        (VALUES | {"vmf": [99.0, 99.5, 99.9]}, "vmf has the best mean accuracy, 99.47 %. Better than softmax: vmf. "),
        (VALUES | {"vmf": [99.0]}, "Diverged or without a value: vmf. cosine has the best mean accuracy, 91.17 %. "),
        (VALUES | {"softmax": [99.0]}, "Diverged or without a value: softmax. There are not two with all seeds, "),
    ],
)
def test_the_conclusion_names_the_best_mean_and_arms_that_are_shown_to_be_better(tmp_path, values, text):
    assert results(tmp_path, values=values).conclude().startswith(text)


def test_numbers_that_do_not_exist_are_null_in_the_file(tmp_path):
    results(tmp_path).write(3, {})
    text = (tmp_path / "comparison.json").read_text()
    reference, other = json.loads(text, parse_constant=pytest.fail)["comparison"]  # NaN is not JSON
    assert (reference["name"], reference["seeds"], reference["difference"]) == ("softmax", 3, None)
    assert (other["difference"], other["verdict"]) == (pytest.approx(1 / 6), "no significant difference")
    assert json.loads(text)["compared"]["cosine"]["runs"]["0"]["accuracy"] == 91.0


@pytest.mark.parametrize(
    ("division", "test"),
    [(TEST, "Welch's t-test (unequal variances)"), (Division("train", None), "a t-test of paired differences")],
)
def test_the_test_and_the_correction_are_explained_below_the_table(tmp_path, division, test, capsys):
    results(tmp_path, division).write(3, {})
    assert f"p-values are by {test}, corrected for all comparisons (Holm), as verdicts" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "text"), [(1, "about 2.8 to 5.8 min"), (2, "about 1.4 to 2.9 min")])
def test_the_time_is_estimated_from_the_first_trials(tmp_path, workers, text, monkeypatch, capsys):
    """Both have 3 settings of one option, 18 epochs and 3 seeds: 30 or 120 epochs of tuning, 54 of runs."""
    study = results(tmp_path).study
    arms = [Arm(name, {}, {"learning_rate": ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 0.3)}) for name in "ab"]
    monkeypatch.setattr(Study, "time_trial", lambda self, arm: {"a": 1 / 60, "b": 1 / 60}[arm.name])
    replace(study, plan=replace(study.plan, num_settings=3), arms=arms).print_time(ThreadPoolExecutor(1), workers)
    assert text in capsys.readouterr().out


def test_the_loss_of_an_arm_is_code_that_builds_it(tmp_path):
    setting = {"learning_rate": 0.003, "head_kwargs.margin": 0.1}
    runs = {"arcface": VALUES["softmax"]}
    lines = results(tmp_path, TEST, runs, setting, embedding_dim=8, head_kwargs={"scale": "learned"}).describe_losses(3)
    text = "\n".join(lines)
    assert ", 18 epochs of AdamW with a cosine schedule and batches of 256, on a linear map of the" in text
    assert text.endswith(", learning_rate 0.003")
    loss = eval(text.split("`")[1].removeprefix("loss = "), {"HeadLoss": HeadLoss})
    assert (type(loss.head).__name__, loss.head.margin, loss.head.num_classes) == ("ArcFaceHead", 0.1, 3)
