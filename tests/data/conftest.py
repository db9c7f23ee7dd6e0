from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict

from hf_sphere.data import (
    ImageData,
    ImageDataOptions,
    ImageSplit,
    OpenSetOptions,
    ValueOptions,
    decoding,
    load_image_data,
    load_image_split,
    sources,
)


@pytest.fixture(autouse=True)
def _home_stays_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every cache, of `datasets` and of ours, below `tmp_path`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_datasets")
    monkeypatch.setattr(decoding, "HF_HOME", str(tmp_path / "hf_home"))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Save splits as a folder of parquet files and return its path."""

    def save_splits(**splits: Dataset) -> str:
        number = sum(1 for _ in tmp_path.glob("saved*"))
        folder = tmp_path / f"saved{number}"
        folder.mkdir()
        for split, dataset in splits.items():
            dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return str(folder)

    return save_splits


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Register splits as a bundled dataset and return its name; faster than a folder and less restricted."""

    def offer(**splits: Dataset) -> str:
        monkeypatch.setitem(sources.BUNDLED, "made_up", lambda: DatasetDict(splits))
        return "made_up"

    return offer


def _taken(cls: type, given: dict, **defaults) -> dict:
    """Remove the fields of a dataclass from `given` and return them."""
    return defaults | {field.name: given.pop(field.name) for field in fields(cls) if field.name in given}


@pytest.fixture
def load_named(tmp_path: Path) -> Callable[..., ImageData]:
    """Call `load_image_data`, with the fields of the option dataclasses as keyword arguments."""

    def load(name: str, **given) -> ImageData:
        defaults = {"cache_dir": str(tmp_path / "decoded"), "dataloader_num_workers": 0}
        options = ImageDataOptions(name, **_taken(ImageDataOptions, given, **defaults))
        targets = [cls(**taken) for cls in (ValueOptions, OpenSetOptions) if (taken := _taken(cls, given))]
        return load_image_data(options, **({"progress": False, "targets": targets[0] if targets else None} | given))

    return load


@pytest.fixture
def load_one(tmp_path: Path) -> Callable[..., ImageSplit]:
    """Call `load_image_split` in the same way; by default, pixel values are the bytes divided by 255."""

    def load(name: str, split: str | None = "test", **given) -> ImageSplit:
        defaults = {"cache_dir": str(tmp_path / "decoded"), "dataloader_num_workers": 0}
        defaults |= {"image_mean": [0.0], "image_std": [1.0]}
        options = ImageDataOptions(name, **_taken(ImageDataOptions, given, **defaults))
        return load_image_split(options, split, **({"progress": False} | given))

    return load


@pytest.fixture
def load(load_named: Callable[..., ImageData], embed: Callable[..., str]) -> Callable[..., ImageData]:
    """Call `load_image_data` with a training split and a test split, which defaults to the training split."""

    def load_splits(train: Dataset, test: Dataset | None = None, **options) -> ImageData:
        return load_named(embed(train=train, test=train if test is None else test), **options)

    return load_splits
