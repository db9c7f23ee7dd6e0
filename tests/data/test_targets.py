import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, Value
from made_up_images import RAW, SMALL, both_sizes, marked, seen

from hf_sphere.data import COMPUTED_VALUES
from hf_sphere.data.targets import read_values


@pytest.fixture
def make_valued(make_dataset):
    """Make a dataset of marked images, labeled by their index, with a column of values."""

    def make(values, size=SMALL, *, column: str = "year", feature: Value | None = None, classes=None) -> Dataset:
        dataset = make_dataset(marked(len(values), size), range(len(values)) if classes is None else classes)
        return dataset.add_column(column, list(values), feature=feature)

    return make


class TestRegression:
    def test_labels_are_the_values_as_float32_without_classes(self, make_valued, load):
        data = load(make_valued([1000.5, 1932.0, -3.25]).remove_columns("label"), task="regression")
        assert data.evaluation.labels.tolist() == [1000.5, 1932.0, -3.25]
        assert data.evaluation.labels.dtype == torch.float32
        assert set(next(data.train.epoch())) == {"pixel_values", "labels"}
        assert (data.class_names, data.train.num_examples) == ([], 3)
        assert load(make_valued([1.0, 2.0]), task="regression").class_names == []

    @both_sizes
    def test_values_match_their_images(self, size, make_valued, load):
        data = load(
            make_valued([index / 4 for index in range(20)], size),
            **RAW,
            task="regression",
            batch_size=4,
            validation_fraction=0.3,
            max_train_samples=15,
        )
        pairs = seen(data.train) + seen(data.validation) + seen(data.evaluation)
        assert len(pairs) == 35
        assert all(value == mark / 4 for mark, value in pairs)

    @both_sizes
    def test_skipping_corrupt_images_keeps_values_aligned_with_images(self, size, make_dataset, load):
        images = marked(9, size)
        images[3] = b"not an image"
        dataset = make_dataset(images).add_column("value", [index / 4 for index in range(9)])
        data = load(dataset, **RAW, task="regression", skip_unreadable_images=True)
        assert seen(data.evaluation) == [(index, index / 4) for index in range(9) if index != 3]

    def test_holding_out_by_the_seed_does_not_require_two_images_per_class(self, make_valued, load):
        options = RAW | {"task": "regression", "validation_fraction": 0.2}
        data, again, other = (load(make_valued(range(50)), **options, seed=seed) for seed in (0, 0, 1))
        held_out = seen(data.validation)
        assert len(held_out) == 10
        assert sorted(held_out + seen(data.train)) == [(mark, mark) for mark in range(50)]
        assert held_out == seen(again.validation) != seen(other.validation)
        with pytest.raises(ValueError, match="the resulting train set will be empty"):
            load(make_valued([1.0]), make_valued([1.0, 2.0]), task="regression", validation_fraction=0.5)


class TestJoint:
    @both_sizes
    def test_values_match_their_images(self, size, make_valued, load):
        values, classes = [index / 4 for index in range(20)], [index % 2 for index in range(20)]
        data = load(make_valued(values, size, classes=classes), **RAW, task="joint", validation_fraction=0.3)
        for part in (data.train, data.validation, data.evaluation):
            assert all(value == mark / 4 for mark, value in seen(part, "regression_labels"))
            assert all(label == mark % 2 for mark, label in seen(part))
            batch = next(part.epoch())
            assert (batch["labels"].dtype, batch["regression_labels"].dtype) == (torch.int64, torch.float32)


class TestRange:
    def test_classification_has_none_and_ignores_a_value_column(self, make_valued, load):
        data = load(make_valued([math.nan, None]))
        assert data.value_range is None
        assert set(next(data.train.epoch())) == {"pixel_values", "labels"}

    def test_it_is_that_of_the_training_images_without_those_held_out(self, make_valued, load):
        for task in ("regression", "joint"):
            data = load(make_valued([3.0, -1.5, 2.0]), make_valued([-99.0, 99.0]), task=task)
            assert data.value_range == (-1.5, 3.0)
        data = load(make_valued(range(20)), task="regression", validation_fraction=0.8)
        kept = data.train.labels
        assert data.value_range == (kept.min().item(), kept.max().item()) != (0.0, 19.0)


class TestColumn:
    def test_the_column_is_found_by_common_names_or_specified(self, make_valued, load):
        assert load(make_valued([1.0, 2.0], column="age"), task="regression").value_range == (1.0, 2.0)
        dataset = make_valued([1.0, 2.0], column="age").add_column("weight", [5.0, 6.0])
        assert load(dataset, task="regression", value_column_name="weight").value_range == (5.0, 6.0)

    def test_all_numbers_of_the_selected_rows_become_float32(self):
        for kind in ("int8", "uint16", "int64", "float16", "float32", "float64"):
            values = read_values(Dataset.from_dict({"age": np.array([3, 1, 2], dtype=kind)}), "age", "train")
            assert torch.equal(values, torch.tensor([3.0, 1.0, 2.0]))
        rows = Dataset.from_dict({"age": [1.0, 2.0, 3.0]}).select([2, 0])
        assert read_values(rows, "age", "train").tolist() == [3.0, 1.0]
        classes = Dataset.from_dict({"age": [0, 2]}).cast_column("age", ClassLabel(num_classes=3))
        assert read_values(classes, "age", "train").tolist() == [0.0, 2.0]
        chunks = pa.concat_tables([pa.table({"age": [1, 2]}), pa.table({"age": [3]})])
        assert read_values(Dataset(chunks), "age", "train").tolist() == [1.0, 2.0, 3.0]

    def test_bad_input_is_refused(self, make_dataset, load, make_valued):
        with pytest.raises(ValueError, match=r"found no value column.*--value_column_name.*--computed_value \(slant\)"):
            load(make_dataset(marked(2)), task="regression")
        with pytest.raises(ValueError, match=r"no value column 'year'; the data has the columns"):
            load(make_valued([1.0, 2.0]), make_dataset(marked(2), range(2)), task="regression")
        for values in ([1.0, 2.0, None, None], [1, 2, None, None]):
            with pytest.raises(ValueError, match=r"'age' has 2 values that are missing .*row 2 in split 'test'"):
                read_values(Dataset.from_dict({"age": values}), "age", "test")
        for value, shown in ((math.nan, "nan"), (math.inf, "inf"), (1e300, r"1e\+300")):
            with pytest.raises(ValueError, match=f"not finite in single precision: {shown} of row 1 in split 'test'"):
                read_values(Dataset.from_dict({"age": [1.0, value, 2.0]}), "age", "test")
        for values in (["1990", "x"], [[1.0], [2.0]]):
            with pytest.raises((ValueError, NotImplementedError), match=r"parse string: 'x'|cast from list"):
                read_values(Dataset.from_dict({"age": values}), "age", "train")


class TestComputedValue:
    @pytest.mark.parametrize("name", COMPUTED_VALUES)
    def test_it_is_computed_from_the_model_inputs_and_stays_with_its_image_in_every_part(self, name, load):
        data = load_digits(load, task="regression", computed_value=name, image_size=[12])
        assert torch.equal(data.train.labels, COMPUTED_VALUES[name](data.train.images))
        assert torch.equal(data.evaluation.labels, COMPUTED_VALUES[name](data.evaluation.images))
        data = load_digits(load, task="joint", computed_value=name, validation_fraction=0.2)
        for part in (data.train, data.validation):
            assert torch.equal(part.regression_labels, COMPUTED_VALUES[name](part.images))
        assert data.train.labels.dtype == torch.int64

    @pytest.mark.parametrize(
        ("augmentation", "warned_of"),
        [
            ({"horizontal_flip": True, "rotation": 5.0}, "--horizontal_flip and --rotation change"),
            ({"random_resized_crop": 0.5}, "--random_resized_crop change"),
            ({"crop_padding": 2}, ""),
        ],
    )
    def test_augmentation_does_not_change_it_and_causes_a_warning_where_it_should(
        self, augmentation, warned_of, load, caplog
    ):
        options = {"task": "regression", "computed_value": "slant"}
        plain, changed = load_digits(load, **options), load_digits(load, **options, **augmentation)
        assert torch.equal(*(next(data.train.epoch())["labels"] for data in (plain, changed)))
        assert (warned_of in caplog.text, bool(caplog.text)) == (True, bool(warned_of))


REGRESSION = {"task": "regression"}


def load_digits(load, **options):
    """Load a few of the bundled digits."""
    from hf_sphere.data.sources import load_splits

    splits = load_splits("digits")
    return load(splits["train"].select(range(60)), splits["test"].select(range(20)), **options)
