"""Building few-shot models from arguments and data: new models and saved encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_sphere.data import ImageData, ImageDataOptions, ImageShape, ImagesInMemory
from hf_sphere.models import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionModel,
)
from hf_sphere.training import RecipeArguments
from hf_sphere.training.tasks.few_shot import FewShotArguments, build_few_shot
from hf_sphere.training.tasks.image import EncoderArguments, Setup
from hf_sphere.utils.arguments import Options

TINY: dict[str, Any] = {"backbone": "linear_embedding", "backbone_kwargs": Options([("width", 8)])}


def make_data(side: int = 6) -> ImageData:
    """Three gray images."""
    images = torch.zeros(3, 1, side, side, dtype=torch.uint8)
    batches = ImagesInMemory(images, torch.arange(3), batch_size=3, mean=[0.5], std=[0.3])
    return ImageData(
        train=batches, evaluation=batches, eval_split="test", validation=None, class_names=["cat", "dog", "owl"],
        shape=ImageShape(1, side, side), mean=[0.5], std=[0.3],
    )  # fmt: skip


def build(
    *, side: int = 6, few_shot: dict[str, Any] | None = None, **encoder: Any
) -> SphereVisionForFewShotClassification:
    arguments = EncoderArguments(**encoder), ImageDataOptions(), RecipeArguments(output_dir="unused")
    return build_few_shot(Setup(*arguments, make_data(side), "few_shot"), FewShotArguments(**few_shot or {}))


def saved(tmp_path: Path, **options: Any) -> str:
    """Save an encoder and return its path."""
    config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=[28, 28], head=None, **options)
    SphereVisionModel(config).save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


@torch.no_grad()
def test_saved_encoder_can_be_spherized_and_keeps_its_weights(tmp_path):
    folder = saved(tmp_path)
    assert build(side=28, model_name_or_path=folder).config.spherization is None
    model = build(side=28, model_name_or_path=folder, few_shot={"spherization": Options([("radius", 3.0)])}).eval()
    assert isinstance(model, SphereVisionForFewShotClassification)
    assert model.config.spherization == {"radius": 3.0}
    encoder = SphereVisionModel.from_pretrained(folder).state_dict()
    assert encoder
    assert all(torch.equal(model.base_model.state_dict()[name], value) for name, value in encoder.items())


@pytest.mark.parametrize(
    ("before", "now", "options", "new"),
    [
        ("conv4_maxpool", "conv4", {}, {"layers.16", "layers.17"}),
        ("wrn28", "wrn28", {"final_norm": True}, {"layers.15"}),
    ],
)
def test_initial_weights_are_copied_where_names_and_shapes_match(before, now, options, new, tmp_path):
    config = SphereVisionConfig(backbone=before, num_channels=1, image_size=[16, 16], head="softmax", num_labels=3)
    trained = SphereVisionForImageClassification(config)
    for tensor in trained.state_dict().values():
        tensor.fill_(3)
    trained.save_pretrained(tmp_path)
    few_shot = {"spherization": {"scaling": 5.0}}
    model = build(side=16, backbone=now, backbone_kwargs=options, initial_weights=str(tmp_path), few_shot=few_shot)
    own = model.base_model.backbone.state_dict()
    copied = {name for name, tensor in own.items() if (tensor == 3).all()}
    assert {name.rpartition(".")[0] for name in own.keys() - copied} == new
    assert copied == trained.sphere_vision.backbone.state_dict().keys()
    assert model.base_model.spherization.scaling == 5
    with pytest.raises(ValueError, match="has no tensor of the backbone simple_fnn"):
        build(side=16, backbone="simple_fnn", initial_weights=str(tmp_path))
