"""Backbones of timm in image models: sizes of images, last activations, suggested names."""

import pytest
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionModel
from hf_sphere.models.backbones import create_backbone, ends_in_activation
from hf_sphere.models.sphere_vision import modeling_sphere_vision as modeling


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
@pytest.mark.parametrize("image_size", [64, [96, 32]], ids=str)
def test_backbones_support_an_image_size_that_is_not_their_own(backbone, image_size):
    config = SphereVisionConfig(backbone=backbone, image_size=image_size, num_labels=5)
    model = SphereVisionForImageClassification(config).eval()
    assert model(torch.randn(1, 3, *config.input_size)).logits.shape == (1, 5)


def test_image_size_of_a_vision_transformer_is_restored_on_loading(tmp_path):
    model = SphereVisionModel(SphereVisionConfig(backbone="vit_tiny_patch16_224", image_size=48)).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 48, 48)
    assert torch.equal(SphereVisionModel.from_pretrained(tmp_path).eval()(x).embeddings, model(x).embeddings)


def test_backbone_option_overrides_the_image_size():
    net = create_backbone("vit_tiny_patch16_224", num_channels=3, image_size=64, img_size=32)
    assert net.patch_embed.img_size == (32, 32)


ENDS = {"vit_tiny_patch16_224": False, "swin_tiny_patch4_window7_224": False, "convnext_atto": False}
ENDS |= {"mixer_s32_224": False, "resnet18": True, "vgg11": True, "densenet121": True, "mobilenetv3_small_050": True}


@pytest.mark.parametrize("backbone", ENDS)
def test_last_activation_is_recognized(backbone):
    with torch.device("meta"):
        net = create_backbone(backbone, num_channels=3, image_size=224)
    assert ends_in_activation(net) == ENDS[backbone]


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_only_a_backbone_that_keeps_a_last_activation_causes_a_warning(backbone, monkeypatch):
    messages = []
    monkeypatch.setattr(modeling.logger, "warning_once", messages.append)
    SphereVisionModel(SphereVisionConfig(backbone=backbone, image_size=32, head="spherized"))
    assert len(messages) == ENDS[backbone]


def test_unknown_backbone_error_suggests_the_backbone_of_the_library_first():
    with pytest.raises(ValueError, match=r"unknown backbone 'resnet20'; similar names: resnet20_cifar, "):
        create_backbone("resnet20", num_channels=3, image_size=32)
