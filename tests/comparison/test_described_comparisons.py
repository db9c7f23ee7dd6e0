"""What the text of a comparison claims about its parts, intervals and arms, and its file of numbers."""

import json
from types import SimpleNamespace

import pytest

from hf_sphere.comparison import compare_runs, report
from hf_sphere.comparison.arms import Arm, Division
from hf_sphere.comparison.frozen import FrozenRuns
from hf_sphere.comparison.measures import MEASURES
from hf_sphere.losses import HeadLoss

ARMS = [Arm("softmax", {"head": "softmax"}), Arm("cosine", {"head": "cosine"})]
VALUES = {"softmax": {0: 90.0, 1: 91.0, 2: 92.0}, "cosine": {0: 91.0, 1: 90.0, 2: 92.5}}


def a_study(division):
    return SimpleNamespace(division=division, metric="accuracy", tuned_by="accuracy", count=12, epochs=18, seeds=3)


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
def test_how_images_are_drawn_is_said_of_the_parts_that_are_drawn(division, start):
    assert report.describe(a_study(division), None).startswith(start)


def test_without_a_test_no_interval_is_described():
    assert "intervals" not in report.describe(a_study(Division("train", "test")), None)


def test_the_intervals_are_described_by_their_variation():
    found = compare_runs(VALUES, reference="softmax", higher_is_better=True)
    assert "The intervals account for seeds, " in report.describe(a_study(Division("train", "test")), found)


def test_without_a_significant_difference_it_is_not_claimed_that_no_arm_is_better():
    found = compare_runs(VALUES, reference="softmax", higher_is_better=True)
    results = {
        ("run", name, seed): {"values": {"accuracy": value}}
        for name, run in VALUES.items()
        for seed, value in run.items()
    }
    text = report.conclude(a_study(Division("train", "test")), ARMS, [(ARMS[1], {}), (ARMS[0], {})], found, results)
    assert text.endswith("No arm is shown to be better than softmax: keep it.")


def test_numbers_that_do_not_exist_are_null_in_the_file(tmp_path):
    results = {
        ("run", name, seed): {"values": dict.fromkeys(MEASURES, value)}
        for name, run in VALUES.items()
        for seed, value in run.items()
    }
    results |= {("tuned", name): {"setting": {}, "at_end": (), "count": 3} for name in VALUES}
    study = a_study(Division("train", "test"))
    study.runs = FrozenRuns
    study.compare = lambda *_: compare_runs(VALUES, reference="softmax", higher_is_better=True)
    report.write(tmp_path, study, ARMS, results, {}, 3)
    text = (tmp_path / "comparison.json").read_text()
    reference, other = json.loads(text, parse_constant=pytest.fail)["comparison"]  # NaN is not JSON
    assert (reference["arm"], reference["seeds"], reference["difference"]) == ("softmax", 3, None)
    assert (other["difference"], other["verdict"]) == (pytest.approx(1 / 6), "no significant difference")


def test_the_loss_of_an_arm_is_code_that_builds_it():
    arm = Arm("arcface", {"head": "arcface", "embedding_dim": 8, "head_kwargs": {"scale": "learned"}})
    study = SimpleNamespace(epochs=18, runs=FrozenRuns)
    text = report.describe_losses(study, [(arm, {"learning_rate": 0.003, "head_kwargs.margin": 0.1})], 3)
    assert ", 18 epochs of AdamW with a cosine schedule and batches of 256, on a linear map of the" in text
    assert text.endswith(", learning_rate 0.003")
    loss = eval(text.split("`")[1].removeprefix("loss = "), {"HeadLoss": HeadLoss})
    assert (type(loss.head).__name__, loss.head.margin, loss.head.num_classes) == ("ArcFaceHead", 0.1, 3)
