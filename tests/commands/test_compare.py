"""The job `hf-sphere compare`: checks, resumption and results."""

import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from fresh_python import FreshPython
from safetensors.torch import save_file

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, nn
from hf_sphere.commands import compare
from hf_sphere.comparison import study
from hf_sphere.comparison.arms import Arm
from hf_sphere.comparison.training_runs import TrainingRuns, read_features
from hf_sphere.data import ImageSourceOptions
from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows
from hf_sphere.data.sources import load_splits
from hf_sphere.models import SphereVisionImageProcessor
from hf_sphere.utils.files import JsonLines

SHORT = ["--seeds", "2", "--num_settings", "3", "--num_train_epochs", "2"]
HEADS = ["--heads", "softmax", "cosine"]
TABLE = """
slow: {head: softmax, backbone: lenet5, grid: {learning_rate: [0.0001]}}
fast: {head: cosine, backbone: lenet5, grid: {learning_rate: [0.01]}}
"""

OWN_HEAD = """
from hf_sphere.nn.heads.softmax import SoftmaxHead

class OwnHead(SoftmaxHead):
    name = "own"
"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder, shape = tmp_path_factory.mktemp("one") / "lenet", {"num_channels": 1, "image_size": [28, 28]}
    saved = SphereVisionConfig(backbone="lenet5", head="softmax", num_labels=3, **shape)
    SphereVisionForImageClassification(saved).save_pretrained(folder)
    size, options = {"height": 28, "width": 28}, {"num_channels": 1, "image_mean": [0.4], "image_std": [0.3]}
    SphereVisionImageProcessor(size=size, **options).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> str:
    """Folder of six classes of ten images with one bright row each."""
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    images = generator.integers(0, 90, (60, 20, 20), dtype=np.uint8)
    for index, image in enumerate(images):
        image[3 * (index % 6) : 3 * (index % 6) + 3] += 100
    save(folder, images, [index % 6 for index in range(60)])
    return str(folder)


def save(folder: Path, images: np.ndarray, labels: list[int], split: str = "train") -> None:
    features = Features({"image": Image(), "label": ClassLabel(names=[*"abcdef"])})
    data = Dataset.from_dict({"image": [*images], "label": labels}, features)
    data.to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr(study, "_pool", lambda workers: ThreadPoolExecutor(1))


@pytest.fixture
def run(tmp_path, capsys):
    """Run the job in this process; return what it prints and its folder."""

    def start(*words: str, out: Path = tmp_path / "out") -> tuple[str, Path]:
        read_features.cache_clear()
        compare.main([*words, *SHORT, "--output_dir", str(out)])
        return capsys.readouterr().out, out

    return start


@pytest.fixture
def refused(run, tmp_path):
    """Return the message of an error before any output."""

    def start(*words: str) -> str:
        with pytest.raises(ValueError, match=r".") as error:
            run(*words)
        assert not (tmp_path / "out").exists()
        return str(error.value)

    return start


def results(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


def frozen_words(backbone: str) -> list[str]:
    return ["--frozen", "--backbones", backbone, "--embedding_dim", "8"]


def table(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "table.yaml").write_text(text)
    return ["--settings", str(tmp_path / "table.yaml")]


def test_a_killed_comparison_resumes_with_the_results_of_an_uninterrupted_one(
    root, run, backbone, tmp_path, monkeypatch
):
    """That one runs in this process, so that a trial has the same values in another one, also with an own head."""
    (tmp_path / "own_head.py").write_text(OWN_HEAD)
    words = ["digits", "--import", "own_head", "--heads", "own", "cosine", *frozen_words(backbone)]
    monkeypatch.syspath_prepend(tmp_path)
    expected = results(run(*words, out=tmp_path / "whole")[1])
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "hf_sphere.commands.main", "compare", *words, *SHORT, "--output_dir", str(out)]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        streams = {"stdout": log, "stderr": log, "start_new_session": True}
        started = FreshPython(command, hugging_face=False, env=environment, **streams)
    trials, end = out / "trials.jsonl", time.monotonic() + 120
    while not (trials.exists() and trials.read_bytes().count(b"\n") > 1):
        assert started.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    while not is_empty_group(started.pid):  # its worker ends too
        assert time.monotonic() < end
        time.sleep(0.05)
    before = trials.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    printed, _ = run(*words, out=out)
    assert "resumed   " in printed
    assert trials.read_bytes().startswith(before)
    keys = Counter(json.dumps(json.loads(line)[0]) for line in trials.read_text().splitlines())
    assert max(keys.values()) == 1
    assert sorted(keys) == sorted(json.dumps(key) for key in JsonLines(tmp_path / "whole" / "trials.jsonl"))
    sys.modules.pop("own_head")
    nn.HEADS.pop("own")
    for name, arm in results(out)["compared"].items():
        assert arm["tuned"]["setting"] == expected["compared"][name]["tuned"]["setting"]
        for seed, values in arm["runs"].items():
            assert values == pytest.approx(expected["compared"][name]["runs"][seed], abs=1e-3)


def is_empty_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_files_and_the_printed_plan(run, backbone, photos):
    printed, out = run(photos, *HEADS, *frozen_words(backbone))
    assert "6 classes, 38 images to train on, 12 to tune on, 10 to test on (new parts for each seed)" in printed
    assert re.search(r"^time      about \d+\.\d to \d+\.\d min, judged by the first trial of each$", printed, re.M)
    names = {
        "comparison.md",
        "comparison.json",
        "comparison.png",
        "comparison.html",
        "trials.jsonl",
        "model",
        "features",
    }
    assert names | {"run.json"} <= {path.name for path in out.iterdir()}
    found = results(out)
    rows = {row["name"]: row for row in found["comparison"]}
    for name, arm in found["compared"].items():
        assert rows[name]["mean"] == pytest.approx(np.mean([run["accuracy"] for run in arm["runs"].values()]))
    text = (out / "comparison.md").read_text()
    assert "Each seed divides the others again" in text
    best = max(rows, key=lambda name: rows[name]["mean"])
    for name in {best, "softmax"}:  # that with the best mean, and the reference
        assert f"\n- {name}: `loss = HeadLoss(" in text
        assert f"\n- {name}: `loss = HeadLoss(" in printed
    assert SphereVisionForImageClassification.from_pretrained(out / "model").config.num_labels == 6


def test_trained_arms_are_compared_by_their_final_models(run, tmp_path):
    words = ["--training", "{image_size: 16, max_train_samples: 400, per_device_train_batch_size: 16}"]
    _, out = run("digits", *table(tmp_path, TABLE), *words)
    found = results(out)
    assert [len(arm["runs"]) for arm in found["compared"].values()] == [2, 2]
    assert all(arm["tuned"]["count"] == 1 for arm in found["compared"].values())
    means = {row["name"]: row["mean"] for row in found["comparison"]}
    best = max(means, key=means.__getitem__)
    assert means["fast"] > 30
    evaluated = json.loads((out / "model" / "all_results.json").read_text())
    assert 100 * evaluated["eval_accuracy"] == pytest.approx(found["compared"][best]["runs"]["0"]["accuracy"], abs=1e-3)


def test_a_small_network_of_this_library_is_trained_from_random_weights(run):
    training = "{max_train_samples: 60, per_device_train_batch_size: 16}"
    text, out = run("digits", *HEADS, "--backbones", "lenet5", "--image_size", "16", "--training", training)
    assert len(results(out)["comparison"]) == 2
    assert "Power is the probability of finding a difference of 0.3 points" in text


def test_a_diverging_arm_is_reported_and_the_others_are_compared(run, backbone, photos, tmp_path):
    arms = f"head: softmax, backbone: '{backbone}'"
    text = f"first: {{{arms}}}\n'wild | one': {{{arms}, grid: {{learning_rate: [1.0e+30]}}}}\nlast: {{{arms}}}\n"
    printed, out = run(photos, *table(tmp_path, text), "--frozen")
    assert "tuned     wild | one: all settings diverged" in printed
    assert "Diverged or without a value: wild | one." in printed
    assert [row["name"] for row in results(out)["comparison"]] == ["first", "last"]
    assert "| wild &#124; one | all settings diverged |  |" in (out / "comparison.md").read_text()


@pytest.mark.parametrize("wild", [["first"], ["first", "last"]])
def test_nothing_is_tested_if_the_reference_diverges(run, backbone, photos, tmp_path, wild):
    grids = {
        name: "{learning_rate: [1.0e+30]}" if name in wild else "{learning_rate: [0.01]}" for name in ["first", "last"]
    }
    text = "\n".join(f"{name}: {{head: softmax, backbone: '{backbone}', grid: {grid}}}" for name, grid in grids.items())
    printed, out = run(photos, *table(tmp_path, text), "--frozen")
    assert "so nothing is tested." in printed
    assert results(out)["comparison"] is None
    assert "intervals" not in (out / "comparison.md").read_text()
    assert (out / "model").exists() == (len(wild) == 1)


def test_backbones_with_the_same_folder_name_keep_their_features(run, backbone, photos, tmp_path):
    other = tmp_path / Path(backbone).name
    model = SphereVisionForImageClassification.from_pretrained(backbone)
    torch.nn.init.normal_(next(model.sphere_vision.backbone.parameters()))
    model.save_pretrained(other)
    SphereVisionImageProcessor.from_pretrained(backbone).save_pretrained(other)
    _, out = run(photos, "--heads", "softmax", "--frozen", "--backbones", backbone, str(other), "--embedding_dim", "8")
    features = [read_features(str(file))["features"] for file in sorted((out / "features").iterdir())]
    assert len(features) == 2
    assert not torch.equal(*features)
    assert [*results(out)["backbones"]] == [*results(out)["compared"]] == [backbone, str(other)]


def test_another_comparison_in_the_folder_is_refused_unless_it_is_replaced(run, backbone, tmp_path):
    folder, images = tmp_path / "images", np.random.default_rng(0).integers(0, 255, (132, 20, 20), dtype=np.uint8)
    folder.mkdir()
    save(folder, images[:60], [*range(6)] * 10)
    text = "{head: softmax, backbone: " + backbone + ", head_kwargs: {label_smoothing: 0.0}, embedding_dim: 8}"
    words = [str(folder), *table(tmp_path, f"one: {text}\ntwo: {text}"), "--frozen"]
    run(*words)
    with pytest.raises(FileExistsError, match="contains another run, which differs in dataset_name"):
        run("digits", *words[1:])
    table(tmp_path, f"one: {text}\ntwo: {text.replace('0.0', '0.3')}")
    with pytest.raises(FileExistsError, match="differs in compared"):
        run(*words)
    table(tmp_path, f"one: {text}\ntwo: {text}")
    save(folder, images[60:], [*range(6)] * 12)
    with pytest.raises(FileExistsError, match="differs in data"):
        run(*words)
    _, out = run(*words, "--overwrite_output_dir")
    (file,) = (out / "features").iterdir()
    assert len(read_features(str(file))["labels"]) == 72


def test_left_out_classes_are_paired_also_with_a_test_split(run, backbone):
    _, out = run("digits", *HEADS, *frozen_words(backbone), "--metric", "unseen_recall_at_1")
    text = (out / "comparison.md").read_text()
    assert "p (paired, Holm)" in text
    assert "For each seed, 25 % of the classes are left out of training." in text


@pytest.mark.parametrize("words", [["--frozen", "--backbones"], ["--backbones"]])
def test_a_backbone_that_has_seen_the_images_is_refused(refused, backbone, tmp_path, words):
    seen, splits = tmp_path / "seen", load_splits("digits")
    SphereVisionForImageClassification.from_pretrained(backbone).save_pretrained(seen)
    SphereVisionImageProcessor.from_pretrained(backbone).save_pretrained(seen)
    ids = {key: identify_rows(splits, "test", "label", fingerprint(splits)) for key in ("train", "eval")}
    DataRecord({"train": "test", "eval": "test"}, ids, "label").save(seen)
    message = refused("digits", *HEADS, *words, str(seen), "--embedding_dim", "8")
    assert "seen was trained or evaluated on 355 of these images" in message


ONE = "b: {head: cosine}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "softmax"], "a comparison needs at least two;"),
        (["--heads", "softmax", "etf", "--embedding_dim", "8"], "etf does not fit: embedding_dim must be at least"),
        ([*HEADS, "--train_split", "train+test", "--eval_split", "test"], "355 of the 355 test images are also images"),
        ([*HEADS, "--eval_split", "train"], "1,442 of the 1,442 test images are also images to train or tune on"),
        ([*HEADS, "--metric", "unseen_auroc", "--left_out_classes", "0.9"], "0.9 of the classes cannot be left out"),
        ([*HEADS, "--frozen"], "with --frozen, softmax needs a backbone and the grid of its learning_rate"),
        ([*HEADS, "--training", "{eval_split: train}"], "the plan sets eval_split of each run"),
        ([*HEADS, "--training", "{no_option: 1}"], "softmax does not fit: unknown option 'no_option'"),
        ([*HEADS, "--training", "{optim: adm}"], "softmax does not fit: optim must be one of adam, "),
        ([*HEADS, "--training", "{nesterov: 1}"], "softmax does not fit: nesterov must be of type bool; got 1"),
        ([*HEADS, "--training", "{learning_rate: 0.1}"], "learning_rate of --training is tuned"),
        ([*HEADS, "--group_column", "patient"], "no group column 'patient'"),
    ],
)
def test_a_plan_that_does_not_fit_the_data_is_refused(refused, words, message):
    assert message in refused("digits", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "unseen_auroc", "--left_out_classes", "0"], "--metric unseen_auroc needs left-out classes"),
        (["--finetune", "2"], "finetune 2 has no effect without frozen"),
        (["--frozen", "--training", "{optim: sgd}"], "--training is for trained backbones"),
        (["--settings", "table.yaml"], "settings and heads exclude each other"),
        (["--seeds", "1"], "seeds must be at least 2"),
        (["--heads", "softmax", "softmx"], "--heads: invalid choice: 'softmx'"),
    ],
)
def test_a_contradictory_command_line_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        compare.main(["digits", *HEADS, *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("- softmax", [], "must map names to options"),
        ("a: softmax", [], "must map names to options"),
        ("a: {head: [", [], "cannot read the configuration"),
        ("a: {backbone: lenet5}\n" + ONE, [], "a does not fit: unknown head 'None'"),
        ("a: {head: softmax, no_option: 1}\n" + ONE, [], "a does not fit"),
        ("a: {head: softmax, head_kwargs: {foo: 1}, embedding_dim: 8}\n" + ONE, [], "head 'softmax' has no option foo"),
        ("a: {head: softmax, grid: {no_option: [1]}}\n" + ONE, [], "a does not fit"),
        ("a: {head: softmax, weight_decay: 0.1}\n" + ONE, ["--frozen"], "got weight_decay besides"),
        ("a: {head: softmax, grid: {seed: [1]}}\n" + ONE, ["--frozen"], "got seed besides"),
        ("a: {head: softmax, grid: {}}\n" + ONE, ["--frozen"], "a needs a backbone and the grid"),
    ],
)
def test_a_wrong_table_of_arms_is_refused(refused, tmp_path, text, words, message):
    assert message in refused("digits", *table(tmp_path, text), *words)


def test_backbones_that_cannot_be_frozen_or_have_other_weights_and_folders_with_another_run_are_refused(
    run, refused, backbone, tmp_path
):
    words = [*HEADS, *frozen_words(backbone), "--finetune", "2", "--training", "{no_option: 1}"]
    assert "softmax does not fit" in refused("digits", *words)
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    other = f"resnet10t={tmp_path / 'a.safetensors'}"
    for words, message in (
        (["--frozen", "--backbones", "lenet5"], "how images are prepared for the backbone lenet5 is unknown"),
        (["--frozen", "--backbones", "resnet18x"], "resnet18"),  # a similar name
        (["--frozen", "--backbones", other], "does not fit the backbone resnet10t"),
        (["--backbones", other], "does not fit the backbone resnet10t"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            run("digits", *HEADS, *words)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "run.json").write_text('{"dataset_name": "a"}')
    with pytest.raises(FileExistsError, match="contains another run, which differs in dataset_name"):
        run("digits", *HEADS)
    runs = TrainingRuns(tmp_path, ImageSourceOptions("digits"), {})
    for names in (("a/b", "a-b"), ("ü", "/")):  # similar names have their own folders
        folders = {runs.model_folder(Arm(name, {}), 0) for name in names}
        assert (len(folders), {folder.parent for folder in folders}) == (2, {tmp_path})


@pytest.mark.parametrize(
    ("metric", "option", "message"),
    [
        ("map_at_r", ["--eval_fraction", "0.1"], "map_at_r needs images of 2 classes, 1 of them with at least 2; got "),
        ("unseen_few_shot_accuracy", [], "2 of them with at least 6; got 2 and 0"),
        ("unseen_recall_at_1", ["--left_out_classes", "0.1"], "images of 2 classes, 1 of them .*; got 1 and 1"),
    ],
)
def test_a_measure_that_the_parts_do_not_define_is_refused(refused, photos, metric, option, message):
    assert re.search(message, refused(photos, *HEADS, "--metric", metric, *option))


def test_a_finished_frozen_comparison_is_continued_by_training_in_full(run, backbone, photos):
    words = [photos, *HEADS, *frozen_words(backbone)]
    _, out = run(*words)
    trials = (out / "trials.jsonl").read_bytes()
    more = ["--finetune", "2", "--training", "{num_train_epochs: 1}"]
    run(*words, *more)
    assert (out / "trials.jsonl").read_bytes() == trials
    assert len(results(out / "finetuned")["comparison"]) == 2
    with pytest.raises(FileExistsError, match="which differs in training"):
        run(*words, "--finetune", "2", "--training", "{num_train_epochs: 2}")


NO_GROUP = "column 'patient' must have the name of a group in each row"


@pytest.mark.parametrize(
    ("splits", "words", "message"),
    [
        (
            {
                "train": {"patient": [f"{n // 2}" for n in range(24)]},
                "test": {"patient": [f"{8 + n // 2}" for n in range(24)]},
            },
            ["--group_column", "patient"],
            "8 of the 24 test images, or others of their patient, are also images",
        ),
        *(
            ({"train": {"patient": patients * 8}}, ["--group_column", "patient"], NO_GROUP)
            for patients in (["a", "b", None], [1, 2, None], [1.0, 2.0, math.nan], [[1], [2], [3]])
        ),
        ({"train": {"label": [0, 1, 2] * 5 + [3]}}, [], r"The least populated class"),
        (
            {"train": {"label": [0, 1, 2] * 5}, "test": {"label": [0, 1, 2, 3] * 3}},
            [],
            "1 classes of the test images, such as d, have no training images",
        ),
    ],
)
def test_data_that_cannot_be_divided_is_refused(refused, tmp_path, splits, words, message):
    (tmp_path / "data").mkdir()
    for split, columns in splits.items():
        cells = {"label": [n % 2 for n in range(24)]} | columns
        cells["image"] = [*np.zeros((len(cells["label"]), 8, 8), np.uint8)]
        rows = Dataset.from_dict(cells).cast_column("image", Image()).cast_column("label", ClassLabel(names=[*"abcd"]))
        rows.to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    assert re.search(message, refused(str(tmp_path / "data"), *HEADS, *words))
