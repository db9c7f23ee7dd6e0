import json
import shutil
from contextvars import copy_context
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from case_selection import each
from datasets import Dataset
from PIL import Image

from hf_sphere import SphereVisionForImageClassification
from hf_sphere.commands.command_line import run_job
from hf_sphere.data import ImageDataOptions, load_image_data
from hf_sphere.training import find_task
from hf_sphere.utils.model_sources import load_classifier
from hf_sphere.utils.snapshots import list_snapshots

RECIPE = "reinitialize"

# LeNet with nine layers on the bundled digits: 200 images per epoch in 4 steps.
TRAIN = ["--dataset_name", "digits", "--max_train_samples", "200", "--max_eval_samples", "100", "--backbone", "lenet9"]
TRAIN += ["--head", "softmax", "--optim", "adam", "--per_device_train_batch_size", "50", "--disable_tqdm"]
TRAIN += ["--num_train_epochs", "6", "--learning_rate", "0.003", "--snapshot_epochs", "3", "--label_noise", "0.5"]


@pytest.fixture(scope="module")
def trained(load_recipe, run_quickly, tmp_path_factory):
    """The folder of a training run with snapshots and half of the labels random; read only."""
    train = run_quickly(load_recipe("train_image_classification"), TRAIN)
    return train(tmp_path_factory.mktemp("trained") / "digits-lenet9")


@pytest.fixture(scope="module")
def measure(recipe, run_main, cache):
    """Run the recipe on a model into a folder and return the saved result."""

    def run(model, folder, *words):
        words = ["--model_name_or_path", str(model), "--output_dir", str(folder), "--disable_tqdm", *cache, *words]
        run_main(recipe, words)
        return json.loads((folder / "reinitialization.json").read_text())

    return run


@pytest.fixture
def parsed(recipe):
    """Parse a command line of the recipe."""
    kinds = recipe.RobustnessArguments, recipe.ImageSourceOptions
    return lambda model, *words: recipe.parse_arguments(kinds, ["--model_name_or_path", str(model), *words])


@pytest.fixture(scope="module")
def measured(measure, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "reinitialization"
    measure(trained, folder, "--num_random", "2")
    return folder


def test_every_layer_is_reset_to_every_snapshot_and_random_weights(measured, trained, results_of):
    names = ("reinitialization", "all_results")
    result, summary = (json.loads((measured / f"{name}.json").read_text()) for name in names)
    assert result["accuracy"] == pytest.approx(results_of(trained)["eval_accuracy"])
    assert len(result["layers"]) == 9
    for layer in result["layers"].values():
        assert list(layer["snapshots"]) == ["0", "3", "6"]
        assert layer["snapshots"]["6"] == result["accuracy"]  # the last one changes nothing
        assert len(layer["random"]["values"]) == 2
    lost = {name: summary["accuracy"] - layer["snapshots"]["0"] for name, layer in result["layers"].items()}
    assert set(summary["critical_layers"]) == {name for name, drop in lost.items() if drop > 0.05} != set()
    with Image.open(measured / "reinitialization.png") as image:
        assert image.width > 500
    assert "<svg" in (measured / "reinitialization.svg").read_text()[:1000]


def test_top_k_accuracy_matches_ranks_of_the_logits(measure, trained, tmp_path):
    words = ["--top_k", "3", "--layers", "linear", "--num_random", "0", "--heat_map", "relative_drop"]
    result = measure(trained, tmp_path / "out", *words)
    model = SphereVisionForImageClassification.from_pretrained(trained).eval()
    batches = load_image_data(ImageDataOptions(max_eval_samples=100), progress=False).evaluation
    with torch.no_grad():
        logits, labels = zip(*((model(b["pixel_values"]).logits, b["labels"]) for b in batches.epoch()), strict=True)
    logits, labels = torch.cat(logits), torch.cat(labels)
    higher = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert result["accuracy"] == pytest.approx((higher < 3).double().mean().item())
    assert result["accuracy"] > (higher < 1).double().mean().item()
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["metric"] == "top-3 accuracy"


@pytest.mark.parametrize("top_k", [1, 3])
def test_of_equal_logits_those_of_the_first_classes_are_the_largest(recipe, top_k):
    batch = {"pixel_values": torch.zeros(5, 50), "labels": torch.zeros(5, dtype=torch.long)}
    batches = SimpleNamespace(epoch=lambda augment: [batch])
    assert recipe.accuracy(lambda pixels: pixels, batches, 5, top_k) == 1


def test_splits_and_numbers_that_the_run_lacks_are_refused(measure, trained, tmp_path, monkeypatch, recipe):
    with pytest.raises(ValueError, match="--top_k 10 must be below the number of classes, 10"):
        measure(trained, tmp_path / "out", "--top_k", "10")
    with pytest.raises(ValueError, match="no images were held out"):
        measure(trained, tmp_path / "out", "--split", "validation")
    smaller = replace(load_classifier(str(trained)), num_classes=5)
    monkeypatch.setattr("hf_sphere.utils.model_sources.load_classifier", lambda *_, **__: smaller)
    with pytest.raises(ValueError, match=r"labels from 0 to 9, but .* has 5 classes"):
        measure(trained, tmp_path / "out")


@pytest.fixture(scope="module")
def corrupted(load_recipe, run_quickly, tmp_path_factory):
    """A run with a separate corruption seed, held-out images, sampled classes and half of the labels random."""
    train = run_quickly(load_recipe("train_image_classification"), TRAIN)
    words = ["--seed", "3", "--validation_fraction", "0.3", "--sample_classes", "6", "--max_train_samples", "150"]
    words.append("--load_best_model_at_end")
    return train(tmp_path_factory.mktemp("corrupted") / "run", *words)


@pytest.fixture(scope="module")
def by_hand(corrupted):
    """Accuracies of that run on each part of its images, computed with the model and data loading functions."""
    settings = json.loads((corrupted / "run.json").read_text())
    options = ImageDataOptions(
        validation_fraction=0.3, sample_classes=6, label_noise=0.5, corruption_seed=settings["corruption_seed"],
        max_train_samples=150, max_eval_samples=100,
    )  # fmt: skip
    data = load_image_data(options, seed=3, progress=False)
    model = SphereVisionForImageClassification.from_pretrained(corrupted).eval()

    @torch.no_grad()
    def accuracy(batches):
        pairs = ((model(b["pixel_values"]).logits.argmax(-1), b["labels"]) for b in batches.epoch(augment=False))
        return sum(int((found == labels).sum()) for found, labels in pairs) / batches.examples_per_epoch

    parts = {"train": data.train, "eval": data.evaluation, "validation": data.validation}
    return {name: accuracy(batches) for name, batches in parts.items()}


@pytest.mark.parametrize("split", ["train", "eval", "validation"])
@pytest.mark.parametrize("words", [[], ["--seed", "8"]])
@each("split")
@each("words")
def test_images_and_labels_are_those_of_the_run(split, words, measure, corrupted, by_hand, tmp_path):
    result = measure(corrupted, tmp_path / "out", "--split", split, "--layers", "linear", "--num_random", "0", *words)
    assert result["accuracy"] == pytest.approx(by_hand[split])


def test_given_arguments_take_precedence_even_if_they_are_defaults(measure, corrupted, by_hand, tmp_path):
    words = ["--split", "train", "--layers", "linear", "--num_random", "0", "--label_noise", "0"]
    assert measure(corrupted, tmp_path / "out", *words)["accuracy"] != pytest.approx(by_hand["train"])


def test_image_subsets_cover_all_classes(recipe, trained, parsed):
    """The data may be sorted by class."""
    args, data_args = parsed(trained, "--max_samples", "40", "--disable_tqdm")
    seed = recipe.adopt_settings(args, data_args, trained, load_classifier(str(trained)), set())
    few = recipe.load_batches(args, data_args, seed, Accelerator(), None)
    args.max_samples = None
    all_of_them = recipe.load_batches(args, data_args, seed, Accelerator(), None)
    assert few.num_examples == 40
    assert set(few.epoch_rows().tolist()) < set(all_of_them.epoch_rows().tolist())
    assert few.epoch_rows().tolist() != all_of_them.epoch_rows()[:40].tolist()


def test_classes_of_a_split_that_lacks_some_are_those_of_the_model(recipe, parsed, tmp_path):
    """Names in a column of text are numbered by split."""
    cells = {"image": [Image.new("L", (8, 8), n) for n in range(4)], "label": ["bee", "cow", "bee", "cow"]}
    Dataset.from_dict(cells).to_parquet(tmp_path / "test.parquet")
    words = ["--dataset_name", str(tmp_path), "--image_mean", "0", "--image_std", "1"]
    args, data_args = parsed("none", *words, "--cache_dir", str(tmp_path / "decoded"))
    model = SimpleNamespace(config=SimpleNamespace(label2id={"ant": 0, "bee": 1, "cow": 2}))
    assert recipe.load_batches(args, data_args, 0, Accelerator(), model).labels.tolist() == [1, 2, 1, 2]
    del model.config.label2id["cow"]  # the numbers of the split would be wrong
    with pytest.raises(ValueError, match="the model has a class 'bee', but none 'cow'"):
        recipe.load_batches(args, data_args, 0, Accelerator(), model)


@pytest.mark.parametrize("task", ["retrieval", "few_shot", "regression", "joint"])
def test_a_run_of_another_task_is_refused(task, measure, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "other")
    names = [field.name for kind in find_task(task).arguments for field in fields(kind)]
    (run / "run.json").write_text(json.dumps(dict.fromkeys(names)))
    with pytest.raises(ValueError, match=r"not a run of hf-sphere train classification"):
        measure(run, tmp_path / "out")


def test_a_finished_run_is_not_measured_again(measured, measure, trained, monkeypatch, recipe):
    before = (measured / "cells.jsonl").read_text()
    monkeypatch.setattr(recipe, "accuracy", lambda *_: pytest.fail("a model was run"))
    measure(trained, measured, "--num_random", "2")
    assert (measured / "cells.jsonl").read_text() == before


def test_an_interrupted_run_resumes(measured, measure, trained, monkeypatch, recipe, tmp_path, capsys, cache):
    whole, calls = recipe.accuracy, []

    def stop_at_the_fifth(model, *images):
        calls.append(model)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return whole(model, *images)

    words = ["--model_name_or_path", str(trained), "--output_dir", str(tmp_path / "out"), "--num_random", "2", *cache]
    monkeypatch.setattr(recipe, "accuracy", stop_at_the_fifth)
    with pytest.raises(SystemExit) as stop:
        copy_context().run(run_job, "reinitialize", words)
    assert stop.value.code == 130
    assert "Stopped; files that were finished are complete." in capsys.readouterr().err
    kept = (tmp_path / "out" / "cells.jsonl").read_text()
    assert kept
    monkeypatch.setattr(recipe, "accuracy", whole)
    measure(trained, tmp_path / "out", "--num_random", "2")
    assert (tmp_path / "out" / "cells.jsonl").read_text().startswith(kept)
    names = ["reinitialization.json", "all_results.json"]
    assert all((tmp_path / "out" / name).read_text() == (measured / name).read_text() for name in names)


@pytest.mark.parametrize("words", [["--layers", "conv"], ["--seed", "5"], ["--num_random", "1"]])
def test_a_folder_of_other_measurements_is_refused(words, measured, measure, trained):
    words = words if "--num_random" in words else [*words, "--num_random", "2"]
    with pytest.raises(FileExistsError, match=f"differs in .*{words[0][2:]}"):
        measure(trained, measured, *words)
    snapshots = [str(snapshot.path) for snapshot in list_snapshots(trained)]
    with pytest.raises(FileExistsError, match=r"differs in .*weights"):  # of other weights of the same names
        measure(trained, measured, "--num_random", "2", "--snapshots", *snapshots[:2])


def test_a_timm_model_requires_no_snapshots(measure, tmp_path, monkeypatch, recipe):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))  # those are on the Hub
    words = ["--dataset_name", "digits", "--max_eval_samples", "20", "--layers", "linear", "--num_random", "2"]
    result = measure("timm:test_resnet", tmp_path / "out", *words)
    assert len(result["layers"]["fc"]["random"]["values"]) == 2
