import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image
from PIL.Image import fromarray

from hf_sphere.data import sources
from hf_sphere.data.images import load_thumbnails
from hf_sphere.data.sources import load_splits


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture
def load(tmp_path):
    return lambda *words, **options: load_thumbnails(*words, cache_dir=tmp_path, progress=False, **options)


def offer(monkeypatch, *images) -> str:
    cells = [{"bytes": i, "path": None} if isinstance(i, bytes) else fromarray(i) for i in images]
    rows = Dataset.from_dict({"image": cells}, features=Features({"image": Image()}))
    monkeypatch.setitem(sources.BUNDLED, "made_up", lambda: DatasetDict(test=rows))
    return "made_up"


def test_small_images_are_unchanged_in_the_order_of_the_rows_which_are_numbered_across_splits(load):
    splits = load_splits("digits")
    images, count = splits["test"]["image"], len(splits["train"])
    thumbnails = load("digits", ["train", "test"], count + torch.tensor([7, 0, 7]))
    expected = np.stack([np.asarray(images[row]) for row in (7, 0, 7)])
    assert thumbnails.dtype == torch.uint8
    assert np.array_equal(thumbnails[:, 0].numpy(), expected)


def test_large_images_shrink_with_their_aspect_ratio_and_one_that_cannot_be_decoded_is_black(load, monkeypatch):
    large = np.zeros((100, 50, 3), dtype=np.uint8)
    assert load(offer(monkeypatch, large), ["test"], torch.tensor([0]), side=20).shape == (1, 3, 20, 10)
    name = offer(monkeypatch, np.full((8, 8), 200, dtype=np.uint8), b"no picture", np.full((8, 8), 90, dtype=np.uint8))
    thumbnails = load(name, ["test"], torch.tensor([2, 1, 0]))
    assert thumbnails[:, 0, 0, 0].tolist() == [90, 0, 200]
