import logging

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Value
from hypothesis import given, strategies as st
from made_up_images import ANIMALS, RAW, SMALL, both_sizes, make_dataset, noise
from scipy.stats import chisquare

from hf_sphere.data import ImageData, ImagesFromDisk, ImagesInMemory, ImageSourceOptions
from hf_sphere.data.splits import Corruption


def pixels(batches, augment: bool = True) -> dict[int, torch.Tensor]:
    """Map each row of an epoch to its pixels as bytes (C, H, W), for data loaded with the statistics `RAW`."""
    images = torch.cat([batch["pixel_values"] for batch in batches.epoch(augment=augment)])
    return dict(zip(batches.epoch_rows().tolist(), (images * 255).round().byte(), strict=True))


def labels(batches) -> dict[int, int]:
    """Map each row to its label."""
    found = torch.cat([batch["labels"] for batch in batches.epoch()])
    return dict(zip(batches.epoch_rows().tolist(), found.tolist(), strict=True))


def same(first: dict[int, torch.Tensor], second: dict[int, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(image, second[row]) for row, image in first.items())


def places(size: tuple[int, int], channels: int = 1) -> np.ndarray:
    """An image whose pixels encode their position, differently in the first channel and in the others."""
    place = np.arange(size[0] * size[1]).reshape(size) % 251
    layers = np.stack([place, place ^ 85, 255 - place], axis=-1).astype(np.uint8)
    return layers[..., 0] if channels == 1 else layers


@pytest.fixture
def load_split(load_one):
    """Load a split of the dataset registered last with `load_image_split`."""
    return lambda split="test", **options: load_one("made_up", split, **options)


def replace(given: torch.Tensor, share: float, *, seed: int = 0, classes: int = 10, rows=None, num_rows=None):
    rows = torch.arange(len(given)) if rows is None else rows
    return Corruption(ImageSourceOptions(label_noise=share), seed).replace_labels(
        given, rows, num_rows=num_rows or len(given), num_classes=classes
    )


class TestLabels:
    @given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**40))
    def test_exactly_the_fraction_is_resampled(self, count, share, seed):
        # No class is -1, so a resampled label never equals the original one.
        before = torch.full((count,), -1)
        assert int((replace(before, share, seed=seed) >= 0).sum()) == round(share * count)

    def test_new_labels_are_uniform_over_all_classes_including_the_true_one(self):
        drawn = replace(torch.full((20_000,), 3), 1.0)
        assert chisquare(torch.bincount(drawn, minlength=10)).pvalue > 0.001
        assert drawn.max() < 10

    def test_labels_and_rows_are_independent_of_the_true_classes(self):
        before = torch.arange(50_000) % 5
        table = torch.bincount(before * 5 + replace(before, 1.0, classes=5), minlength=25)
        assert chisquare(table).pvalue > 0.001
        replaced = replace(torch.full_like(before, -1), 0.3) >= 0
        assert chisquare(torch.bincount(before[replaced])).pvalue > 0.001

    def test_the_seed_determines_the_replacements_which_a_larger_fraction_extends(self):
        before = torch.full((500,), -1)
        less, more, again, other = (replace(before, *given) for given in ((0.2,), (0.5,), (0.5,), (0.5,)))
        other = replace(before, 0.5, seed=5)
        assert torch.equal(more[less >= 0], less[less >= 0])
        assert torch.equal(more, again)
        assert not torch.equal(more, other)
        assert before.unique().tolist() == [-1]

    @given(st.integers(0, 2**40), st.lists(st.integers(0, 99), min_size=1, unique=True).map(torch.tensor))
    def test_the_new_label_of_a_row_is_independent_of_other_rows_and_their_order(self, seed, rows):
        before = torch.full((100,), -1)
        chosen = replace(before[rows], 1.0, seed=seed, rows=rows, num_rows=100)
        assert torch.equal(chosen, replace(before, 1.0, seed=seed)[rows])
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(replace(before, 0.4, rows=order), replace(before, 0.4)[order])


class TestDatasetLabels:
    COUNT = 120

    def load_animals(self, load, size=SMALL, **options) -> ImageData:
        """Load images of six animals in turn; the test split has different images."""
        classes = [row % 6 for row in range(self.COUNT)]
        feature = ClassLabel(names=ANIMALS)
        train = make_dataset(list(noise(self.COUNT, *size)), classes, feature=feature)
        return load(train, make_dataset(list(noise(30, *size, seed=1)), classes[:30], feature=feature), **options)

    @both_sizes
    def test_only_training_images_get_noisy_labels_by_their_fraction(self, size, load, caplog):
        with caplog.at_level(logging.INFO, logger="hf_sphere"):
            data = self.load_animals(load, size, label_noise=0.5, validation_fraction=0.25, max_train_samples=80)
        trained = labels(data.train)
        wrong = sum(label != row % 6 for row, label in trained.items())
        assert (len(trained), 20 <= wrong <= 30) == (60, True)
        assert f"Redrew 30 of 60 training labels; {wrong} are now wrong." in caplog.text
        for batches in (data.validation, data.evaluation):
            assert all(label == row % 6 for row, label in labels(batches).items())

    def test_the_noise_is_that_of_its_seed_by_default_that_of_training_and_independent_of_other_images(self, load):
        options = {"label_noise": 1.0, "corruption_seed": 7, "validation_fraction": 0.25}
        first, second = (labels(self.load_animals(load, seed=seed, **options).train) for seed in (0, 1))
        shared = first.keys() & second.keys()
        assert 60 <= len(shared) < 90
        assert all(first[row] == second[row] for row in shared)
        sharing = [{"seed": 9, "process_index": i, "num_processes": 3} for i in range(3)]
        options = [{}, {"seed": 9}, {"corruption_seed": 9}, *sharing]
        plain, other, given, *parts = (
            labels(self.load_animals(load, label_noise=1.0, **each).train) for each in options
        )
        assert plain != other == given == {row: label for part in parts for row, label in part.items()}

    def test_retrieval_noise_uses_the_training_classes(self, load):
        data = self.load_animals(load, task="retrieval", train_classes=4, label_noise=1.0)
        assert data.class_names == ANIMALS[:4]
        assert data.train.labels.unique().tolist() == [0, 1, 2, 3]
        # Rows of the test split come after those of the training split, and 120 is a multiple of six.
        assert sum(label != row % 6 for row, label in labels(data.train).items()) > 30
        assert all(label == row % 6 - 4 for row, label in labels(data.evaluation).items())

    def test_regression_labels_are_unchanged(self, load):
        plain = self.load_animals(load, task="joint", computed_value="slant")
        noisy = self.load_animals(load, task="joint", computed_value="slant", label_noise=1.0)
        assert torch.equal(plain.train.regression_labels, noisy.train.regression_labels)
        assert not torch.equal(plain.train.labels, noisy.train.labels)


class TestPixels:
    @pytest.mark.parametrize("kind", ["per_image", "shared"])
    @pytest.mark.parametrize("channels", [1, 3])
    @both_sizes
    def test_shuffling_permutes_pixels_and_keeps_channels_together(self, size, channels, kind, load):
        shape = (*size, 3) if channels == 3 else size
        images = noise(9, *shape)
        data = load(make_dataset(list(images)), **RAW, shuffled_pixels=kind)
        for batches in (data.train, data.evaluation):
            for row, image in pixels(batches).items():
                before = images[row].reshape(-1, channels)
                after = image.flatten(1).T.numpy()
                assert sorted(before.tolist()) == sorted(after.tolist())
                assert before.tolist() != after.tolist()

    @pytest.mark.parametrize(("kind", "count"), [("per_image", 16), ("shared", 1)])
    @both_sizes
    def test_each_image_of_both_splits_has_its_own_permutation_or_all_have_one(self, size, kind, count, load):
        data = load(make_dataset([places(size)] * 8), **RAW, shuffled_pixels=kind, validation_fraction=0.5)
        parts = [pixels(batches) for batches in (data.train, data.validation, data.evaluation)]
        assert len({image.numpy().tobytes() for part in parts for image in part.values()}) == count
        assert not np.array_equal(parts[0].popitem()[1][0].numpy(), places(size))

    @pytest.mark.parametrize("kind", ["per_image", "shared"])
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_streamed_and_in_memory_pixels_agree(self, num_workers, kind, load, monkeypatch):
        dataset = make_dataset(list(noise(9, *SMALL, 3)))
        options = RAW | {"shuffled_pixels": kind, "max_train_samples": 7}
        memory = load(dataset, **options)
        monkeypatch.setattr("hf_sphere.data.splits.LARGEST_SIDE_IN_MEMORY", 1)
        disk = load(dataset, **options, dataloader_num_workers=num_workers)
        assert isinstance(memory.train, ImagesInMemory)
        assert isinstance(disk.train, ImagesFromDisk)
        assert same(pixels(memory.train), pixels(disk.train))
        assert same(pixels(memory.evaluation), pixels(disk.evaluation))

    @pytest.mark.parametrize("kind", ["per_image", "shared"])
    def test_input_images_are_not_modified(self, kind):
        images = torch.from_numpy(noise(9, 2, 3, 4))
        Corruption(ImageSourceOptions(shuffled_pixels=kind), 5).shuffle(images, torch.arange(9).flip(0), "train")
        assert np.array_equal(images, noise(9, 2, 3, 4))

    def test_seed_split_and_row_determine_the_permutation(self):
        def order(seed=0, split="train", row=0):
            corruption = Corruption(ImageSourceOptions(shuffled_pixels="per_image"), seed)
            return corruption.shuffle(torch.arange(24).view(1, 1, 4, 6), torch.tensor([row]), split)

        assert torch.equal(order(), order())
        assert not any(torch.equal(order(), order(**other)) for other in ({"seed": 1}, {"split": "test"}, {"row": 1}))

    def test_positions_are_uniform(self):
        images = torch.arange(8).view(1, 1, 2, 4).repeat(4000, 1, 1, 1)
        corruption = Corruption(ImageSourceOptions(shuffled_pixels="per_image"), 0)
        moved = corruption.shuffle(images, torch.arange(4000), "train").flatten(1)
        for place in moved.unbind(1):
            assert chisquare(torch.bincount(place, minlength=8)).pvalue > 0.0001

    def test_augmentation_is_applied_after_corruption_which_values_and_the_cache_do_not_have(self, load):
        dataset = make_dataset(list(noise(9, *SMALL)))
        options = RAW | {"shuffled_pixels": "per_image"}
        shuffled, mirrored = load(dataset, **options), load(dataset, **options, horizontal_flip=True)
        before, after = pixels(shuffled.train), pixels(mirrored.train)
        assert same(before, pixels(mirrored.train, augment=False))
        assert all(any(torch.equal(each, before[row]) for each in (after[row], after[row].flip(-1))) for row in after)
        plain = pixels(load(dataset, **RAW).train)  # from the cache
        assert all(np.array_equal(image[0].numpy(), noise(9, *SMALL)[row]) for row, image in plain.items())
        assert not same(pixels(load(dataset, **options).train), plain)
        values = {"task": "regression", "computed_value": "slant"}
        assert torch.equal(*(load(dataset, **values, **each).train.labels for each in ({}, options)))


class TestClasses:
    def animals(self, names=ANIMALS * 2, *, size=SMALL, feature=None, seed=0):
        """Make a split of two images of each animal, or of the given animals."""
        values = names if feature is not None else [ANIMALS.index(name) for name in names]
        return make_dataset(
            list(noise(len(names), *size, seed=seed)), values, feature=feature or ClassLabel(names=ANIMALS)
        )

    @pytest.mark.parametrize("feature", [None, Value("string")])
    @both_sizes
    @pytest.mark.parametrize("count", [2, 4, 6])
    def test_sampled_classes_keep_all_images_and_are_numbered_in_order(self, count, size, feature, load):
        data = load(self.animals(size=size, feature=feature), **RAW, sample_classes=count)
        assert len(data.class_names) == count
        assert data.class_names == data.eval_class_names == sorted(data.class_names)
        for batches in (data.train, data.evaluation):
            found = {row: data.class_names[label] for row, label in labels(batches).items()}
            assert found == {row: name for row, name in enumerate(ANIMALS * 2) if name in data.class_names}
            images = pixels(batches)
            assert all(np.array_equal(images[row][0].numpy(), noise(12, *size)[row]) for row in images)

    @given(st.integers(2, 200), st.data(), st.integers(0, 2**40))
    def test_the_requested_number_of_distinct_classes_is_sampled_in_order(self, count, data, seed):
        kept = data.draw(st.integers(2, count))
        drawn = Corruption(ImageSourceOptions(sample_classes=kept), seed).draw_classes(count).tolist()
        assert len(drawn) == kept
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(range(count))

    def test_classes_are_sampled_uniformly_by_the_corruption_seed_alone(self, load):
        options = ImageSourceOptions(sample_classes=3)
        draws = [Corruption(options, seed).draw_classes(10) for seed in range(2000)]
        assert chisquare(torch.bincount(torch.cat(draws))).pvalue > 0.001
        first, second = (load(self.animals(), sample_classes=2, corruption_seed=0, seed=seed) for seed in (0, 1))
        assert first.class_names == second.class_names

    def test_noise_values_and_a_subset_of_images_are_those_of_the_sampled_classes(self, load):
        data = load(self.animals(ANIMALS * 20), sample_classes=3, label_noise=1.0)
        assert data.train.labels.unique().tolist() == [0, 1, 2]
        data = load(self.animals(ANIMALS * 9), sample_classes=3, max_train_samples=20, validation_fraction=0.25)
        assert (data.train.num_examples, data.validation.num_examples) == (15, 5)
        assert data.train.labels.max() == 2
        options = {"task": "joint", "computed_value": "slant"}
        whole, part = load(self.animals(), **options), load(self.animals(), **options, sample_classes=3)
        rows = part.evaluation.epoch_rows()
        assert torch.equal(part.evaluation.regression_labels, whole.evaluation.regression_labels[rows])

    def test_a_split_without_the_sampled_classes_is_an_error_that_names_them(self, load):
        names = load(self.animals(), sample_classes=2).class_names
        other = next(name for name in ANIMALS if name not in names)
        with pytest.raises(ValueError, match=f"'test' has no image of the 2 selected classes .*{names[0]}, {names[1]}"):
            load(self.animals(), self.animals([other]), sample_classes=2)


class TestConsistencyBetweenLoaders:
    @pytest.mark.parametrize("kind", ["per_image", "shared", None])
    @both_sizes
    @pytest.mark.parametrize("feature", [ClassLabel(names=ANIMALS), Value("string")])
    def test_evaluation_images_match_those_of_the_run(self, feature, size, kind, load, load_split):
        def make(names, seed):
            values = names if isinstance(feature, Value) else [ANIMALS.index(name) for name in names]
            return make_dataset(list(noise(len(names), *size, seed=seed)), values, feature=feature)

        # The test split lacks a class, so its labels alone would be numbered differently.
        train, test = make(ANIMALS * 3, 0), make(ANIMALS[1:] * 4, 1)
        for seed in range(2):
            options = {"shuffled_pixels": kind, "sample_classes": 4, "corruption_seed": seed}
            data = load(train, test, **RAW, **options, label_noise=0.5, max_eval_samples=9)
            split = load_split(**options, max_samples=9)
            assert split.class_names == data.eval_class_names
            assert labels(split.batches) == labels(data.evaluation)
            assert same(pixels(split.batches), pixels(data.evaluation))

    def test_training_images_and_unseen_classes_match_those_of_the_run(self, load, load_split):
        train, test = (make_dataset(list(noise(12, *SMALL, seed=seed)), list(range(6)) * 2) for seed in range(2))
        options = {"shuffled_pixels": "per_image"}
        assert same(pixels(load(train, test, **RAW, **options).train), pixels(load_split("train", **options).batches))
        data = load(train, test, **RAW, **options, train_classes=3, task="retrieval")
        assert same(pixels(load_split(**options, train_classes=3).batches), pixels(data.evaluation))

    def test_sampling_classes_requires_the_training_split_and_labels(self, embed, load_split):
        embed(test=make_dataset(list(noise(4, *SMALL)), [0, 1, 2, 3]))
        with pytest.raises(ValueError, match=r"no split 'train'; .*--train_split"):
            load_split(sample_classes=2)
        assert len(load_split(sample_classes=2, train_split="test").class_names) == 2
        bare = make_dataset(list(noise(4, *SMALL))).remove_columns("label")
        embed(train=bare, test=bare)
        with pytest.raises(ValueError, match="found no label column"):
            load_split(sample_classes=2)
        assert load_split(shuffled_pixels="shared").num_images == 4
