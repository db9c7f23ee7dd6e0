from collections import Counter

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_model
from torch import nn

from hf_sphere.hyperplanes import projection_statistics
from hf_sphere.hyperplanes.layers import blocks_of_stages, numbered_stage, stages_of_model


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("layer1.0.conv1", 1),
        ("model.backbone.layer3.0.conv1", 3),
        ("resnet.encoder.stages.0.layers.1.layer.0.convolution", 1),
        ("stages.3.blocks.0.conv_dw", 4),
        ("stages_2.blocks.0.conv_dw", 3),
        ("stage4.0.conv", 4),
        ("features.denseblock2.denselayer1.conv1", 2),
        ("features.transition2.conv", 2),
        ("layers.1.blocks.0.mlp.fc1", 2),
        ("layers.1.downsample.reduction", 2),
        ("blocks.2.0.conv_dw", 3),
        ("conv1", None),
        ("layer1", None),
        ("layers.3", None),
        ("blocks.2.attn.qkv", None),
        ("bert.encoder.layer.0.output.dense", None),
    ],
)
def test_stages_are_read_from_module_paths(name, stage):
    assert numbered_stage(name) == stage


def by_stage(model):
    """Number of layers per stage, including linear ones."""
    with torch.device("meta"):
        stages = stages_of_model(model())
    return dict(Counter(stages.values()))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: torchvision.models.resnet18(), {0: 1, 1: 4, 2: 5, 3: 5, 4: 6}),
        (lambda: timm.create_model("resnet50"), {0: 1, 1: 10, 2: 13, 3: 19, 4: 11}),
        (lambda: timm.create_model("resnet20_cifar"), {0: 1, 1: 6, 2: 7, 3: 8}),
        (lambda: torchvision.models.vgg11(), {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3}),
        (lambda: timm.create_model("vgg11_cifar"), {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3}),
        (lambda: torchvision.models.densenet121(), {0: 1, 1: 13, 2: 25, 3: 49, 4: 33}),
        (lambda: timm.create_model("convnext_tiny"), {0: 1, 1: 9, 2: 10, 3: 28, 4: 11}),
        (
            lambda: torchvision.models.googlenet(init_weights=False, aux_logits=False),
            {0: 1, 1: 2, 2: 12, 3: 30, 4: 12, 5: 1},
        ),
        (lambda: torchvision.models.alexnet(), {0: 1, 1: 1, 2: 3, 3: 3}),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), {0: 1, 1: 8, 2: 9, 3: 25, 4: 10}),
        (lambda: timm.create_model("efficientnet_b0"), {0: 1, 1: 4, 2: 10, 3: 10, 4: 15, 5: 15, 6: 20, 7: 7}),
        (lambda: torchvision.models.convnext_tiny(), {0: 58, 1: 1}),
        (lambda: torchvision.models.swin_t(), {0: 52, 1: 1}),
        (lambda: torchvision.models.efficientnet_b0(), {0: 81, 1: 1}),
        (lambda: torchvision.models.mobilenet_v2(), {0: 53}),
    ],
)
def test_stages_match_the_architecture(model, expected):
    assert by_stage(model) == expected


def test_pooling_inside_a_block_does_not_start_a_stage():
    assert by_stage(lambda: torchvision.models.mobilenet_v3_small()).keys() == {0, 1}  # 1 is the classifier


def test_consecutive_poolings_start_one_stage_and_the_first_layer_is_in_stage_0():
    model = nn.Sequential(
        nn.AvgPool1d(2), nn.Conv1d(1, 1, 3), nn.MaxPool1d(2), nn.AdaptiveMaxPool1d(4), nn.Linear(4, 1)
    )
    assert stages_of_model(model) == {"1": 0, "4": 1}


def test_blocks_are_numbered_within_a_stage():
    assert blocks_of_stages([0, 1, 1, 0, None, 1]) == [0, 0, 1, 1, None, 2]


def test_stages_require_the_model(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3))
    save_model(model, str(tmp_path / "model.safetensors"))
    assert projection_statistics(model).by_stage().keys() == {"0", "1", "net"}
    with pytest.raises(ValueError, match="model instead of the file"):
        projection_statistics(tmp_path).by_stage()
