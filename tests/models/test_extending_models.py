"""A backbone is a decorated function; a text encoder is a row of a table."""

import importlib
import sys

import pytest
import timm
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import BACKBONES
from hf_sphere.models.sphere_text import configuration_sphere_text, encoders, modeling_sphere_text
from hf_sphere.models.sphere_text.encoders import TextEncoder

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


SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 50}


@pytest.fixture
def camembert(monkeypatch):
    row = TextEncoder("camembert", "Camembert", ("lm_head", "LMHead"), "ClassificationHead")
    monkeypatch.setattr(encoders, "TEXT_ENCODERS", [*encoders.TEXT_ENCODERS, row])
    for module in (configuration_sphere_text, modeling_sphere_text):
        monkeypatch.setattr(module, "TEXT_ENCODERS", encoders.TEXT_ENCODERS)


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_table_row_defines_the_models_of_an_encoder(camembert, kind, tmp_path):
    config = configuration_sphere_text.SphereCamembertConfig(**SIZES, spherized_layers=[0], bos_token_id=5)
    model = getattr(modeling_sphere_text, f"SphereCamembert{kind}")(config).eval()
    assert config.model_type == "sphere_camembert"
    assert [hasattr(layer.output, "spherical") for layer in model.base_model.encoder.layer] == [True, False]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids)[0], model(ids)[0])


def test_encoder_without_a_table_row_has_no_classes():
    with pytest.raises(AttributeError, match="has no attribute 'SphereCamembertModel'"):
        _ = modeling_sphere_text.SphereCamembertModel
