"""A backbone is a decorated function; for an encoder see `docs/extending.md`, whose example is run by the tests."""

import importlib
import sys

import pytest
import timm
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import BACKBONES

TOY_BACKBONE = '''
from torch import nn

from hf_sphere.models.backbones import EmbeddingNet, register_backbone


@register_backbone
def toy_backbone(*, in_chans=3, width=6, **net):
    """A convolution and an average."""
    layers = nn.Sequential(nn.Conv2d(in_chans, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return EmbeddingNet(layers, width, **net)
'''


@pytest.fixture(scope="module")
def toy_backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbones")
    (folder / "toy_backbones.py").write_text(TOY_BACKBONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.import_module("toy_backbones")
        yield
    del sys.modules["toy_backbones"], BACKBONES["toy_backbone"]


def test_decorated_function_is_a_timm_backbone_and_in_the_shared_tests(toy_backbone):
    assert timm.create_model("toy_backbone", num_classes=7, width=5)(torch.rand(2, 3, 8, 8)).shape == (2, 7)
    assert BACKBONES["toy_backbone"] is timm.model_entrypoint("toy_backbone")


def test_model_with_a_new_backbone_is_saved_and_loaded(toy_backbone, tmp_path):
    config = SphereVisionConfig(backbone="toy_backbone", backbone_kwargs={"width": 9}, num_channels=1, num_labels=4)
    model = SphereVisionForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    images = torch.rand(2, 1, 32, 32)
    assert loaded.base_model.embedding_dim == 9
    assert torch.equal(loaded(images).logits, model(images).logits)
