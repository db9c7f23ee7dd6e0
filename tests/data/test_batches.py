import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from made_up_images import make_dataset, pixels as noise
from torch import Tensor
from torch.utils.data import DataLoader

from hf_sphere.data import Augmentation, ImageBatches, ImagesFromDisk, ImageShape, ImagesInMemory
from hf_sphere.data.decoding import EncodedImages, decode_all
from hf_sphere.utils.seeds import mix_seed

EVERYTHING = Augmentation(crop_padding=2, horizontal_flip=True, rotation=30.0)


def in_memory(images: Tensor, labels: Tensor | None = None, **options) -> ImagesInMemory:
    """Batches of images labeled by their index, unnormalized by default."""
    labels = torch.arange(len(images)) if labels is None else labels
    return ImagesInMemory(images, labels, **({"batch_size": 4, "mean": [0.0], "std": [1.0]} | options))


def numbered(count: int, **options) -> ImagesInMemory:
    """Batches of `count` images of one pixel, labeled by their index."""
    return in_memory(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), **options)


def order(of: ImageBatches, epoch: int = 0) -> list[int]:
    return [label for batch in of.epoch(epoch) for label in batch["labels"].tolist()]


def assert_same_batches(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert set(one) == set(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


class TestOrder:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_an_epoch_contains_every_image_once(self, shuffle):
        assert sorted(order(numbered(22, shuffle=shuffle))) == list(range(22))
        assert numbered(9, shuffle=shuffle, num_processes=2).num_examples == 9
        assert set(next(numbered(3, shuffle=shuffle).epoch())) == {"pixel_values", "labels"}
        assert numbered(5).epoch_rows().tolist() == [0, 1, 2, 3, 4]

    def test_the_order_is_that_of_the_seed_and_the_epoch(self):
        orders = [order(numbered(22, shuffle=True, seed=seed), epoch) for seed in range(3) for epoch in range(3)]
        assert len(set(map(tuple, orders))) == 9
        again = numbered(22, shuffle=True, seed=2)
        list(again.epoch(0))
        assert order(again, 1) == orders[7]
        assert order(numbered(22)) == list(range(22))

    @given(count=st.integers(1, 40), batch_size=st.integers(1, 9), processes=st.integers(1, 5), shuffle=st.booleans())
    def test_the_length_is_the_number_of_batches_all_full_but_the_last(self, count, batch_size, processes, shuffle):
        options, seen = {"batch_size": batch_size, "shuffle": shuffle, "num_processes": processes}, 0
        for i in range(processes):
            of = numbered(count, process_index=i, rows=3 * torch.arange(count) + 7, **options)
            sizes = [len(batch["labels"]) for batch in of.epoch(4)]
            assert len(of) == len(sizes)
            assert all(size == batch_size for size in sizes[:-1])
            assert all(1 <= size <= batch_size for size in sizes[-1:])
            assert of.epoch_rows(4).tolist() == [3 * index + 7 for index in order(of, 4)]
            seen += sum(sizes)
        assert of.examples_per_epoch == seen

    def test_only_a_final_training_batch_of_one_image_is_dropped(self):
        for count, left, options in ((9, 8, {}), (5, 4, {}), (1, 1, {}), (5, 5, {"batch_size": 1})):
            assert len(order(numbered(count, shuffle=True, **options))) == left
        assert len(order(numbered(9))) == 9


class TestIteration:
    def test_a_loader_of_torch_yields_the_batches_of_the_chosen_epoch_or_combines_them(self):
        batches = numbered(10, shuffle=True)
        loader = DataLoader(batches, batch_size=None)
        assert len(loader) == len(batches) == 3
        batches.set_epoch(3)
        assert_same_batches(list(loader), list(batches))
        assert_same_batches(list(batches), list(batches.epoch(3)))
        batches = numbered(10)
        (whole,) = DataLoader(batches, batch_size=3, collate_fn=batches.collate)
        assert whole["labels"].tolist() == list(range(10))

    def test_workers_of_a_loader_are_an_error(self, monkeypatch):
        monkeypatch.setattr("hf_sphere.data.batches.get_worker_info", lambda: "of a worker")
        with pytest.raises(ValueError, match="image batches are made on their device by the main process"):
            next(iter(numbered(10)))

    def test_other_numbers_of_values_or_rows_are_an_error(self):
        for name in ("regression_labels", "rows"):
            with pytest.raises(ValueError, match=f"10 labels need as many {name}; got 11"):
                numbered(10, **{name: torch.arange(11)})


class TestProcesses:
    @given(count=st.integers(1, 40), batch_size=st.integers(1, 9), processes=st.integers(1, 5), epoch=st.integers(0, 9))
    def test_processes_cover_all_images_in_training_but_single_leftovers(self, count, batch_size, processes, epoch):
        options = {"batch_size": batch_size, "num_processes": processes}
        training = [numbered(count, shuffle=True, process_index=i, **options) for i in range(processes)]
        sizes = {tuple(len(batch["labels"]) for batch in share.epoch(epoch)) for share in training}
        assert len(sizes) == 1
        shares = [order(share, epoch) for share in training]
        share = math.ceil(count / processes)
        lone_leftover = share > batch_size and share % batch_size == 1
        missing = set(range(count)) - set().union(*shares)
        assert len(missing) <= (processes if lone_leftover else 0)
        assert sum(map(len, shares)) == processes * (share - lone_leftover)
        evaluated = [order(numbered(count, process_index=i, **options)) for i in range(processes)]
        assert sorted(itertools.chain(*evaluated)) == list(range(count))

    def test_processes_interleave_the_order_of_a_single_process(self):
        whole = order(numbered(24, shuffle=True), 2)
        for processes in (2, 3):
            sharing = [{"process_index": i, "num_processes": processes} for i in range(processes)]
            shares = [order(numbered(24, shuffle=True, **each), 2) for each in sharing]
            assert shares == [whole[i::processes] for i in range(processes)]


class TestResuming:
    @given(*(st.integers(*ends) for ends in ((1, 30), (1, 7), (1, 3), (0, 30), (0, 2**31), (0, 1000))))
    def test_any_part_of_any_epoch_can_be_resumed(self, count, batch_size, processes, start, seed, epoch):
        options = {"batch_size": batch_size, "seed": seed, "num_processes": processes, "process_index": processes - 1}
        images = noise(count, 3, 3, 4)
        first, again = (in_memory(images, shuffle=True, augmentation=EVERYTHING, **options) for _ in range(2))
        assert_same_batches(list(first.epoch(epoch, start=start)), list(again.epoch(epoch))[start:])

    def test_augmentation_differs_between_seeds_epochs_batches_and_processes(self):
        images = noise(1, 1, 9, 9).expand(64, -1, -1, -1)
        options = {"batch_size": 32, "augmentation": Augmentation(crop_padding=4)}
        found = [list(in_memory(images, **options, seed=seed).epoch(epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
        found += [list(in_memory(images, **options, process_index=1, num_processes=2).epoch())]
        pixels = [batch["pixel_values"].numpy().tobytes() for batches in found for batch in batches]
        assert len(set(pixels)) == 7

    def test_no_two_batches_share_a_seed(self):
        mixed = [mix_seed(*numbers) for numbers in itertools.product(range(8), range(12), range(25), range(4))]
        mixed += [mix_seed(seed, epoch) for seed in range(8) for epoch in range(12)]
        assert len(set(mixed)) == len(mixed)


def test_half_of_the_images_are_flipped_first_by_the_seed_and_all_in_every_other_epoch():
    def flipped(epoch: int, **options) -> Tensor:
        """Whether each image is flipped in an epoch."""
        images = torch.tensor([0, 255], dtype=torch.uint8).expand(40, 1, 1, 2)
        of = in_memory(images, shuffle=True, augmentation=Augmentation(alternating_flip=True), **options)
        seen = torch.full((40,), -1.0)
        for batch in of.epoch(epoch):
            seen[batch["labels"]] = batch["pixel_values"][:, 0, 0, 0]
        return seen

    first, second, third = (flipped(epoch) for epoch in range(3))
    assert torch.equal(first + second, torch.ones(40))
    assert torch.equal(first, third)
    assert 10 <= first.sum() <= 30
    assert not torch.equal(first, flipped(0, seed=1))


def test_labels_and_values_stay_with_augmented_images():
    images = torch.arange(1, 41, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 7, 7)
    values = torch.arange(40) / 4
    for batch in in_memory(images, shuffle=True, augmentation=EVERYTHING, regression_labels=values).epoch():
        # Padding is zero; all other pixels are the label plus one.
        assert torch.equal((batch["pixel_values"].amax((1, 2, 3)) * 255).round().long(), batch["labels"] + 1)
        assert torch.equal(batch["regression_labels"], batch["labels"] / 4)
    (batch,) = in_memory(noise(3, 1, 2, 2), torch.tensor([0.5, -2.0, 3.25])).epoch()
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([0.5, -2.0, 3.25], torch.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_scaled_to_one_and_normalized_per_channel(channels):
    images = noise(4, channels, 5, 6)
    mean, std = [0.1, 0.5, 0.9][:channels], [0.2, 0.3, 0.004][:channels]
    pixels = next(in_memory(images, mean=mean, std=std).epoch())["pixel_values"]
    center, spread = (np.array(values)[:, None, None] for values in (mean, std))
    expected = (images.numpy() / 255 - center) / spread
    np.testing.assert_allclose(pixels, expected, rtol=1e-5, atol=1e-5)
    assert pixels.dtype == torch.float32
    training = in_memory(images.clone(), shuffle=True, augmentation=EVERYTHING)
    list(training.epoch())
    assert torch.equal(training.images, images)  # unchanged


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_what_they_augment_equal_those_in_memory_bit_for_bit(num_workers, tmp_path):
    encoded = EncodedImages(make_dataset(list(noise(23, 6, 5, 3).numpy())), "image", ImageShape(3, 6, 5))
    images, _ = decode_all(encoded, cache_dir=tmp_path / "decoded", progress=False)
    augmentation, labels = Augmentation(crop_padding=2, alternating_flip=True, rotation=30.0), torch.arange(23)
    sharing = ({"process_index": index, "num_processes": 3} for index in range(3))
    for options in ({"shuffle": True, "augmentation": augmentation, "seed": 5}, *sharing):
        options |= {"batch_size": 4, "mean": [0.4], "std": [0.3], "regression_labels": labels / 4}
        streamed = ImagesFromDisk(encoded, labels, num_workers=num_workers, **options)
        kept = ImagesInMemory(images, labels, **options)
        assert len(streamed) == len(kept)
        assert_same_batches(list(streamed.epoch(3)), list(kept.epoch(3)))
