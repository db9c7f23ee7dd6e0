"""A folder without splits: the training images are distinguished from the evaluation images by the model's record."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import load_dataset

from hf_sphere.data.sources import load_splits

QUICK = ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 16}", "--num_train_epochs", "1"]
QUICK += ["--learning_rate", "0.01", "--disable_tqdm", "--eval_seed", "3"]
QUICK += ["--head", "cosine", "--head_kwargs", "{scale: 64.0}"]  # overconfident, so that the calibration is kept

Extract = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Digits below 6 in `known`, and others in `unknown`, each without splits."""
    root = tmp_path_factory.mktemp("images")
    for row, example in enumerate(load_splits("digits")["train"].select(range(400))):
        path = root / ("known" if example["label"] < 6 else "unknown") / str(example["label"]) / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        example["image"].save(path)
    return root


@pytest.fixture(scope="module")
def model(load_recipe, run_main, cache, folders, tmp_path_factory) -> Path:
    """A model of the known digits, trained on 80 % of 80 % of them."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    words = [*QUICK, *cache, "--dataset_name", str(folders / "known"), "--validation_fraction", "0.2"]
    words += ["--calibrate", "temperature", "--load_best_model_at_end"]
    run_main(load_recipe("train_image_classification"), [*words, "--output_dir", str(folder)])
    return folder


@pytest.fixture
def extract(load_recipe, run_main, cache, folders, model, tmp_path) -> Extract:
    def run(name: str, *words: str, images: Path = folders / "known", model: Path = model) -> Path:
        argv = ["--model_name_or_path", str(model), "--dataset_name", str(images), "--disable_tqdm", *cache, *words]
        run_main(load_recipe("extract"), [*argv, "--output_dir", str(tmp_path / name)])
        return tmp_path / name

    return run


@pytest.fixture
def measure(load_recipe, run_main) -> Callable[..., None]:
    def run(own: Path, train: Path, other: Path) -> None:
        words = ["--embeddings", own, "--train_embeddings", train, "--out_of_distribution", other]
        run_main(load_recipe("evaluate"), [*map(str, words)])

    return run


def rows_of(folder: Path, column: str) -> torch.Tensor:
    (rows,) = load_dataset(str(folder)).values()
    return torch.tensor(rows[column][:])


def test_a_fit_to_tested_images_is_refused(extract, measure, folders):
    own, train = extract("test"), extract("train", "--split", "train")
    other = extract("other", "--split", "train", images=folders / "unknown")
    count = len(rows_of(own, "index"))
    with pytest.raises(ValueError, match=rf"{count} of the {count} held-out inputs are among "):
        measure(own, train, other)


def test_a_fit_to_the_training_images_is_evaluated(extract, measure, folders, capsys):
    own, train = extract("test"), extract("train", "--split", "training")
    other = extract("other", "--split", "train", images=folders / "unknown")
    ids = [set(rows_of(folder, "row_id").tolist()) for folder in (own, train)]
    assert ids[0].isdisjoint(ids[1])
    measure(own, train, other)
    assert "ood_other_auroc_mahalanobis" in capsys.readouterr().out


def test_embeddings_without_identities_are_compared_by_their_values(extract, measure, folders, tmp_path):
    own, train = extract("test"), extract("train", "--split", "train", "--batch_size", "50")
    other = extract("other", "--split", "train", images=folders / "unknown")
    for folder in (own, train):
        ((split, rows),) = load_dataset(str(folder)).items()
        rows.remove_columns("row_id").to_parquet(tmp_path / f"earlier-{folder.name}" / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"held-out inputs are among .*, by their values"):
        measure(tmp_path / "earlier-test", tmp_path / "earlier-train", other)


def test_a_link_to_the_folder_names_the_same_images(extract, folders, tmp_path):
    (tmp_path / "link").symlink_to(folders / "known")
    linked = extract("linked", images=tmp_path / "link")
    assert torch.equal(rows_of(linked, "row_id"), rows_of(extract("direct"), "row_id"))


def test_the_number_of_training_images_is_printed_and_stored(extract, capsys):
    count = json.loads((extract("train", "--split", "training") / "embeddings.json").read_text())["num_training_images"]
    assert f"the model was trained on {count:,} of these images" in capsys.readouterr().out
    about = json.loads((extract("held_out", "--split", "validation") / "embeddings.json").read_text())
    assert (about["num_training_images"], about["num_calibration_images"]) == (0, about["num_images"])


def test_other_data_than_those_of_the_training_are_refused(extract, folders, tmp_path):
    with pytest.raises(ValueError, match=r"no split 'training'; the data has train.*was trained on other data"):
        extract("other", "--split", "training", images=folders / "unknown")
    assert not (tmp_path / "other").exists()
