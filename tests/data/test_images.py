from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Image, Value
from made_up_images import LARGE, NOT_AN_IMAGE, RAW, SMALL, both_sizes, encode, make_dataset, marked, noise, seen

from hf_sphere.data import CorruptImageError, ImagesFromDisk, ImageShape, ImagesInMemory
from hf_sphere.data.images import load_thumbnails
from hf_sphere.data.sources import load_splits


def marks(batches, epoch: int = 0) -> list[int]:
    return [mark for mark, _ in seen(batches, epoch=epoch)]


class TestLoadedData:
    def test_labels_match_their_images(self, load):
        data = load(make_dataset(marked(10), range(10)), **RAW, batch_size=4)
        pairs = seen(data.train) + seen(data.evaluation)
        assert all(mark == label for mark, label in pairs)
        assert marks(data.evaluation) == sorted(marks(data.train)) == list(range(10)) != marks(data.train)

    def test_columns_are_found_or_named(self, load):
        for image, label in (("img", "fine_label"), ("picture", "label"), ("scan", "finding")):
            dataset = make_dataset(marked(4), range(4), image_column=image, label_column=label)
            named = {"image_column_name": image, "label_column_name": label} if image == "scan" else {}
            assert seen(load(dataset, **RAW, **named).evaluation) == [(i, i) for i in range(4)]

    def test_a_column_that_is_missing_or_without_images_is_an_error(self, embed, load, load_named):
        for feature, label in ((Value("int64"), 0), (Value("string"), "ant")):
            with pytest.raises(ValueError, match="column 'label' does not contain images"):
                load(make_dataset(marked(2), [label] * 2, feature=feature), image_column_name="label")
        both = make_dataset(marked(2), image_column="scan").add_column("photo", [None] * 2, feature=Image())
        with pytest.raises(ValueError, match=r"no image column.*\['scan', 'label', 'photo'\].*--image_column_name"):
            load(both)
        name = embed(train=make_dataset(marked(2)), test=make_dataset(marked(2), label_column="kind"))
        with pytest.raises(ValueError, match=r"no label column 'label'; the data has the columns \['image', 'kind'\]"):
            load_named(name)

    @pytest.mark.parametrize(
        ("shape", "options", "kind"),
        [
            ((4, 96), {}, ImagesInMemory),
            ((4, 97), {}, ImagesFromDisk),
            ((4, 97), {"keep_in_memory": "yes"}, ImagesInMemory),
            ((4, 4), {"keep_in_memory": "no"}, ImagesFromDisk),
            (LARGE, {"image_size": [8]}, ImagesInMemory),  # small when resized
        ],
    )
    def test_size_and_option_decide_what_is_kept_in_memory(self, shape, options, kind, load, tmp_path):
        data = load(make_dataset(marked(2, shape)), **options)
        assert isinstance(data.train, kind)
        assert isinstance(data.evaluation, kind)
        assert (tmp_path / "decoded").exists() == (kind is ImagesInMemory)

    @pytest.mark.parametrize(("free", "kind"), [(2 * 4 * 6 * 3, ImagesInMemory), (2 * 4 * 6 * 3 - 1, ImagesFromDisk)])
    def test_images_that_exceed_half_of_the_free_memory_are_read_from_disk(self, free, kind, load, monkeypatch, caplog):
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
        assert isinstance(load(make_dataset(marked(3, (4, 6)))).train, kind)
        assert ("3 decoded images need" in caplog.text) == (kind is ImagesFromDisk)

    def test_only_training_images_are_augmented_and_batches_have_the_requested_sizes(self, load):
        gradient = np.tile(np.arange(8, dtype=np.uint8), (8, 1))
        options = {"horizontal_flip": True, "batch_size": 8, "eval_batch_size": 15, "validation_fraction": 0.5}
        data = load(make_dataset([gradient] * 40), **RAW, **options)
        parts = (data.train, data.validation, data.evaluation)
        assert [{int(mark) for mark in marks(part)} for part in parts] == [{0, 7}, {0}, {0}]
        sizes = [[len(batch["labels"]) for batch in part.epoch()] for part in parts]
        assert sizes == [[8, 8, 4], [15, 5], [15, 15, 10]]


class TestSplits:
    @pytest.mark.parametrize(
        ("splits", "expected"),
        [
            (["train", "validation", "test"], "test"),
            (["test", "validation"], "validation"),  # trained on the first
            *[(["train", split], split) for split in ("validation", "valid", "val", "dev")],
        ],
    )
    def test_the_evaluation_split_is_test_else_validation(self, splits, expected, embed, load_named):
        name = embed(**{split: make_dataset(marked(2)) for split in splits})
        assert load_named(name, train_split=splits[0]).eval_split == expected
        with pytest.raises(ValueError, match=rf"eval_fraction 0\.5 has no effect with the evaluation split {expected}"):
            load_named(name, train_split=splits[0], eval_fraction=0.5)

    def test_splits_can_be_specified_and_one_to_load_is_the_evaluation_split(self, save, load, load_one):
        data = load(make_dataset(marked(2)), make_dataset(marked(5)), train_split="test", eval_split="train")
        assert (data.train.num_examples, data.evaluation.num_examples) == (5, 2)
        name = save(**{s: make_dataset(marked(n)) for s, n in (("train", 2), ("validation", 3), ("test", 4))})
        assert (load_one(name, None).name, load_one(name, None, eval_split="validation").name) == ("test", "validation")

    def test_an_unknown_or_empty_split_is_an_error_that_names_it(self, embed, load, load_named):
        full = make_dataset(marked(2))
        for split, option in (("train", "train_split"), ("test", "eval_split")):
            with pytest.raises(ValueError, match=f"no split 'dev'; the data has train, test.*--{option}"):
                load(full, **{option: "dev"})
            name = embed(**({"train": full, "test": full} | {split: full.select([])}))
            with pytest.raises(ValueError, match=f"no split '{split}'.*--{option}: it is empty"):
                load_named(name)


class TestLabels:
    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            ([0, -1], [0, 1], "label -1 of image 1 in split 'train' is missing or none of the classes"),
            ([0, 1], [1, -1, -1], "label -1 of image 1 in split 'test' is missing or none of the classes"),
            ([0, 1], [0, 1, 2], "label 2 of image 2 in split 'test' is missing or none of the classes"),
            ([0, 1], [1, 0, None], "image 2 in split 'test'"),
        ],
    )
    def test_an_invalid_label_is_an_error_that_names_image_and_split(self, train, test, message, load):
        data = [make_dataset(marked(len(v)), v, feature=ClassLabel(num_classes=3)) for v in (train, test)]
        for rows in data:  # `datasets` does not create columns with other labels, so a class is removed afterwards
            rows.info.features["label"] = ClassLabel(names=["ant", "bee"])
        with pytest.raises(ValueError, match=message):
            load(*data, max_train_samples=18)

    @pytest.mark.parametrize(
        ("feature", "values", "names", "labels"),
        [
            (Value("string"), ["dog", "cat", "dog", "ant"], ["ant", "cat", "dog"], [2, 1, 2, 0]),
            (Value("int64"), [10, 9, 200, 9], ["9", "10", "200"], [1, 0, 2, 0]),
            (Value("int8"), [1, 0, -1, 1], ["-1", "0", "1"], [2, 1, 0, 2]),
            (Value("bool"), [True, False, True, True], ["False", "True"], [1, 0, 1, 1]),
        ],
    )
    def test_other_labels_become_classes_in_sorted_order(self, feature, values, names, labels, load):
        data = load(make_dataset(marked(4), values, feature=feature))
        assert data.class_names == names
        assert data.evaluation.labels.tolist() == labels

    def test_classes_are_those_of_the_training_split_by_name(self, load):
        train = make_dataset(marked(3), [0, 1, 2], feature=ClassLabel(names=["ant", "bee", "cow"]))
        test = make_dataset(marked(3), [0, 1, 1], feature=ClassLabel(names=["cow", "bee", "dog"]))
        data = load(train, test)
        assert (data.class_names, data.evaluation.labels.tolist()) == (["ant", "bee", "cow"], [2, 1, 1])
        with pytest.raises(ValueError, match="label dog of image 2 in split 'test' is missing or none of the classes"):
            load(train, make_dataset(marked(3), [0, 1, 2], feature=ClassLabel(names=["cow", "bee", "dog"])))

    def test_a_split_without_known_labels_loads_whole_as_one_without_labels(self, embed, load_one):
        feature = ClassLabel(names=["ant", "bee"])
        for labels in ([-1, -1], [None, None]):
            test = make_dataset(marked(2), labels, feature=feature)
            data = load_one(embed(train=make_dataset(marked(2)), test=test))
            assert (data.class_names, data.batches.labels.tolist()) == ([], [-1, -1])
        assert load_one(embed(train=make_dataset(marked(5), [-1] * 5, feature=feature)), None).num_images == 5

    def test_a_column_without_classes_has_no_labels_and_is_an_error_where_they_are_needed(self, embed, load, load_one):
        for feature, values in (("string", ["a", None]), ("int64", [0, None])):
            with pytest.raises(ValueError, match="label None of image 1 in split 'train' is missing"):
                load(make_dataset(marked(2), values, feature=Value(feature)))
        rows = make_dataset(marked(2), [0.5, 1.5], feature=Value("float64"))
        assert load_one(embed(test=rows)).class_names == []
        with pytest.raises(ValueError, match=r"label column 'label' contains Value\('float64'\)"):
            load_one("made_up", label_column_name="label")
        with pytest.raises(ValueError, match=r"label column 'label' contains Value\('float64'\)"):
            load(rows)


@pytest.mark.parametrize(("given", "size"), [([7], (7, 7)), ([7, 7], (7, 7)), ([3, 9], (3, 9)), (None, SMALL)])
def test_the_size_is_a_side_or_height_and_width_or_that_of_the_images(given, size, load):
    data = load(make_dataset(marked(2)), image_size=given)
    assert data.shape == ImageShape(1, *size)
    assert next(data.train.epoch())["pixel_values"].shape[2:] == size


class TestStatistics:
    @both_sizes
    @pytest.mark.parametrize("channels", [1, 3])
    def test_computed_statistics_equal_the_plain_formula(self, channels, size, load):
        pixels = np.squeeze(noise(20, *size, channels))
        data = load(make_dataset(list(pixels)))
        values = pixels.reshape(-1, channels).astype(np.float64) / 255
        np.testing.assert_allclose(data.mean, values.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(data.std, values.std(axis=0), rtol=1e-12)

    def test_statistics_are_computed_on_training_images_only_also_if_constant(self, load):
        train = make_dataset([np.full(SMALL, 51, np.uint8)] * 4)
        test = make_dataset([np.full(SMALL, 255, np.uint8)] * 4)
        data = load(train, test)
        assert data.mean == pytest.approx([0.2])
        assert data.std[0] > 0
        assert next(data.train.epoch())["pixel_values"].abs().max() < 1e-5
        data = load(make_dataset(marked(20)), validation_fraction=0.5)
        kept = [image[0, 0, 0].item() / 255 for image in data.train.images]
        assert (data.mean, data.std) == (pytest.approx([np.mean(kept)]), pytest.approx([np.std(kept)]))

    @pytest.mark.parametrize(("given", "measured"), [("mean", "std"), ("std", "mean")])
    def test_a_missing_statistic_is_computed_and_a_single_value_applies_to_every_channel(self, given, measured, load):
        dataset = make_dataset(list(noise(5, 6, 4, 3)))
        free, fixed = load(dataset), load(dataset, **{f"image_{given}": [0.125]})
        assert getattr(fixed, given) == [0.125] * 3
        assert getattr(fixed, measured) == getattr(free, measured)


class TestCorruptImages:
    @both_sizes
    @pytest.mark.parametrize("options", [{}, {"max_train_samples": 18}, RAW | {"validation_fraction": 0.5}])
    def test_the_error_for_a_corrupt_image_has_its_index_in_the_split(self, options, size, load):
        train, test = make_dataset([*marked(19, size), NOT_AN_IMAGE]), make_dataset(marked(2, size))
        with pytest.raises(CorruptImageError, match=r"image 19 of the split.*--skip_invalid"):
            load(train, test, **options)

    def test_an_image_that_is_damaged_in_the_middle_is_an_error_when_it_is_read(self, load):
        images = marked(6, LARGE)
        whole = bytearray(encode(images[4]))
        whole[whole.index(b"IDAT") + 12] ^= 255
        images[4] = bytes(whole)
        data = load(make_dataset(marked(6, LARGE)), make_dataset(images))
        with pytest.raises(CorruptImageError, match="image 4 of the split"):
            list(data.evaluation.epoch())

    @both_sizes
    @pytest.mark.parametrize("validation_fraction", [0.0, 0.25])
    def test_skipping_keeps_labels_aligned_with_images(self, validation_fraction, size, load):
        images = marked(24, size)
        for index in (0, 7, 8, 23):
            images[index] = NOT_AN_IMAGE
        options = {"skip_invalid": True, "validation_fraction": validation_fraction} | RAW
        data = load(
            make_dataset(images, [index % 3 for index in range(24)]), batch_size=5, eval_batch_size=7, **options
        )
        pairs = seen(data.train) + (seen(data.validation) if validation_fraction else [])
        assert all(label == mark % 3 for mark, label in pairs + seen(data.evaluation))
        assert sorted(mark for mark, _ in seen(data.evaluation)) == sorted(set(range(24)) - {0, 7, 8, 23})
        assert len(pairs) == 20

    def test_an_entirely_corrupt_batch_stops_neither_streaming_nor_statistics(self, load):
        dataset = make_dataset([*marked(4, LARGE), NOT_AN_IMAGE])
        data = load(dataset, **RAW, skip_invalid=True, eval_batch_size=2)
        assert marks(data.evaluation) == [0, 1, 2, 3]
        assert load(dataset, skip_invalid=True).mean == pytest.approx([1.5 / 255])

    def test_only_corrupt_or_truncated_images_are_an_error_even_when_skipping(self, load):
        with pytest.raises(CorruptImageError, match="no image of column 'image' can be decoded"):
            load(make_dataset([NOT_AN_IMAGE] * 3), skip_invalid=True)
        for size in (SMALL, LARGE):
            truncated = [encode(image)[:45] for image in noise(3, *size)]
            with pytest.raises(CorruptImageError, match="every image of the split is corrupt"):
                load(make_dataset(truncated), skip_invalid=True)


def test_subsets_have_the_requested_sizes_all_classes_and_images_drawn_by_the_seed(load):
    dataset = make_dataset(marked(40), [f"class {i}" for i in range(40)], feature=Value("string"))
    drawn = [load(dataset, **RAW, max_train_samples=10, max_eval_samples=5, seed=seed) for seed in (5, 5, 6)]
    first, again, other = (sorted(marks(data.train)) for data in drawn)
    assert first == again != other
    assert (len(set(first)), drawn[0].evaluation.num_examples, len(drawn[0].class_names)) == (10, 5, 40)
    for count in (40, 500):
        assert load(dataset, max_train_samples=count).train.num_examples == 40


def test_processes_partition_the_images_not_trained_on_and_agree_on_the_statistics(load):
    dataset = make_dataset(marked(11))
    sharing = [{}, *({"process_index": i, "num_processes": 2} for i in range(2))]
    whole, *shares = (load(dataset, validation_fraction=0.5, **each) for each in sharing)
    assert [(share.mean, share.std) for share in shares] == [(whole.mean, whole.std)] * 2
    for part in ("validation", "evaluation"):
        rows = torch.cat([getattr(share, part).epoch_rows() for share in shares])
        assert sorted(rows.tolist()) == getattr(whole, part).epoch_rows().tolist()


def test_small_images_are_unchanged_in_the_order_of_the_rows_which_are_numbered_across_splits(tmp_path):
    splits = load_splits("digits")
    images, count = splits["test"]["image"], len(splits["train"])
    rows = count + torch.tensor([7, 0, 7])
    thumbnails = load_thumbnails("digits", ["train", "test"], rows, cache_dir=tmp_path, progress=False)
    expected = np.stack([np.asarray(images[row]) for row in (7, 0, 7)])
    assert thumbnails.dtype == torch.uint8
    assert np.array_equal(thumbnails[:, 0].numpy(), expected)


def test_large_images_shrink_with_their_aspect_ratio_and_one_that_cannot_be_decoded_is_black(embed, tmp_path):
    options = {"cache_dir": tmp_path, "progress": False}
    name = embed(test=make_dataset([np.zeros((100, 50, 3), dtype=np.uint8)]))
    assert load_thumbnails(name, ["test"], torch.tensor([0]), side=20, **options).shape == (1, 3, 20, 10)
    first, *_, last = marked(200, (8, 8), 20)
    thumbnails = load_thumbnails(
        embed(test=make_dataset([first, NOT_AN_IMAGE, last])), ["test"], torch.tensor([2, 1, 0]), **options
    )
    assert thumbnails[:, 0, 0, 0].tolist() == [219, 0, 20]
