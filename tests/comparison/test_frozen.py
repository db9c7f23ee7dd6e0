"""Heads on frozen features, of a small saved model and of a small encoder of transformers."""

import json
import statistics

import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.comparison import training_runs as frozen
from hf_sphere.comparison.arms import Division, make_arm
from hf_sphere.comparison.measures import BLOCKS, mean_or_none
from hf_sphere.comparison.plan import Plan
from hf_sphere.comparison.study import Study
from hf_sphere.data import ImageSourceOptions, load_image_split
from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows
from hf_sphere.data.sources import find_rows, load_splits
from hf_sphere.models import SphereVisionImageProcessor

DIVISION = Division("train", "test", label="label")
SETTING = {"learning_rate": 0.03}


@pytest.fixture(scope="module")
def backbones(tmp_path_factory) -> list[str]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("backbones")
    shape = {"num_channels": 1, "image_size": [28, 28]}
    saved = SphereVisionConfig(backbone="lenet5", head="softmax", num_labels=3, **shape)
    SphereVisionForImageClassification(saved).save_pretrained(folder / "lenet")
    size = {"height": 28, "width": 28}
    options = {"num_channels": 1, "image_mean": [0.4], "image_std": [0.3]}
    SphereVisionImageProcessor(size=size, **options).save_pretrained(folder / "lenet")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**small, image_size=16, patch_size=8)).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    return [str(folder / "lenet"), str(folder / "vit")]


@pytest.fixture(scope="module")
def runs(backbones, tmp_path_factory) -> frozen.FrozenRuns:
    source, splits = ImageSourceOptions("digits", label_column_name="label"), load_splits("digits")
    files = {name: tmp_path_factory.mktemp("features") / "features.safetensors" for name in backbones}
    for name, file in files.items():
        frozen.cache_features(name, source, splits, "train+test", file)
    names = {name for each in (DIVISION.tuning(), DIVISION.of_seed(0)) for name in (each.train, each.test)}
    left_out = Division("train", "test", left_out=0.2, label="label").of_seed(0)
    names |= {left_out.train, left_out.test, left_out.unseen}
    positions = {name: find_rows(splits, name, "label") for name in names}
    files, digits = {name: str(file) for name, file in files.items()}, [str(digit) for digit in range(10)]
    return frozen.FrozenRuns(files, positions, source, digits, "label")


def arm(backbones, head: str, index: int = 0, **options):
    return make_arm(head, {"head": head, "backbone": backbones[index], "embedding_dim": 8, **options}, 3e-3)


def test_standardized_features_have_mean_0_and_the_deviation_1_of_the_training_rows():
    features = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    options = {"embedding_dim": 2, "head": "softmax", "head_kwargs": {}}
    found = frozen.FeatureClassifier(features, 3, options).standardize(features)
    assert found.tolist() == [[-1.0, 0.0], [1.0, 0.0]]  # a constant column is only shifted


@pytest.mark.parametrize("index", [0, 1])
def test_cached_features_are_those_of_the_backbone(runs, backbones, index):
    cached = frozen.read_features(runs.files[backbones[index]])
    options = frozen.prepared_options(backbones[index], runs.source)
    images = load_image_split(options, "test").batches
    batch = next(iter(images.epoch()))
    if index == 0:
        encoder = SphereVisionForImageClassification.from_pretrained(backbones[0]).sphere_vision.backbone.eval()
    else:
        vit = ViTModel.from_pretrained(backbones[1]).eval()
        encoder = lambda pixels: vit(pixels).last_hidden_state[:, 0]  # noqa: E731
    with torch.no_grad():
        expected = encoder(batch["pixel_values"])
    train = len(load_splits("digits")["train"])
    torch.testing.assert_close(cached["features"][train : train + len(expected)], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(cached["labels"][train : train + len(expected)], batch["labels"])


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("head", ["softmax", "arcface"])
def test_the_saved_model_has_the_logits_of_the_trained_head(runs, backbones, tmp_path, head, index):
    parts, own = DIVISION.of_seed(0), arm(backbones, head, index)
    trained = runs.train(own, SETTING, parts, seed=0, epochs=2).eval()
    expected = runs.outputs(trained, own, parts.test, torch.arange(10)).logits
    runs.save(own, SETTING, parts, epochs=2, folder=tmp_path / "model")
    model = SphereVisionForImageClassification.from_pretrained(tmp_path / "model").eval()
    processor = SphereVisionImageProcessor.from_pretrained(tmp_path / "model")
    images = load_splits("digits")["test"][:32]["image"]
    with torch.no_grad():
        logits = model(**processor(images, return_tensors="pt")).logits
    # Without AVX2 torch resizes to up to one gray level more or less than PIL, which resized the training images.
    tolerance = 0.03 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 1e-4
    torch.testing.assert_close(logits, expected[:32], atol=tolerance * float(expected.abs().max()), rtol=0)
    assert [*model.config.id2label.values()] == [str(digit) for digit in range(10)]


def test_the_saved_model_has_only_the_classes_and_images_that_were_not_left_out(runs, backbones, tmp_path):
    parts, splits = Division("train", "test", left_out=0.2, label="label").of_seed(0), load_splits("digits")
    runs.save(arm(backbones, "softmax"), SETTING, parts, epochs=1, folder=tmp_path / "model")
    names = json.loads((tmp_path / "model" / "config.json").read_text())["id2label"]
    test = runs.select(arm(backbones, "softmax"), parts.test)[1]
    assert sorted(names.values()) == sorted(str(label) for label in test.unique().tolist())
    assert len(names) == 8
    record = DataRecord.read(tmp_path / "model")
    for key, part in (("train", parts.train), ("eval", parts.test)):
        expected = identify_rows(splits, part, "label", fingerprint(splits))
        assert sorted(record.ids[key].tolist()) == sorted(expected.tolist())


def test_a_run_is_the_same_twice_and_leaves_the_random_numbers_of_the_process(runs, backbones):
    before, parts = torch.get_rng_state(), DIVISION.of_seed(0)
    found = [runs.run(arm(backbones, "vmf"), SETTING, parts, seed=3, epochs=3) for _ in range(2)]
    torch.testing.assert_close(found[0].known, found[1].known, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_softmax_head_is_as_accurate_as_logistic_regression(runs, backbones):
    from sklearn.linear_model import LogisticRegression

    own, parts = arm(backbones, "softmax", embedding_dim=64), DIVISION.of_seed(0)
    (train, labels), (test, targets) = runs.select(own, parts.train), runs.select(own, parts.test)
    mean, deviation = train.double().mean(0), train.double().std(0).clamp_min(1e-12)
    plain = LogisticRegression(max_iter=300).fit((train - mean) / deviation, labels)
    expected = 100 * plain.score((test - mean) / deviation, targets)
    accuracy = mean_or_none("accuracy", runs.run(own, SETTING, parts, seed=0, epochs=20))
    assert accuracy == pytest.approx(expected, abs=3)
    assert accuracy > 85


def test_left_out_classes_are_tested_apart_and_an_arm_that_diverges_has_no_values(runs, backbones):
    parts = Division("train", "test", left_out=0.2, label="label").of_seed(0)
    assert runs.run(arm(backbones, "softmax"), {"learning_rate": 1e30}, parts, seed=0, epochs=5) is None
    evaluated = runs.run(arm(backbones, "cosine"), SETTING, parts, seed=0, epochs=2)
    assert evaluated.known.logits.shape[1] == 8
    assert int(evaluated.known.labels.max()) == 7
    assert {*evaluated.unseen.ids.tolist()}.isdisjoint(evaluated.known.ids.tolist())
    assert len(evaluated.unseen.labels.unique()) == 2
    assert int(evaluated.unseen.labels.min()) >= 8


def test_scores_of_a_backbone_are_those_of_its_features(runs, backbones):
    own, parts = arm(backbones, "softmax", 1), DIVISION.of_seed(0)
    (train, labels), (test, targets) = (map(np.asarray, runs.select(own, part)) for part in parts[:2])
    train, test = (each / np.linalg.norm(each.astype(float), axis=1, keepdims=True) for each in (train, test))
    nearest = labels[np.argsort(-test @ train.T)[:, :5]]
    votes = [np.bincount(row, minlength=10).argmax() for row in nearest]
    within = test @ test.T
    np.fill_diagonal(within, -np.inf)
    scores = frozen.score_backbone(runs, own.backbone, [parts])
    assert scores["5-NN accuracy"] == pytest.approx(100 * np.mean(votes == targets), abs=0.6)  # ties, float32
    assert scores["recall_at_1"] == pytest.approx(100 * np.mean(targets[within.argmax(1)] == targets), abs=0.6)


def test_an_undefined_score_of_a_backbone_is_left_out(runs, backbones, monkeypatch):
    own, parts = arm(backbones, "softmax"), DIVISION.of_seed(0)
    labels = runs.select(own, parts.test)[1].tolist()
    first = torch.tensor([labels.index(label) for label in range(10)])  # one image per class
    monkeypatch.setitem(runs.positions, parts.test, runs.positions[parts.test][first])
    scores = frozen.score_backbone(runs, own.backbone, [parts])
    assert (scores["recall_at_1"], scores["map_at_r"], scores["5-NN accuracy"] is None) == (None, None, False)


def make_study(runs, arm, folder, metric: str = "accuracy") -> Study:
    plan = Plan(dataset_name="digits", metric=metric, seeds=2, num_settings=2)
    return Study(runs, [arm], DIVISION, plan, epochs=1, folder=folder)


def test_trials_are_kept_and_not_repeated(runs, backbones, tmp_path, monkeypatch):
    own = arm(backbones, "softmax", grid={"learning_rate": [0.01, 0.03]})
    study = make_study(runs, own, tmp_path)
    tuned = study.tune(own)
    lines = (tmp_path / "trials.jsonl").read_text()
    monkeypatch.setattr(frozen.FrozenRuns, "run", lambda *_, **__: pytest.fail("it repeats a trial"))
    assert study.tune(own) == tuned
    assert (tmp_path / "trials.jsonl").read_text().startswith(lines)


def test_the_outcomes_of_a_run_have_the_mean_of_its_value(runs, backbones, tmp_path):
    make_study(runs, arm(backbones, "softmax"), tmp_path, "calibration_error").run(
        arm(backbones, "softmax"), SETTING, 0
    )
    _, result = json.loads((tmp_path / "trials.jsonl").read_text())
    assert statistics.fmean(result["outcomes"]) == pytest.approx(result["values"]["calibration_error"], abs=1e-9)
    assert {*result["ids"]} == {row % BLOCKS for row in runs.positions["test"].tolist()}
