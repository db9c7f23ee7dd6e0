import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, Value
from made_up_images import RAW, SMALL, both_sizes, make_dataset, marked, pixels as noise, seen

from hf_sphere.data import COMPUTED_VALUES, Augmentation, targets
from hf_sphere.data.augmentation import _rotate
from hf_sphere.data.sources import load_splits
from hf_sphere.data.targets import read_class_names, read_values


def make_valued(values, size=SMALL, *, column: str = "year", feature: Value | None = None, classes=None) -> Dataset:
    """Make a dataset of marked images, labeled by their index, with a column of values."""
    dataset = make_dataset(marked(len(values), size), range(len(values)) if classes is None else classes)
    return dataset.add_column(column, list(values), feature=feature)


class TestRegression:
    def test_labels_are_the_values_as_float32_without_classes(self, load):
        data = load(make_valued([1000.5, 1932.0, -3.25]).remove_columns("label"), task="regression")
        assert data.evaluation.labels.tolist() == [1000.5, 1932.0, -3.25]
        assert data.evaluation.labels.dtype == torch.float32
        assert set(next(data.train.epoch())) == {"pixel_values", "labels"}
        assert (data.class_names, data.train.num_examples) == ([], 3)
        assert load(make_valued([1.0, 2.0]), task="regression").class_names == []

    @both_sizes
    def test_values_match_their_images_also_after_a_corrupt_one(self, size, load):
        images = marked(20, size)
        images[3] = b"not an image"
        dataset = make_dataset(images).add_column("value", [index / 4 for index in range(20)])
        options = RAW | {"validation_fraction": 0.3, "max_train_samples": 15, "skip_invalid": True}
        data = load(dataset, **options, task="regression")
        trained = seen(data.train) + seen(data.validation)
        assert len(trained) == 14
        assert all(value == mark / 4 for mark, value in trained)
        assert seen(data.evaluation) == [(index, index / 4) for index in range(20) if index != 3]

    def test_holding_out_by_the_seed_does_not_require_two_images_per_class(self, load):
        options = RAW | {"task": "regression", "validation_fraction": 0.2}
        data, again, other = (load(make_valued(range(50)), **options, seed=seed) for seed in (0, 0, 1))
        held_out = seen(data.validation)
        assert len(held_out) == 10
        assert sorted(held_out + seen(data.train)) == [(mark, mark) for mark in range(50)]
        assert held_out == seen(again.validation) != seen(other.validation)
        with pytest.raises(ValueError, match="the resulting train set will be empty"):
            load(make_valued([1.0]), make_valued([1.0, 2.0]), task="regression", validation_fraction=0.5)


@both_sizes
def test_values_match_their_images(size, load):
    values, classes = [index / 4 for index in range(20)], [index % 2 for index in range(20)]
    data = load(make_valued(values, size, classes=classes), **RAW, task="joint", validation_fraction=0.3)
    for part in (data.train, data.validation, data.evaluation):
        assert all(value == mark / 4 for mark, value in seen(part, "regression_labels"))
        assert all(label == mark % 2 for mark, label in seen(part))
        batch = next(part.epoch())
        assert (batch["labels"].dtype, batch["regression_labels"].dtype) == (torch.int64, torch.float32)


class TestRange:
    def test_classification_has_none_and_ignores_a_value_column(self, load):
        data = load(make_valued([math.nan, None]))
        assert data.value_range is None
        assert set(next(data.train.epoch())) == {"pixel_values", "labels"}

    def test_it_is_that_of_the_training_images_without_those_held_out(self, load):
        for task in ("regression", "joint"):
            data = load(make_valued([3.0, -1.5, 2.0]), make_valued([-99.0, 99.0]), task=task)
            assert data.value_range == (-1.5, 3.0)
        data = load(make_valued(range(20)), task="regression", validation_fraction=0.8)
        kept = data.train.labels
        assert data.value_range == (kept.min().item(), kept.max().item()) != (0.0, 19.0)


class TestColumn:
    def test_the_column_is_found_by_common_names_or_specified(self, load):
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

    def test_values_whose_differences_single_precision_rounds_are_refused(self):
        seconds = [1_600_000_000.0 + hour * 3600 for hour in range(3)]
        what = "value column 'time' has values from 1600000000 to 1600007200 in split 'train', which single precision"
        with pytest.raises(ValueError, match=rf"{what} rounds by 32; subtract their mean."):
            read_values(Dataset.from_dict({"time": seconds}), "time", "train")
        for values in ([20_200_101, 20_250_101], [0.1, 0.1], [1.6e9, 1.7e9]):
            assert read_values(Dataset.from_dict({"time": values}), "time", "train").tolist() == pytest.approx(values)

    def test_bad_input_is_refused(self, load):
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
    splits = load_splits("digits")
    return load(splits["train"].select(range(60)), splits["test"].select(range(20)), **options)


slant = COMPUTED_VALUES["slant"]


def plain_slant(image: np.ndarray) -> float:
    """Slant of an image (H, W) by its definition, with y pointing up."""
    height, width = image.shape
    points = [(x, height - 1 - y, float(image[y, x])) for y in range(height) for x in range(width)]
    total = sum(ink for _, _, ink in points)
    mean_x, mean_y = (sum(p[i] * p[2] for p in points) / total for i in (0, 1))
    moment_xy = sum((x - mean_x) * (y - mean_y) * ink for x, y, ink in points)
    moment_yy = sum((y - mean_y) ** 2 * ink for _, y, ink in points)
    return math.degrees(math.atan(moment_xy / moment_yy))


@pytest.mark.parametrize("shape", [(5, 1, 7, 4), (3, 3, 4, 9), (0, 1, 4, 4), (50, 3, 5, 6)])
def test_slants_are_one_float32_per_image_which_is_not_modified_also_in_chunks(shape):
    images = noise(*shape)
    values = slant(images)
    assert (values.shape, values.dtype) == (shape[:1], torch.float32)
    assert torch.equal(images, noise(*shape))
    repeated = images.repeat(1 + 2100 // max(len(images), 1), 1, 1, 1)
    assert torch.equal(slant(repeated), values.repeat(len(repeated) // max(len(images), 1)))


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (2, 2)])
def test_slant_equals_the_plain_formula(shape):
    images = noise(10, 1, *shape)
    expected = [plain_slant(image[0].numpy()) for image in images]
    np.testing.assert_allclose(slant(images), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slant(images.expand(-1, 3, -1, -1)), slant(images))


def test_a_stroke_has_the_slant_to_the_right_also_if_it_is_rotated():
    for rows, degrees in (
        (["...#", "..#.", ".#..", "#..."], 45.0),
        (["#...", ".#..", "..#.", "...#"], -45.0),
        (["..#", "..#", ".#.", ".#.", "#..", "#.."], math.degrees(math.atan(16 / 35))),  # nearly one to two up
        ([".##.", ".##.", ".##."], 0.0),
        (["....", "....", "...."], 0.0),
    ):
        image = torch.tensor([[255 * (sign == "#") for sign in row] for row in rows], dtype=torch.uint8)
        assert slant(image[None, None]).item() == pytest.approx(degrees, abs=1e-6)
    degrees = torch.tensor([-30.0, -10.0, 15.0, 25.0])
    strokes = torch.zeros(4, 1, 61, 61, dtype=torch.uint8)
    strokes[..., 5:56, 30] = 255
    turned = _rotate(strokes, degrees.deg2rad())  # clockwise, so the top moves right
    torch.testing.assert_close(slant(turned), degrees, rtol=0, atol=1.0)


def test_slant_is_independent_of_position_and_0_for_a_single_row():
    image = torch.zeros(1, 1, 30, 30, dtype=torch.uint8)
    image[..., 2:10, 3:9] = noise(8, 6)
    moved = image.roll((15, 11), (-2, -1))
    assert slant(moved).item() == pytest.approx(slant(image).item(), rel=1e-5)
    images = torch.zeros(200, 3, 9, 9, dtype=torch.uint8)
    images[:, :, 4] = noise(200, 3, 9)
    assert torch.equal(slant(images), torch.zeros(200))
    assert all(hasattr(Augmentation(), option) for option in targets.CHANGED_BY["slant"])


@pytest.mark.parametrize("is_named", [True, False])
def test_classes_whose_names_differ_in_their_unicode_form_alone_are_reported_once(is_named, caplog):
    names = ["cafe\u0301", "caf\u00e9", "tea"]  # e and an accent, or one character
    rows = Dataset.from_dict({f"named_{is_named}": names})
    rows = rows.cast_column(f"named_{is_named}", ClassLabel(names=names)) if is_named else rows
    assert [read_class_names(rows, f"named_{is_named}") for _ in range(2)] == [names] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"label column 'named_{is_named}': the classes 'cafe\\u0301' and 'caf\\xe9' have the same name in two Unicode "
        "forms; rename one to join them."
    ]
