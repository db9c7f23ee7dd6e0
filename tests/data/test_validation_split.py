"""A separate validation split for selecting the epoch, for every task."""

from collections.abc import Callable

import numpy as np
import pytest
from datasets import Dataset

from hf_sphere.data import ImageData

Load = Callable[..., ImageData]


@pytest.fixture
def load_three(load_named, embed, make_dataset) -> Load:
    """Load three splits of twelve images, `train`, `val` and `test`, with pixel values 0, 100 and 200."""

    def make_split(pixel: int, classes: list[int]) -> Dataset:
        images = [np.full((3, 3), pixel, np.uint8)] * 12
        # One more class than occurs, so all splits have the same class names.
        split = make_dataset(images, [classes[i % len(classes)] for i in range(12)])
        return split.add_column("value", [float(pixel + i) for i in range(12)])

    def load(classes=((0, 1, 2), (0, 1, 2), (0, 1, 2)), **options) -> ImageData:
        splits = {
            n: make_split(p, list(c)) for n, p, c in zip(("train", "val", "test"), (0, 100, 200), classes, strict=True)
        }
        most = max(splits.values(), key=lambda split: split.features["label"].num_classes).features["label"]
        splits = {name: split.cast_column("label", most) for name, split in splits.items()}
        defaults = {"image_mean": [0.0], "image_std": [1.0], "validation_split": "val"}
        return load_named(embed(**splits), **(defaults | options))

    return load


def pixels_of(batches) -> set[int]:
    return {round(value * 255) for batch in batches.epoch() for value in batch["pixel_values"].flatten().tolist()}


@pytest.mark.parametrize("task", ["classification", "regression", "joint", "retrieval", "few_shot"])
def test_every_task_takes_validation_images_from_the_split(load_three, task):
    data = load_three(task=task)
    assert [pixels_of(part) for part in (data.train, data.validation, data.evaluation)] == [{0}, {100}, {200}]
    assert data.validation.num_examples == 12


@pytest.mark.parametrize("task", ["retrieval", "few_shot"])
def test_open_set_validation_classes_are_numbered_separately(load_three, task):
    data = load_three(classes=((0, 1), (3, 5, 6), (2, 4)), task=task)
    assert next(data.validation.epoch())["labels"].unique().tolist() == [0, 1, 2]
    assert (data.class_names, data.eval_class_names) == (["0", "1"], ["2", "4"])


def test_values_classes_and_labels_of_the_validation_split_are_its_own(load_three):
    data = load_three(task="regression")
    assert next(data.validation.epoch())["labels"].tolist() == [100.0 + i for i in range(12)]
    assert data.value_range == (0.0, 11.0)
    data = load_three(sample_classes=2)
    assert {*next(data.validation.epoch())["labels"].tolist()} == {0, 1}
    labels = next(load_three(label_noise=1.0).validation.epoch())["labels"]
    assert labels.tolist() == [i % 3 for i in range(12)]


def test_training_classes_in_the_validation_split_cause_a_warning(load_three, caplog):
    load_three(classes=((0, 1), (1, 2), (3, 4)), task="retrieval")
    assert "1 of the 2 classes of the validation split are trained on" in caplog.text


def test_a_class_missing_from_the_training_split_is_an_error(embed, make_dataset, load_named):
    from datasets import Value

    def named(names):
        images = [np.zeros((3, 3), np.uint8)] * len(names)
        return make_dataset(images, names, feature=Value("string"))

    name = embed(train=named(["a", "b"]), val=named(["a", "c"]), test=named(["a", "b"]))
    with pytest.raises(ValueError, match="label c of image 1 in split 'val' is missing or none of the classes"):
        load_named(name, validation_split="val")
