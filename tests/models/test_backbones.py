import pytest
import timm
import torch
from torch import nn

import hf_sphere.models.backbones as backbones_package
from hf_sphere.models.backbones import EmbeddingNet, create_backbone
from hf_sphere.models.backbones.vgg import CONVOLUTIONS_PER_STAGE

# name -> channels, image size, features, parameters without classifier (counted by hand for the small ones)
BACKBONES = {
    "linear_embedding": (1, (1, 2), 1, 2),
    "simple_fnn": (1, 28, 300, 785 * 500 + 501 * 300),
    "lenet5": (1, 28, 84, 26 * 6 + 151 * 16 + 257 * 120 + 121 * 84),
    "lenet5_bn": (1, 28, 120, 26 * 6 + 151 * 16 + 785 * 120 + 2 * (6 + 16 + 120)),
    "cnn9": (3, 32, 256, 3_859_136),
    "conv4": (3, 84, 64, 28 * 64 + 3 * 577 * 64 + 1601 * 64 + 5 * 128),
    "visualization_cnn": (1, 28, 256, 1_893_216),
    "vgg11_cifar": (3, 32, 4096, 28_108_544),
    "vgg16_cifar": (3, 32, 4096, 33_605_696 + 0),
    "vgg19_cifar": (3, 32, 4096, 38_917_952),
    "vgg11_gray": (1, 32, 4096, 28_107_392),
    "resnet20_cifar": (3, 32, 64, 272_474 - 650),
    "resnet32_cifar": (3, 32, 64, 466_256),
    "resnet18_cifar": (3, 32, 512, 11_168_832),
    "resnet34_cifar": (3, 32, 512, 21_276_992),
    "resnet50_cifar": (3, 32, 2048, 23_500_352),
    "densenet121_cifar": (3, 32, 1024, 6_946_176),
}


def build(name: str, **options) -> nn.Module:
    channels, size, _, _ = BACKBONES[name]
    return create_backbone(name, num_channels=channels, image_size=size, **options)


def images(name: str, count: int = 2) -> torch.Tensor:
    channels, size, _, _ = BACKBONES[name]
    return torch.randn(count, channels, *((size, size) if isinstance(size, int) else size))


def test_the_table_above_names_every_backbone_of_the_library():
    ours = {n for n in timm.list_models() if timm.model_entrypoint(n).__module__.startswith(backbones_package.__name__)}
    assert ours == set(BACKBONES)


@pytest.mark.parametrize("name", BACKBONES)
def test_features_have_the_promised_length(name):
    net = build(name).eval()
    assert net(images(name)).shape == (2, BACKBONES[name][2]) == (2, net.num_features)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_number_of_parameters_is_that_of_the_paper(name):
    assert sum(p.numel() for p in build(name).parameters()) == BACKBONES[name][3]


@pytest.mark.parametrize("name", ["lenet5", "vgg11_cifar", "resnet20_cifar"])
def test_timm_builds_the_whole_classifier(name):
    channels = BACKBONES[name][0]
    net = timm.create_model(name, num_classes=7, in_chans=channels).eval()
    assert net(images(name)).shape == (2, 7)


@pytest.mark.parametrize("name", BACKBONES)
def test_pretrained_weights_that_do_not_exist_are_refused(name):
    with pytest.raises(ValueError, match=f"backbone '{name}' has no pretrained weights"):
        build(name, pretrained=True)


@pytest.mark.parametrize("name", [n for n in BACKBONES if "resnet" not in n and n != "linear_embedding"])
def test_the_features_are_not_negative_after_the_final_activation(name):
    assert build(name).eval()(images(name)).min() >= 0


def test_forward_features_stops_before_the_final_activation():
    net = build("lenet5").eval()
    x = images("lenet5")
    assert net.forward_features(x).min() < 0
    torch.testing.assert_close(net(x), net.forward_features(x).relu())


def test_every_layer_of_the_normalised_lenet_has_its_batch_norm():
    kinds = [
        type(m) for m in build("lenet5_bn").modules() if type(m) in (nn.Conv2d, nn.Linear) or "Norm" in str(type(m))
    ]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.BatchNorm1d]


@pytest.mark.parametrize("size", [4, 8, 32, (28, 12)])
def test_the_normalised_lenet_takes_small_images(size):
    net = create_backbone("lenet5_bn", num_channels=1, image_size=size).eval()
    sides = (size, size) if isinstance(size, int) else size
    assert net(torch.randn(2, 1, *sides)).shape == (2, 120)


def test_the_normalised_lenet_refuses_images_that_pool_to_nothing():
    with pytest.raises(ValueError, match="'lenet5_bn' needs images of at least 4 pixels a side; got 3 x 3"):
        create_backbone("lenet5_bn", num_channels=1, image_size=3)


@pytest.mark.parametrize(("depth", "layers"), [(11, 8), (16, 13), (19, 16)])
def test_vgg_has_as_many_layers_as_its_name_says(depth, layers):
    assert sum(CONVOLUTIONS_PER_STAGE[depth]) == layers == depth - 3  # and three linear ones


def test_vgg_takes_the_widths_of_the_paper():
    net = build("vgg11_cifar", widths=[16, 32, 64, 128])
    assert [m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)] == [16, 32, 64, 64, 128, 128, 128, 128]


def test_vgg_without_hidden_layers_ends_with_its_last_map():
    net = build("vgg16_cifar", hidden=0)
    assert (net.num_features, sum(isinstance(m, nn.Linear) for m in net.modules())) == (512, 0)


def test_a_negative_width_of_the_hidden_layers_is_refused():
    with pytest.raises(ValueError, match="hidden, the width of its two hidden layers, or 0 for none; got -1"):
        build("vgg11_cifar", hidden=-1)


def test_vgg_with_three_widths_is_refused():
    with pytest.raises(ValueError, match="takes four stage widths"):
        build("vgg11_cifar", widths=[16, 32, 64])


def test_the_gray_vgg_pools_by_averages():
    kinds = {type(m) for m in build("vgg11_gray").modules()}
    assert nn.AvgPool2d in kinds
    assert nn.MaxPool2d not in kinds


def test_larger_images_are_averaged_by_vgg():
    net = create_backbone("vgg11_cifar", num_channels=3, image_size=64).eval()
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 4096)


@pytest.mark.parametrize("name", ["lenet5", "vgg11_cifar", "conv4"])
def test_images_too_small_for_the_pooling_are_refused(name):
    with pytest.raises(ValueError, match=f"backbone '{name}' needs images of at least"):
        create_backbone(name, num_channels=3, image_size=8)


def test_small_stem_resnets_keep_the_resolution_of_the_first_stage():
    net = build("resnet18_cifar").eval()
    assert net.forward_features(images("resnet18_cifar")).shape == (2, 512, 4, 4)


def test_small_stem_resnets_have_timms_initialisation():
    net = build("resnet20_cifar")
    assert all(block.bn2.weight.abs().max() == 0 for block in net.layer1)  # zero-initialised residual
    fan_out = net.conv1.weight[:, 0].numel()
    assert net.conv1.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_a_backbone_of_timm_is_built_by_name():
    net = create_backbone("resnet18", num_channels=1, image_size=64).eval()
    assert net(torch.randn(2, 1, 64, 64)).shape == (2, 512)


def test_an_unknown_backbone_is_refused_with_similar_names():
    with pytest.raises(ValueError, match=r"unknown backbone 'lenet'; similar names are .*lenet5"):
        create_backbone("lenet", num_channels=1, image_size=28)


def test_an_unknown_option_is_refused_and_named():
    with pytest.raises(ValueError, match=r"backbone 'lenet5' does not take the options.*depth"):
        build("lenet5", depth=3)


def test_embedding_nets_can_change_their_classifier():
    net = timm.create_model("lenet5", num_classes=7)
    assert isinstance(net, EmbeddingNet)
    net.reset_classifier(3)
    assert net.get_classifier().out_features == 3


@pytest.mark.parametrize("name", [n for n in BACKBONES if n != "linear_embedding"])
def test_every_backbone_can_end_without_its_activation(name):
    net = build(name).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm starts residual branches at zero
    net.remove_final_activation()
    assert net(images(name, 4)).min() < 0
