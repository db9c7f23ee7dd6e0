import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hf_sphere.data import Augmentation, Episodes, EpisodeSampler, ImagesInMemory

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)
"""Images per class."""


def labels_of(counts: list[int]) -> Tensor:
    """Labels with the given number per class, shuffled; classes are numbered 5, 8, 11, ..."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return 3 * labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))] + 5


TEN_OF_TEN = labels_of([10] * 10)


@st.composite
def possible(draw) -> tuple[Tensor, Episodes]:
    """Labels, and episodes that can be sampled from them."""
    counts = draw(COUNTS)
    episodes = Episodes(draw(st.integers(1, len(counts))), draw(st.integers(1, 12)), draw(st.integers(1, 9)))
    return labels_of(counts), episodes


class TestEpisode:
    @given(possible(), st.integers(0, 2**31), st.integers(0, 1000))
    def test_it_has_the_requested_numbers_and_repeats_images_only_of_small_classes(self, asked, seed, epoch):
        labels, episodes = asked
        drawn = EpisodeSampler(labels, episodes, seed=seed).indices(epoch)
        assert drawn.shape == (episodes.count, episodes.classes * episodes.examples)
        for episode in drawn.tolist():
            classes, times = Counter(labels[episode].tolist()), Counter(episode)
            assert list(classes.values()) == [episodes.examples] * episodes.classes
            for label in classes:
                members = (labels == label).nonzero()[:, 0].tolist()
                taken = [times[index] for index in members]
                assert max(taken) - min(taken) <= 1
                assert (max(taken) == 1) == (len(members) >= episodes.examples)

    def test_images_of_a_class_are_contiguous_and_labels_can_be_a_list(self):
        drawn = EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, 20)).indices(0)
        classes = TEN_OF_TEN[drawn].reshape(20, 4, 3)
        assert (classes == classes[:, :, :1]).all()
        assert torch.equal(EpisodeSampler(TEN_OF_TEN.tolist(), Episodes(4, 3, 20)).indices(0), drawn)

    @pytest.mark.parametrize(("episodes", "share"), [(Episodes(3, 2, 2000), 6 / 100), (Episodes(10, 7, 1000), 7 / 10)])
    def test_images_are_sampled_uniformly(self, episodes, share):
        times = torch.bincount(EpisodeSampler(TEN_OF_TEN, episodes).indices(0).flatten(), minlength=100)
        spread = (episodes.count * share * (1 - share)) ** 0.5
        assert (times - episodes.count * share).abs().max() < 5 * spread

    def test_pairs_of_classes_are_sampled_uniformly(self):
        drawn = TEN_OF_TEN[EpisodeSampler(TEN_OF_TEN, Episodes(2, 1, 4500)).indices(0)]
        times = Counter(tuple(sorted(pair)) for pair in drawn.tolist())
        assert len(times) == 45
        assert all(abs(count - 100) < 5 * 100**0.5 for count in times.values())


def test_seed_epoch_and_number_determine_an_episode_without_the_global_random_state():
    before = torch.get_rng_state()
    first, second = (EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, count), seed=7) for count in (5, 20))
    list(first)
    assert torch.equal(first.indices(3), second.indices(3)[:5])
    assert torch.equal(torch.get_rng_state(), before)
    samplers = [EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, 20), seed=seed) for seed in range(4)]
    drawn = [tuple(episode) for each in samplers for epoch in range(4) for episode in each.indices(epoch).tolist()]
    assert len(set(drawn)) == len(drawn) == 320


@given(count=st.integers(1, 20), processes=st.integers(1, 5), epoch=st.integers(0, 9))
def test_processes_together_sample_the_episodes_of_one_and_then_wrap_around(count, processes, epoch):
    episodes, sharing = (
        Episodes(4, 3, count),
        [{"process_index": i, "num_processes": processes} for i in range(processes)],
    )
    alone, *shares = (EpisodeSampler(TEN_OF_TEN, episodes, **each).indices(epoch).tolist() for each in ({}, *sharing))
    assert {len(share) for share in shares} == {-(-count // processes)}
    together = [episode for turn in zip(*shares, strict=True) for episode in turn]
    assert together == [alone[number % count] for number in range(len(together))]


def test_only_the_first_process_warns_once_of_too_small_classes(caplog):
    EpisodeSampler(labels_of([1, 2]), Episodes(2, 2, 3), process_index=1, num_processes=2)
    EpisodeSampler(labels_of([3, 4]), Episodes(2, 3, 3))
    assert not caplog.records
    list(EpisodeSampler(labels_of([6, 3, 6, 1, 4]), Episodes(5, 5, 3)))
    (record,) = caplog.records
    assert "3 of 5 classes have fewer than the 5 images" in record.message


def test_of_distinct_images_too_small_classes_are_an_error_that_names_the_smallest_and_its_origin():
    for counts, smallest in (([6, 3, 6, 2, 4], "class 14 has 2"), ([5, 5, 4], "class 11 has 4")):
        with pytest.raises(ValueError, match=rf"takes 5 different .*{smallest}; use at most {min(counts)}"):
            EpisodeSampler(labels_of(counts), Episodes(2, 5, 3, distinct=True))
    for numbers in ((3, 2), (2, 5)):
        with pytest.raises(ValueError, match=r"\. Set by the user\.$"):
            EpisodeSampler(labels_of([4, 4]), Episodes(*numbers, 3, distinct=True, origin="Set by the user."))
    drawn = EpisodeSampler(labels_of([4, 5]), Episodes(2, 4, 3, distinct=True)).indices(0)  # just large enough
    assert all(len(episode.unique()) == 8 for episode in drawn)


@given(count=st.integers(1, 20), processes=st.integers(1, 4), per_batch=st.integers(1, 6), epoch=st.integers(0, 9))
def test_batches_are_the_episodes_of_a_process_in_order(count, processes, per_batch, epoch):
    sampler = EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, count, per_batch), process_index=0, num_processes=processes)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-sampler.num_episodes // per_batch)
    assert [len(batch) for batch in batches[:-1]] == [12 * per_batch] * (len(batches) - 1)
    assert [index for batch in batches for index in batch] == sampler.indices(epoch).flatten().tolist()


def test_bad_input_is_refused():
    for name, value in itertools.product(("classes", "examples", "count", "per_batch"), (0, -2)):
        with pytest.raises(ValueError, match=f"{name} of episodes must be an integer of at least 1; got {value}"):
            Episodes(**({"classes": 2, "examples": 2, "count": 2} | {name: value}))
    for labels, there_are in ((TEN_OF_TEN, 10), (torch.empty(0), 0), ([], 0)):
        with pytest.raises(ValueError, match=f"11 different classes cannot be drawn from {there_are}"):
            EpisodeSampler(labels, Episodes(11, 2, 3))
    for labels in (torch.rand(8), torch.zeros(4, 2, dtype=torch.int64), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"integer labels of shape \(N,\); got torch"):
            EpisodeSampler(labels, Episodes(1, 1, 1))
    with pytest.raises(ValueError, match="process_index must be an integer from 0 to 1; got 2"):
        EpisodeSampler(TEN_OF_TEN, Episodes(2, 2, 3), process_index=2, num_processes=2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_yields_the_episodes_of_the_current_epoch(num_workers):
    sampler = EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, 6))
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 6
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        seen = torch.stack([indices for (indices,) in loader])
        assert torch.equal(seen, sampler.indices(epoch))


def batches(**options) -> ImagesInMemory:
    """Batches of 100 noisy images in ten classes, in episodes of 4 x 3."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 1, 5, 6), dtype=torch.uint8, generator=generator)
    defaults = {"mean": [0.0], "std": [1.0], "shuffle": True, "episodes": Episodes(4, 3, 7)}
    return ImagesInMemory(images, TEN_OF_TEN, **(defaults | options))


class TestBatches:
    def test_an_epoch_consists_of_its_episodes_and_images_match_their_labels(self):
        of = batches(seed=3)
        expected = EpisodeSampler(TEN_OF_TEN, Episodes(4, 3, 7), seed=3).indices(2)
        assert torch.equal(of.epoch_rows(2).reshape(7, 12), expected)
        assert [batch["labels"].tolist() for batch in of.epoch(2)] == TEN_OF_TEN[expected].tolist()
        of = batches()
        for batch, rows in zip(of.epoch(1), of.epoch_rows(1).split(12), strict=True):
            assert torch.equal(batch["pixel_values"], of.images[rows] * torch.tensor(1 / 255))

    @pytest.mark.parametrize(("per_batch", "sizes"), [(1, [12] * 7), (3, [36, 36, 12])])
    def test_an_epoch_can_start_at_any_batch_of_episodes(self, per_batch, sizes):
        change = Augmentation(crop_padding=2, horizontal_flip=True)
        of = batches(augmentation=change, episodes=Episodes(4, 3, 7, per_batch=per_batch))
        whole = list(of.epoch(2))
        assert ([len(batch["labels"]) for batch in whole], len(of)) == (sizes, len(sizes))
        for start in (0, 2, 7):
            for one, other in zip(of.epoch(2, start=start), whole[start:], strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)

    @pytest.mark.parametrize(("processes", "examples"), [(1, 84), (2, 96), (3, 108)])
    def test_sizes_match_the_episodes(self, processes, examples):
        of = batches(num_processes=processes, batch_size=12)
        assert (of.batch_size, len(of)) == (12, -(-7 // processes))
        assert of.num_examples == 100
        several = batches(episodes=Episodes(4, 3, 7, per_batch=3), num_processes=processes)
        assert (several.batch_size, several.examples_per_epoch, of.examples_per_epoch) == (36, examples, examples)


@pytest.mark.parametrize("task", ["classification", "joint", "retrieval"])
def test_only_training_uses_episodes(task, make_dataset, load):
    images = list(torch.zeros(40, 4, 4, dtype=torch.uint8).numpy())
    dataset = make_dataset(images, [index % 8 for index in range(40)]).add_column("value", list(range(40)))
    data = load(dataset, task=task, episodes=Episodes(3, 2, 5))
    assert [len(batch["labels"].unique()) for batch in data.train.epoch()] == [3] * 5
    assert len(next(data.evaluation.epoch())["labels"]) == 40
