"""Small models and image folders."""

from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image

from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.search import ImageSource


@pytest.fixture(autouse=True)
def _home_stays_clean(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_datasets"))


@pytest.fixture(scope="session")
def save_model():
    """Save a small untrained classifier of 8x8 images, with two classes."""

    def save(folder: Path, head: str = "cosine", seed: int = 0) -> str:
        torch.manual_seed(seed)
        config = SphereVisionConfig(
            backbone="linear_embedding",
            backbone_kwargs={"width": 16},
            num_channels=1,
            image_size=8,
            embedding_dim=6,
            head=head,
            id2label={0: "even", 1: "odd"},
        )
        model = SphereVisionForImageClassification(config).eval()
        model.head.initialize_from_data(torch.randn(20, model.base_model.embedding_dim))
        model.save_pretrained(folder)
        SphereVisionImageProcessor(
            num_channels=1, size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5]
        ).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def model(save_model, tmp_path_factory) -> str:
    """A saved classifier with a concentration."""
    return save_model(tmp_path_factory.mktemp("model"), "vmf")


@pytest.fixture(scope="session")
def digits() -> list[Image.Image]:
    """Twelve digits."""
    source = ImageSource.of("digits")
    return [source.open(index, channels=1) for index in range(12)]


@pytest.fixture
def photos(tmp_path, digits) -> Path:
    """A folder of images: two classes with three images each, and one outside the class folders."""
    folder = tmp_path / "photos"
    for index in range(7):
        file = folder / ["even", "odd", ""][index // 3] / f"test_{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        digits[index].save(file)
    (folder / "notes.txt").write_text("no image")
    return folder
