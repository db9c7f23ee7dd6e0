import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st
from made_up_images import make_dataset
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hf_sphere.data import (
    Augmentation,
    Episodes,
    EpisodeSampler,
    FewShotBatches,
    ImageData,
    ImagesInMemory,
    few_shot_data,
)

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
def test_only_training_uses_episodes(task, load):
    images = list(torch.zeros(40, 4, 4, dtype=torch.uint8).numpy())
    dataset = make_dataset(images, [index % 8 for index in range(40)]).add_column("value", list(range(40)))
    data = load(dataset, task=task, episodes=Episodes(3, 2, 5))
    assert [len(batch["labels"].unique()) for batch in data.train.epoch()] == [3] * 5
    assert len(next(data.evaluation.epoch())["labels"]) == 40


LABELS = torch.arange(8).repeat(12)
"""Eight classes of twelve images."""


def make(way: int = 3, shot: int = 2, query: int = 4, count: int = 7, per_batch: int = 2, **options) -> FewShotBatches:
    """Few-shot batches of images that are identified by their pixels: image i has the pixel value i."""
    images = torch.arange(96, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    episodes = Episodes(way, shot + query, count, per_batch, distinct=True)
    given_options = {"mean": [0.0], "std": [1 / 255], "shuffle": True, "episodes": episodes} | options
    return FewShotBatches(ImagesInMemory(images, LABELS, **given_options), shot)


def indices(pixels: torch.Tensor) -> torch.Tensor:
    """Indices of images, from their pixels."""
    return pixels[..., 0, 0, 0].round().long()


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_labels_are_the_positions_of_the_classes_in_the_support(way, shot, query, per_batch, epoch):
    for batch in make(way, shot, query, per_batch=per_batch).epoch(epoch):
        support, asked = LABELS[indices(batch["support_pixel_values"])], LABELS[indices(batch["pixel_values"])]
        classes = support[:, :, 0]
        assert torch.equal(support, classes[:, :, None].expand_as(support))
        assert torch.equal(asked, classes.gather(1, batch["labels"]))
        assert all(len(row.unique()) == way for row in classes)


def test_an_epoch_has_all_episodes_in_batches_of_the_requested_size():
    batches = make()
    first, *_, last = whole = list(batches.epoch())
    assert first["pixel_values"].shape == (2, 12, 1, 1, 1)
    assert first["support_pixel_values"].shape == (2, 3, 2, 1, 1, 1)
    assert (first["labels"].shape, first["labels"].dtype) == ((2, 12), torch.int64)
    assert {len(values) for values in last.values()} == {1}
    assert (batches.num_examples, batches.examples_per_epoch, len(batches), len(whole)) == (96, 7 * 18, 4, 4)


class TestSingleImages:
    def test_images_are_read_by_index_without_augmentation_which_a_resumed_epoch_has(self):
        batches = make(augmentation=Augmentation(crop_padding=1))
        wanted = torch.tensor([5, 1, 90, 7])
        some = list(batches.images.take(wanted, 3))
        assert [len(pixels) for pixels in some] == [3, 1]
        assert torch.equal(indices(torch.cat(some)), wanted)
        assert list(batches.images.take(wanted[:0], 3)) == []
        for one, other in zip(batches.epoch(3, start=2), list(batches.epoch(3))[2:], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)

    @pytest.mark.parametrize("process", [0, 1])
    def test_the_indices_cover_all_processes(self, process):
        shared = make(process_index=process, num_processes=2)
        assert shared.images.episode_indices().shape == (7, 3, 6)
        support, query = shared.divide(shared.images.episode_indices())
        alone = next(make(per_batch=7).epoch())
        assert torch.equal(support, indices(alone["support_pixel_values"]))
        assert torch.equal(query, indices(alone["pixel_values"]))


class TestLoading:
    EPISODES = Episodes(2, 3, 5, distinct=True)

    @pytest.fixture
    def dataset(self):
        """Ten classes of six images, each with a different pixel value."""
        images = torch.arange(60, dtype=torch.uint8).reshape(60, 1, 1).expand(60, 2, 2).numpy()
        return make_dataset(list(images), [index % 10 for index in range(60)])

    def load(self, load, dataset, *, count: int = 6, **options) -> ImageData:
        defaults = dict.fromkeys(("episodes", "validation_episodes", "eval_episodes"), self.EPISODES)
        defaults |= {"image_mean": [0.0], "image_std": [1.0], "train_classes": count, "validation_fraction": 0.5}
        return few_shot_data(load(dataset, task="few_shot", **defaults | options), shot=1)

    def test_training_validation_and_evaluation_have_disjoint_classes(self, load, dataset):
        data = self.load(load, dataset)
        seen = []
        for part in (data.train, data.validation, data.evaluation):
            pixels = torch.cat([batch["pixel_values"] for batch in part.epoch()])
            seen.append(set(((pixels[..., 0, 0, 0] * 255).round().long() % 10).flatten().tolist()))
        train, validation, evaluation = seen
        assert not train & validation
        assert train | validation == set(range(6))
        assert evaluation == {6, 7, 8, 9}
        # The seeds differ, too.
        drawn = [part.images.episode_indices().tolist() for part in (data.train, data.validation, data.evaluation)]
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
        assert self.load(load, dataset, validation_fraction=0.0).validation is None

    def test_episodes_that_cannot_be_drawn_are_an_error(self, load, dataset):
        for name in ("", "validation_", "eval_"):
            with pytest.raises(ValueError, match=r"an episode takes 13 different images of a class, but class \d has"):
                self.load(load, dataset, **{f"{name}episodes": Episodes(2, 13, 5, distinct=True)})
        with pytest.raises(ValueError, match="an episode of 4 different classes cannot be drawn from 3"):
            self.load(load, dataset, validation_episodes=Episodes(4, 3, 5, distinct=True))
        labels = [0] * 6 + [1] * 6 + [2] * 6 + [3] * 4 + [4] * 3 + [5] * 1 + [6] * 2
        dataset = make_dataset([torch.zeros(2, 2, dtype=torch.uint8).numpy()] * 28, labels)
        message = r"an episode takes 9 different images of a class, but class 2 has 2; use at most 2"
        with pytest.raises(ValueError, match=message):
            self.load(load, dataset, count=3, validation_fraction=0.0, eval_episodes=Episodes(2, 9, 3, distinct=True))


def test_bad_input_of_few_shot_batches_is_refused():
    for episodes in (None, Episodes(3, 6, 7)):
        with pytest.raises(ValueError, match=r"few-shot batches need .*distinct=True"):
            make(episodes=episodes, **({"batch_size": 4} if episodes is None else {}))
    for shot in (0, 6, 9):
        with pytest.raises(ValueError, match=f"shot must be an integer from 1 to 5; got {shot}"):
            FewShotBatches(make().images, shot)
