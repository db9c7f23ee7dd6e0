from collections.abc import Callable

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Value
from hypothesis import given, strategies as st
from made_up_images import ANIMALS, RAW, SMALL, both_sizes, make_dataset, marked, seen

from hf_sphere.data import ImageData
from hf_sphere.data.splits import Split, first_classes, held_out_classes

LABELS = st.lists(st.integers(0, 15), min_size=1, max_size=60).map(torch.tensor)


def several(labels: torch.Tensor) -> bool:
    return len(labels.unique()) > 1


def named(batches, names: list[str]) -> dict[int, str]:
    """Map the mark of each image of an epoch to its class name."""
    return {mark: names[label] for mark, label in seen(batches)}


def animals(*splits: list[str], size=SMALL, feature=None):
    """Make splits of marked images of the given animals; marks are numbered across splits."""
    made, start = [], 0
    for names in splits:
        values = names if feature is not None else [ANIMALS.index(name) for name in names]
        made.append(make_dataset(marked(len(names), size, start), values, feature=feature or ClassLabel(names=ANIMALS)))
        start += len(names)
    return made


@given(LABELS.filter(several), st.data())
def test_the_first_classes_and_the_others_partition_classes_and_images(labels, data):
    count = data.draw(st.integers(1, len(labels.unique()) - 1))
    first = first_classes(labels, count)
    assert len(labels[first].unique()) == count
    assert len(labels[~first]) > 0
    assert labels[first].max() < labels[~first].min()
    for count in (-1, 0, len(labels.unique())):
        with pytest.raises(ValueError, match=f"--train_classes {count} does not divide .* at most"):
            first_classes(labels, count)


class TestHeldOutClasses:
    @given(LABELS.filter(several), st.floats(0.001, 0.999), st.integers(0, 2**31))
    def test_held_out_classes_keep_all_their_images(self, labels, fraction, seed):
        held_out = held_out_classes(labels, fraction, seed)
        out, kept = set(labels[held_out].tolist()), set(labels[~held_out].tolist())
        assert out
        assert kept
        assert not out & kept
        total = len(out | kept)
        assert len(out) == min(max(round(fraction * total), 1), total - 1)
        assert torch.equal(held_out, held_out_classes(labels, fraction, seed))

    def test_the_seed_determines_the_held_out_classes_of_at_least_two(self):
        labels = torch.arange(100)
        drawn = [held_out_classes(labels, 0.3, seed).tolist() for seed in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]
        with pytest.raises(ValueError, match=r"validation_fraction=0\.5 holds out whole classes"):
            held_out_classes(torch.tensor([3, 3, 3]), 0.5, 0)


@given(LABELS)
def test_renumbering_has_no_gaps_and_keeps_names_and_their_order(labels):
    names = [f"class {index:02d}" for index in range(16)]
    split = Split("train", len(labels), labels, labels, labels, names)
    split.number_classes()
    numbered, left = split.classes, split.class_names
    assert [left[index] for index in numbered] == [names[index] for index in labels]
    assert numbered.unique().tolist() == list(range(len(left)))
    assert left == sorted(left)


class TestUnmodifiedSplits:
    @pytest.mark.parametrize("feature", [None, Value("string")])
    @both_sizes
    def test_each_split_numbers_its_own_classes_in_the_order_of_the_data(self, size, feature, load):
        train, test = animals(["elk", "cat", "elk"], ["bee", "fox", "bee", "ant"], size=size, feature=feature)
        data = load(train, test, **RAW, task="retrieval")
        assert data.class_names == ["cat", "elk"]
        assert data.eval_class_names == ["ant", "bee", "fox"]
        assert named(data.train, data.class_names) == {0: "elk", 1: "cat", 2: "elk"}
        assert named(data.evaluation, data.eval_class_names) == {3: "bee", 4: "fox", 5: "bee", 6: "ant"}
        assert data.value_range is None
        data = load(*animals([10, 9, 9], [200, 11], feature=Value("int64")), task="retrieval")
        assert (data.class_names, data.eval_class_names) == (["9", "10"], ["11", "200"])  # by their values

    def test_shared_classes_and_one_evaluation_class_cause_a_warning(self, load, caplog):
        load(*animals(["ant", "bee"], ["cat", "cat"]), task="retrieval")
        load(*animals(["ant", "bee", "cat", "dog"]), task="retrieval", train_classes=2)
        assert not caplog.records
        load(*animals(["ant", "bee", "cat"], ["bee", "cat", "cat", "dog"]), task="retrieval")
        (record,) = caplog.records
        assert "2 of the 3 classes of the evaluation split are trained on" in record.message
        assert "not an open set; --train_classes" in record.message
        load(*animals(["ant", "bee"], ["cat", "dog"]), task="retrieval", train_classes=3)
        assert "All evaluation images are of one class" in caplog.text

    def test_subsets_have_the_names_of_their_remaining_classes(self, load):
        train, test = animals(["ant", "bee", "cat"] * 2, ["dog", "elk", "fox"] * 2)
        data = load(train, test, **RAW, task="retrieval", max_train_samples=2, max_eval_samples=1)
        every = dict(enumerate(["ant", "bee", "cat"] * 2 + ["dog", "elk", "fox"] * 2))
        for batches, names in ((data.train, data.class_names), (data.evaluation, data.eval_class_names)):
            found = named(batches, names)
            assert found.items() <= every.items()
            assert set(found.values()) == set(names)
        assert (data.train.num_examples, data.evaluation.num_examples) == (2, 1)


class TestDividedClasses:
    @both_sizes
    def test_the_first_classes_of_both_splits_train_and_the_others_evaluate(self, size, load):
        train, test = animals(["fox", "ant", "cat", "bee"], ["ant", "cat", "dog", "fox"], size=size)
        data = load(train, test, **RAW, task="retrieval", train_classes=2)
        assert named(data.train, data.class_names) == {1: "ant", 3: "bee", 4: "ant"}
        assert named(data.evaluation, data.eval_class_names) == {0: "fox", 2: "cat", 5: "cat", 6: "dog", 7: "fox"}
        assert (data.class_names, data.eval_class_names) == (["ant", "bee"], ["cat", "dog", "fox"])

    def test_splits_are_concatenated_and_a_split_named_twice_is_used_once(self, load):
        for splits, options, name in (
            ([["ant", "bee", "cat", "ant"]], {"eval_split": "train"}, "train"),
            ([["ant", "cat"], ["dog", "ant"]], {}, "train+test"),
        ):
            data = load(*animals(*splits), task="retrieval", train_classes=1, **options)
            assert data.eval_split == name
            assert data.train.epoch_rows().sort().values.tolist() == [0, 3]
            assert data.evaluation.epoch_rows().tolist() == [1, 2]

    @both_sizes
    @pytest.mark.parametrize("train_classes", [None, 5])
    def test_held_out_images_are_all_images_of_separate_classes(self, train_classes, size, load):
        train, test = animals(ANIMALS[:5] * 3, ["fox"] * 2, size=size)
        options = {"train_classes": train_classes, "validation_fraction": 0.4}
        data = load(train, test, **RAW, task="retrieval", **options)
        assert len(data.class_names) == 3
        trained = named(data.train, data.class_names)
        held_out_names = [name for name in ANIMALS[:5] if name not in data.class_names]
        held_out = named(data.validation, held_out_names)
        assert trained | held_out == dict(enumerate(ANIMALS[:5] * 3))
        assert data.train.labels.unique().tolist() == [0, 1, 2]
        assert data.validation.labels.unique().tolist() == [0, 1]
        assert data.eval_class_names == ["fox"]


def test_classification_evaluates_on_the_training_classes_and_regression_has_none(load):
    data = load(*animals(["ant", "bee"], ["bee"]))
    assert data.eval_class_names == data.class_names == ANIMALS
    train, test = (d.add_column("value", [1.0, 2.0]) for d in animals(["ant", "bee"], ["bee", "ant"]))
    assert load(train, test, task="regression").eval_class_names == []


@pytest.fixture
def load_split(load_one, embed):
    """Load a split by its name with `load_image_split`."""
    return lambda dataset, split="test", **options: load_one(embed(test=dataset), split, **options)


class TestOneSplit:
    @both_sizes
    @pytest.mark.parametrize("processes", [1, 2, 3])
    def test_rows_are_those_of_the_split_with_skipped_images(self, processes, size, load_split):
        images = marked(20, size)
        images[3] = images[8] = b"not an image"
        options = {"skip_invalid": True, "max_samples": 15, "batch_size": 4, "num_processes": processes}
        rows = []
        for i in range(processes):
            split = load_split(make_dataset(images), process_index=i, **options)
            rows += split.batches.epoch_rows().tolist()
            assert rows[-len(split.batches.epoch_rows()) :] == list(named(split.batches, ["0"]))
            assert split.batches.epoch_rows().diff().min() > 0  # in order
        assert len(set(rows)) == len(rows) == split.num_images
        assert 13 <= len(rows) <= 15

    def test_pixels_match_evaluation_during_training_also_without_labels(self, load, load_split):
        noise = np.random.default_rng(0).integers(0, 256, (7, 9, 8, 3), dtype=np.uint8)
        options = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2], "image_size": [5, 6]}
        dataset = make_dataset(list(noise))
        split = load_split(dataset.remove_columns("label"), **options)
        theirs = next(load(dataset, **options, rotation=9.0).evaluation.epoch())
        assert torch.equal(next(split.batches.epoch())["pixel_values"], theirs["pixel_values"])
        assert (split.class_names, split.batches.labels.tolist()) == ([], [-1] * 7)


Load = Callable[..., ImageData]


@pytest.fixture
def load_three(load_named, embed) -> Load:
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


@pytest.mark.parametrize("task", ["classification", "regression", "joint", "retrieval", "few_shot"])
def test_every_task_takes_validation_images_from_the_split(load_three, task):
    data = load_three(task=task)
    for part, value in ((data.train, 0), (data.validation, 100), (data.evaluation, 200)):
        pixels = torch.cat([batch["pixel_values"] for batch in part.epoch()])
        assert (len(pixels), (pixels * 255).round().unique().tolist()) == (12, [value])


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
