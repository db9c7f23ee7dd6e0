import json
import shutil

import pytest
import timm
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

from hf_sphere.hyperplanes import projection_statistics
from hf_sphere.utils.snapshots import list_snapshots

RECIPE = "projections"

# LeNet with nine layers on the bundled digits: 200 images per epoch in 4 steps.
TRAIN = ["--dataset_name", "digits", "--max_train_samples", "200", "--max_eval_samples", "100", "--backbone", "lenet9"]
TRAIN += ["--head", "softmax", "--optim", "sgd", "--per_device_train_batch_size", "50", "--disable_tqdm"]
TRAIN += ["--num_train_epochs", "3", "--snapshot_epochs", "1"]


@pytest.fixture
def no_plots(recipe, monkeypatch):
    """Leave out the plots, which take most of the time."""
    monkeypatch.setattr(recipe, "PLOTS", [])


@pytest.fixture(scope="module")
def trained(load_recipe, run_quickly, tmp_path_factory):
    """The folder of a training run with snapshots; read only."""
    train = run_quickly(load_recipe("train_image_classification"), TRAIN)
    return train(tmp_path_factory.mktemp("trained") / "digits-lenet9")


@pytest.fixture(scope="module")
def followed(recipe, trained, tmp_path_factory):
    """The recipe's output for that run; read only."""
    folder = tmp_path_factory.mktemp("followed") / "projections"
    words = ["--model_name_or_path", str(trained), "--output_dir", str(folder), "--disable_tqdm"]
    recipe.main(words)
    return folder


def compute(recipe, model, folder, *words):
    recipe.main(["--model_name_or_path", str(model), "--output_dir", str(folder), *words])
    return json.loads((folder / "all_results.json").read_text())


@pytest.mark.usefixtures("no_plots")
def test_the_saved_model_is_measured_or_the_last_snapshot_of_an_unfinished_run(recipe, trained, tmp_path, capsys):
    snapshots = list_snapshots(trained)
    for name, kept, snapshot in (("run", trained, snapshots[1]), ("unfinished", trained / "snapshots", snapshots[-1])):
        folder, output = tmp_path / name, tmp_path / f"of-{name}"
        shutil.copytree(kept, folder / kept.relative_to(trained))
        if name == "run":
            shutil.copy(snapshot.path, folder / "model.safetensors")
        compute(recipe, folder, output, "--disable_tqdm")
        saved = json.loads((output / "projections.json").read_text())
        assert saved == projection_statistics(snapshot).to_dict()
    assert capsys.readouterr().out.count("snapshot of epoch 3") == 1


def test_results_are_replaced_and_files_of_an_earlier_call_removed_only_if_requested(recipe, trained, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("training.json", "along_training.png", "histograms.png", "all_results.json"):
        (folder / name).write_text("{}")
    model = trained / "model.safetensors"
    with pytest.raises(FileExistsError, match="--overwrite_output_dir"):
        compute(recipe, model, folder)
    compute(recipe, model, folder, "--normalize", "false", "--overwrite_output_dir")
    names = {path.name for path in folder.iterdir()}
    assert "masses.png" in names
    assert not names & {"training.json", "along_training.png", "histograms.png"}  # raw projections have none


@pytest.mark.usefixtures("no_plots")
def test_a_timm_model_is_loaded_by_name(recipe, tmp_path, monkeypatch):
    model = timm.create_model("test_resnet")  # pretrained weights are on the Hub
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: {"test_resnet": model}[name])
    found = compute(recipe, "timm:test_resnet", tmp_path / "out", "--layers", "linear")
    assert found["num_filters"] == model.num_classes


@pytest.fixture
def entries(followed):
    return json.loads((followed / "training.json").read_text())["epochs"]


def test_each_snapshot_of_a_run_is_measured_with_the_accuracies_of_the_run(entries, trained, results_of):
    assert [entry["epoch"] for entry in entries] == [0, 1, 2, 3]
    for entry, snapshot in zip(entries, list_snapshots(trained), strict=True):
        assert entry["projections"]["net"]["mean"] == projection_statistics(snapshot).net.mean
    history = results_of(trained)["history"]
    assert "eval_accuracy" not in entries[0]
    for name in ("eval_accuracy", "train_accuracy"):
        assert [entry[name] for entry in entries[1:]] == [entry[name] for entry in history]


def test_distances_are_from_the_first_snapshot(entries, trained):
    assert all(layer["l2"] == 0 for layer in entries[0]["distances"]["layers"].values())
    name = "sphere_vision.backbone.layers.0"
    first, last = (load_file(list_snapshots(trained)[at].path)[f"{name}.weight"].double() for at in (0, -1))
    expected = (last - first).norm() / first.norm()
    assert entries[-1]["distances"]["layers"][name]["l2"] == pytest.approx(expected.item())


def test_the_output_is_the_result_of_the_function_with_plots_and_a_summary_of_model_and_data(followed, trained):
    saved = json.loads((followed / "projections.json").read_text())
    assert saved == projection_statistics(trained / "model.safetensors").to_dict()
    for picture in ("masses", "histograms", "along_training"):
        with Image.open(followed / f"{picture}.png") as image:
            assert image.width > 500
        assert "<svg" in (followed / f"{picture}.svg").read_text()[:1000]
    summary = json.loads((followed / "all_results.json").read_text())
    names = ("backbone", "dataset_name", "num_layers", "num_filters")
    assert [summary[name] for name in names] == ["lenet9", "digits", 6, 2 * (6 + 16 + 64)]


@pytest.mark.usefixtures("no_plots")
def test_saved_transformers_models_are_measured_without_building_them(recipe, tmp_path, monkeypatch):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "bert")
    for layer in (nn.Conv2d, nn.Linear):
        monkeypatch.setattr(layer, "__init__", lambda *args, **kwargs: pytest.fail("a layer was built"))
    assert compute(recipe, tmp_path / "resnet", tmp_path / "out")["num_layers"] == 5
    assert compute(recipe, tmp_path / "bert", tmp_path / "text", "--layers", "linear")["num_layers"] == 13


@pytest.mark.usefixtures("no_plots")
def test_only_the_given_snapshots_are_measured_and_a_missing_one_is_an_error(recipe, trained, tmp_path):
    paths = [str(snapshot.path) for snapshot in list_snapshots(trained)]
    compute(recipe, trained, tmp_path / "out", "--disable_tqdm", "--snapshots", paths[0], paths[2])
    entries = json.loads((tmp_path / "out" / "training.json").read_text())["epochs"]
    assert [entry["epoch"] for entry in entries] == [0, 2]
    with pytest.raises(FileNotFoundError, match=r"epoch-0009\.safetensors"):
        compute(recipe, trained, tmp_path / "new", "--snapshots", paths[0], str(tmp_path / "epoch-0009.safetensors"))
