import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.data import Augmentation, Episodes, FewShotBatches, FewShotData, ImagesInMemory

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


class TestBatch:
    @given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
    def test_labels_are_the_positions_of_the_classes_in_the_support(self, way, shot, query, per_batch, epoch):
        for batch in make(way, shot, query, per_batch=per_batch).epoch(epoch):
            support, asked = LABELS[indices(batch["support_pixel_values"])], LABELS[indices(batch["pixel_values"])]
            classes = support[:, :, 0]
            assert torch.equal(support, classes[:, :, None].expand_as(support))
            assert torch.equal(asked, classes.gather(1, batch["labels"]))
            assert all(len(row.unique()) == way for row in classes)


class TestEpoch:
    def test_an_epoch_has_all_episodes_in_batches_of_the_requested_size(self):
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
    def dataset(self, make_dataset):
        """Ten classes of six images, each with a different pixel value."""
        images = torch.arange(60, dtype=torch.uint8).reshape(60, 1, 1).expand(60, 2, 2).numpy()
        return make_dataset(list(images), [index % 10 for index in range(60)])

    def load(self, load, dataset, *, count: int = 6, **options) -> FewShotData:
        defaults = dict.fromkeys(("episodes", "validation_episodes", "eval_episodes"), self.EPISODES)
        defaults |= {"image_mean": [0.0], "image_std": [1.0], "train_classes": count, "validation_fraction": 0.5}
        return FewShotData.of(load(dataset, task="few_shot", **defaults | options), shot=1)

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

    def test_episodes_that_cannot_be_drawn_are_an_error(self, load, dataset, make_dataset):
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


def test_bad_input_is_refused():
    for episodes in (None, Episodes(3, 6, 7)):
        with pytest.raises(ValueError, match=r"few-shot batches need .*distinct=True"):
            make(episodes=episodes, **({"batch_size": 4} if episodes is None else {}))
    for shot in (0, 6, 9):
        with pytest.raises(ValueError, match=f"shot must be an integer from 1 to 5; got {shot}"):
            FewShotBatches(make().images, shot)
