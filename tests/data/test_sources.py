from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from made_up_images import make_dataset
from sklearn.datasets import load_digits

from hf_sphere.data import sources
from hf_sphere.data.sources import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    VALUE_COLUMNS,
    find_column,
    find_split,
    held_out_names,
    load_splits,
)
from hf_sphere.search import ImageSource


def pixels_of(dataset: Dataset) -> np.ndarray:
    return np.stack([np.array(image) for image in dataset["image"]])


def columns(*names: str) -> Dataset:
    return Dataset.from_dict({name: [0] for name in names})


def test_digits_are_those_of_scikit_learn_rescaled_to_255_a_fifth_of_each_in_the_test_split():
    splits, original = load_splits("digits"), load_digits()
    assert splits["train"].features["label"].names == list("0123456789")
    pixels = np.concatenate([pixels_of(split) for split in splits.values()])
    assert (pixels.shape, pixels.dtype) == ((1797, 8, 8), np.uint8)
    labels = np.concatenate([split["label"][:] for split in splits.values()])
    ours = sorted((label, *image.ravel()) for label, image in zip(labels, pixels, strict=True))
    rescaled = np.rint(original.images / 16 * 255).astype(int)
    assert ours == sorted((label, *image.ravel()) for label, image in zip(original.target, rescaled, strict=True))
    assert np.bincount(splits["test"]["label"]).tolist() == (np.bincount(original.target) // 5).tolist()


def test_two_clusters_are_100_points_per_class_as_images_of_1_by_2_pixels_that_map_back_to_them():
    splits = load_splits("two_clusters")
    for dataset in (splits["train"], splits["test"]):
        assert pixels_of(dataset).shape == (200, 1, 2)
        assert np.bincount(dataset["label"]).tolist() == [100, 100]
        points = pixels_of(dataset)[:, 0] * (1.1 / 255) - 0.05
        distance = np.abs(points - np.array(dataset["label"])[:, None])
        assert distance.max() <= 0.05 + 0.5 * 1.1 / 255  # of the quantization
        assert distance.max() > 0.04
    assert not np.array_equal(pixels_of(splits["train"]), pixels_of(splits["test"]))


@pytest.mark.parametrize("name", ["digits", "two_clusters"])
def test_bundled_data_is_deterministic_and_not_searched_elsewhere(name, monkeypatch):
    monkeypatch.setattr(sources, "load_dataset", lambda *_: pytest.fail("looked for bundled data elsewhere"))
    first, second = load_splits(name), sources.BUNDLED[name].__wrapped__()  # built again, without the cache
    assert set(first) == {"train", "test"}
    for split in ("train", "test"):
        np.testing.assert_array_equal(pixels_of(first[split]), pixels_of(second[split]))
        assert first[split]["label"][:] == second[split]["label"][:]


def test_a_folder_with_the_name_of_bundled_data_is_an_error_that_says_how_to_name_it(save, monkeypatch):
    folder = Path(save(train=make_dataset([np.zeros((3, 4), np.uint8)])))
    monkeypatch.chdir(folder.rename(folder.with_name("digits")).parent)
    for load in (load_splits, ImageSource.of):
        with pytest.raises(ValueError, match=r"digits is a bundled dataset and a folder; write \./digits"):
            load("digits")
    assert len(load_splits("./digits")["train"]) == len(ImageSource.of("./digits")) == 1


class TestClassNamesOfFiles:
    """`datasets` uses the names of one file for all, and would give images the class of another one."""

    def splits(self, *names: list[str]) -> DatasetDict:
        image = np.zeros((3, 4), dtype=np.uint8)
        parts = (make_dataset([image] * 2, [0, 1], feature=ClassLabel(names=each)) for each in names)
        return DatasetDict(zip(("train", "test"), parts, strict=True))

    @pytest.mark.parametrize("names", [["dog", "cat"], ["eel", "fox"], ["cat", "cow", "dog"]])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_other_numbers_in_parquet_files_are_an_error(self, names, streaming, save):
        with pytest.raises(ValueError, match=r"test-0.*number the classes of column 'label' differently"):
            load_splits(save(**self.splits(["cat", "dog"], names)), streaming=streaming)

    def test_other_numbers_in_a_folder_of_save_to_disk_are_an_error(self, tmp_path):
        self.splits(["cat", "dog"], ["dog", "cat"]).save_to_disk(tmp_path / "pets")
        with pytest.raises(ValueError, match="such as 'dog' and 'cat'"):
            load_splits(str(tmp_path / "pets"))

    def test_names_that_begin_alike_are_read_and_files_of_other_configurations_not_compared(self, save):
        loaded = load_splits(save(**self.splits(["cat", "dog", "eel"], ["cat", "dog"])))
        assert loaded["test"].features["label"].int2str(loaded["test"]["label"][:]) == ["cat", "dog"]
        folder = Path(save(**self.splits(["cat", "dog"], ["dog", "cat"])))
        files = "configs:\n- config_name: {0}\n  data_files: {0}-00000-of-00001.parquet\n"
        (folder / "README.md").write_text(f"---\n{files.format('train')}  default: true\n---\n")
        assert load_splits(str(folder))["train"].features["label"].names == ["cat", "dog"]


def test_a_column_is_found_by_usual_names_a_requested_one_first_and_a_fine_label_before_a_coarse_one():
    for what, usual, names in (
        ("image", IMAGE_COLUMNS, "image img"),
        ("label", LABEL_COLUMNS, "label labels fine_label coarse_label"),
        ("value", VALUE_COLUMNS, "value target year creation_year age regression_label"),
    ):
        for name in names.split():
            assert find_column(columns("other", name), None, usual, what) == name
    assert find_column(columns("label", "shape"), "shape", LABEL_COLUMNS, "label") == "shape"
    assert find_column(columns("coarse_label", "fine_label"), None, LABEL_COLUMNS, "label") == "fine_label"


def test_the_splits_of_a_configuration_that_is_also_a_folder_are_those_that_the_card_states(tmp_path):
    (tmp_path / "en").mkdir()
    for name, count in (("a", 3), ("b", 5)):
        Dataset.from_dict({"text": ["cat"] * count}).to_csv(tmp_path / "en" / f"{name}.csv")
    files = ["  - {split: train, path: en/a.csv}", "  - {split: test, path: en/b.csv}"]
    card = ["---", "configs:", "- config_name: en", "  data_files:", *files, "---", ""]
    (tmp_path / "README.md").write_text("\n".join(card))
    splits = load_splits(str(tmp_path), "en", cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 3, "test": 5}


def test_a_fraction_whose_name_has_an_exponent_is_held_out():
    splits = DatasetDict(train=Dataset.from_dict({"row": list(range(30))}))
    kept, held_out = (find_split(splits, name, "--eval_split") for name in held_out_names("train", 5e-05, 0))
    assert (len(held_out), sorted([*kept["row"], *held_out["row"]])) == (1, list(range(30)))
