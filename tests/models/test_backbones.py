import inspect

import pytest
import timm
import torch
import torchvision
from timm.models import _registry
from timm.models.resnet import BasicBlock
from torch import nn

from hf_sphere.models import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionModel,
    backbones,
)
from hf_sphere.models.backbones import EmbeddingNet, create_backbone
from hf_sphere.models.backbones.airbench import PatchWhitening
from hf_sphere.nn import AngularLinear, SphericalLinear
from hf_sphere.training import initialize_from_data

# name -> channels, image size, features, parameters without classifier (counted by hand for small networks)
PUBLISHED = {
    "linear_embedding": (1, (1, 2), 1, 2),
    "simple_fnn": (1, 28, 300, 785 * 500 + 501 * 300),
    "mlp": (1, 28, 4096, 785 * 4096),
    "lenet5": (1, 28, 84, 61_706 - 850),
    "lenet5_bn": (1, 28, 120, 26 * 6 + 151 * 16 + 785 * 120 + 2 * (6 + 16 + 120)),
    "lenet9": (1, 28, 84, 10 * 6 + 55 * 22 + 145 * 80 + 577 * 64 + 577 * 120 + 121 * 84),
    "lenet9_dropout": (3, 32, 84, 28 * 6 + 55 * 22 + 145 * 80 + 577 * 64 + 577 * 120 + 121 * 84),
    "cnn9": (3, 32, 256, 3_859_136),
    "conv4": (3, 84, 64, 28 * 64 + 3 * 577 * 64 + 1601 * 64 + 5 * 128),
    "conv4_maxpool": (3, 84, 64, 113_088),
    "resnet12": (3, 84, 640, 10 * (3 * 64 + 64 * 160 + 160 * 320 + 320 * 640) + 18 * 541_696 + 8 * 1184),
    "wrn28": (3, 80, 640, 28 * 80 + 68 * (160**2 + 320**2 + 640**2) + 2 * (80 + 9 * (160 + 320 + 640))),
    "visualization_cnn": (1, 28, 256, 1_893_216),
    "airbench_cifar": (3, 32, 256, 24 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + (2 * 64 + 4 * 256)),
    "alexnet": (3, 64, 4096, 61_100_840 - 4097 * 1000),
    "alexnet_cifar": (3, 32, 256, 364 * 64 + 1601 * 192 + 1729 * 384 + 3457 * 256 + 2305 * 256),
    "vgg11_cifar": (3, 32, 4096, 28_108_544),
    "vgg13_cifar": (3, 32, 4096, 28_108_544 + 577 * 64 + 2 * 64 + 1153 * 128 + 2 * 128),
    "vgg16_cifar": (3, 32, 4096, 33_605_696 + 0),
    "vgg19_cifar": (3, 32, 4096, 38_917_952),
    "vgg11_gray": (1, 32, 4096, 28_107_392),
    "resnet20_cifar": (3, 32, 64, 272_474 - 650),
    "resnet32_cifar": (3, 32, 64, 466_256),
    "resnet18_cifar": (3, 32, 512, 11_168_832),
    "resnet50_cifar": (3, 32, 2048, 23_500_352),
    "densenet121_cifar": (3, 32, 1024, 6_946_176 - 128),
}


BACKBONES = [name for name, build in backbones.BACKBONES.items() if build.__module__.startswith(backbones.__name__)]


def usual_images(name: str) -> tuple[int, int | tuple[int, int]]:
    """Image channels and size of a backbone: from the table, or the defaults of the backbone."""
    if name in PUBLISHED:
        return PUBLISHED[name][:2]
    parameters = inspect.signature(backbones.BACKBONES[name]).parameters
    defaults = {"in_chans": 3, "img_size": 32}
    return tuple(parameters[key].default if key in parameters else other for key, other in defaults.items())


def build(name: str, **options) -> nn.Module:
    channels, size = usual_images(name)
    return create_backbone(name, num_channels=channels, image_size=size, **options)


def images(name: str, count: int = 2) -> torch.Tensor:
    channels, size = usual_images(name)
    return torch.randn(count, channels, *((size, size) if isinstance(size, int) else size))


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_is_one_of_timm_with_the_published_parameters_and_a_final_activation_to_omit(name):
    assert name in timm.list_models()
    assert timm.model_entrypoint(name) is backbones.BACKBONES[name]
    net, x = build(name).eval(), images(name, 4)
    if name in PUBLISHED:
        assert (net.num_features, sum(p.numel() for p in net.parameters())) == PUBLISHED[name][2:]
    features = net(x)
    assert features.shape == (4, net.num_features)
    assert features.min() >= 0 or "resnet" in name or name in ("linear_embedding", "airbench_cifar")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm zero-initializes residual branches
    net.remove_final_activation()
    assert net(x).min() < 0 or name == "linear_embedding"


def test_conv4_maxpool_pools_the_last_feature_map_to_its_largest_values():
    net = build("conv4_maxpool").eval()
    x = images("conv4_maxpool")
    features = net.layers[:13](x)  # up to the last convolution, 10 x 10
    normalized = net.layers[13](features)
    torch.testing.assert_close(net.forward_features(x), normalized.amax(dim=(2, 3)))


@pytest.mark.parametrize("final_norm", [False, True])
def test_wide_resnet_halves_its_feature_map_in_each_stage_and_averages_the_last(final_norm):
    net = build("wrn28", final_norm=final_norm, final_activation=not final_norm).eval()
    assert isinstance(net.layers[-1 - final_norm].act2, nn.ReLU) == final_norm  # kept before a spherization
    sides = []
    for block in layers_of(net, BasicBlock):
        block.register_forward_hook(lambda module, _, output: sides.append((output.shape[1], output.shape[2])))
    x = images("wrn28", 1)
    features = net.forward_features(x)
    assert sides == [*[(160, 40)] * 4, *[(320, 20)] * 4, *[(640, 10)] * 4]
    assert len(layers_of(net, nn.Conv2d)) == 28
    expected = features if final_norm else features.relu()
    torch.testing.assert_close(net(x), expected.mean(dim=(2, 3)))


@pytest.mark.parametrize("name", ["lenet5", "resnet20_cifar", "resnet12"])
def test_timm_builds_the_full_classifier_after_the_final_activation(name):
    net, x = timm.create_model(name, num_classes=7, in_chans=usual_images(name)[0]).eval(), images(name)
    assert net(x).shape == (2, 7)
    if name != "resnet20_cifar":
        assert isinstance(net, EmbeddingNet)
        net.reset_classifier(3)
        assert net.get_classifier().out_features == 3
        assert net.forward_features(x).min() < 0
        torch.testing.assert_close(net(x), net.fc(net.final_activation(net.forward_features(x))))


def test_linear_embedding_can_end_in_sigmoid_units_with_biases():
    net = build("linear_embedding", width=2, bias=True, sigmoid=True)
    linear, x = net.layers[-1], images("linear_embedding")
    assert linear.bias.shape == (2,)
    torch.testing.assert_close(net(x), 1 / (1 + (-(x.flatten(1) @ linear.weight.T + linear.bias)).exp()))


def test_vgg_has_the_widths_and_the_gray_one_the_pooling_of_its_paper():
    net = build("vgg11_cifar", widths=[16, 32, 64, 128])
    assert [m.out_channels for m in layers_of(net, nn.Conv2d)] == [16, 32, 64, 64, 128, 128, 128, 128]
    kinds = {type(m) for m in build("vgg11_gray").modules()}
    assert nn.AvgPool2d in kinds
    assert nn.MaxPool2d not in kinds


SIZES = {
    "lenet5": [12, 32, 105, (28, 12)],
    "lenet5_bn": [4, 8, 32, (28, 12)],
    "resnet12": [28, 16, 84],
    "alexnet": [63],
}
SIZES |= {"lenet9": [8], "alexnet_cifar": [29, 60], "vgg11_cifar": [64], "resnet18": [64]}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes], ids=str)
def test_networks_support_other_image_sizes_also_the_smallest(name, size):
    sides = (size, size) if isinstance(size, int) else size
    for channels in (1, 3):
        net = create_backbone(name, num_channels=channels, image_size=size).eval()
        assert net(torch.randn(1, channels, *sides)).shape == (1, PUBLISHED.get(name, (0, 0, 512))[2])


def layers_of(net: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, kind)]


HIDDEN_LAYERS = {
    "plain": nn.Linear,
    "spherized": SphericalLinear,
    **dict.fromkeys(["cosine", "linear", "sigmoid", "w_cosine", "w_linear", "w_sigmoid"], AngularLinear),
}


@pytest.mark.parametrize("kind", HIDDEN_LAYERS)
def test_cnn9_hidden_layer_has_the_requested_type(kind):
    net = build("cnn9", hidden_layer=kind).eval()
    layer = net.layers[-1]
    assert type(layer) is HIDDEN_LAYERS[kind]
    assert getattr(layer, "operator", kind) == kind
    assert net(images("cnn9")).shape == (2, 256)
    # Spherized layers have no bias, one input more and a learned scaling.
    expected = {"plain": 4097 * 256, "spherized": 4097 * 256 + 1}.get(kind, 4096 * 256)
    assert sum(p.numel() for p in layer.parameters()) == expected
    if kind == "spherized":
        layer = build("cnn9", hidden_layer="spherized", hidden_kwargs={"scaling": 2.0, "radius": 3.0}).layers[-1]
        assert (layer.spherization.scaling.item(), layer.spherization.radius.item()) == (2.0, 3.0)


def test_fully_connected_net_supports_a_bottleneck():
    net = build("mlp", widths=[12, 5]).eval()
    assert [type(m) for m in net.layers] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(m.weight.shape) for m in layers_of(net, nn.Linear)] == [(12, 784), (5, 12)]
    assert net(images("mlp")).shape == (2, 5) == (2, net.num_features)


def test_alexnet_matches_torchvision():
    theirs, ours = torchvision.models.AlexNet(num_classes=7).eval(), timm.create_model("alexnet", num_classes=7).eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 80, 80)
    torch.testing.assert_close(ours(x), theirs(x))


def test_dropout_of_alexnet_and_the_hidden_layers_of_vgg_can_be_left_out():
    assert {m.p for m in layers_of(build("alexnet", drop_rate=0.0), nn.Dropout)} == {0.0}
    assert [m.p for m in layers_of(build("alexnet").layers, nn.Dropout)] == [0.5, 0.5]
    net = build("vgg16_cifar", hidden=0, conv_bias=False)
    assert (net.num_features, len(layers_of(net, nn.Linear))) == (512, 0)
    assert sum(p.numel() for p in net.parameters()) == 14_728_266 - 10 * 513 - 4224


# Initialization


@pytest.mark.parametrize("name", ["vgg11_cifar", "vgg16_cifar", "vgg19_cifar", "vgg11_gray"])
def test_vgg_with_batch_norm_has_the_initialization_of_the_spherization_paper(name):
    net = build(name, batch_norm=True)
    convolutions, linear_layers = layers_of(net, nn.Conv2d), layers_of(net, nn.Linear)
    assert convolutions[-1].weight.std().item() == pytest.approx(0.0208, abs=0.0001)  # 512 to 512 channels
    for layer in convolutions:  # as torchvision's: normal with variance 2 / fan-out
        assert layer.weight.std().item() == pytest.approx((2 / (9 * layer.out_channels)) ** 0.5, rel=0.1)
        assert layer.weight.abs().max() > 2.5 * layer.weight.std()  # a uniform variable stays below 1.74
        assert (layer.bias == 0).all()
    for layer in linear_layers:  # torch's default: uniform within 1 / sqrt(fan-in)
        assert layer.weight.abs().max() <= layer.in_features**-0.5
        assert layer.weight.std().item() == pytest.approx((3 * layer.in_features) ** -0.5, rel=0.01)
        assert layer.bias.abs().max() > 0


@pytest.mark.parametrize("name", ["simple_fnn", "lenet5", "cnn9", "conv4", "conv4_maxpool", "visualization_cnn"])
def test_small_networks_of_the_spherization_paper_have_torch_initialization(name):
    for layer in layers_of(build(name), (nn.Conv2d, nn.Linear)):
        bound = layer.weight[0].numel() ** -0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound
        assert 0 < layer.bias.abs().max() <= bound


# Without batch norm

# Networks initialized for ReLU, with their options.
WITHOUT_NORM = {name: {"batch_norm": False, "hidden": 0, "drop_rate": 0.0} for name in BACKBONES if "vgg" in name}
WITHOUT_NORM |= {"lenet9": {}, "alexnet_cifar": {}, "mlp": {"widths": (300, 100)}}


@pytest.mark.parametrize(("name", "options"), [*WITHOUT_NORM.items(), ("vgg11_cifar", {"batch_norm": False})])
def test_nets_and_models_without_batch_norm_have_he_initialization(name, options):
    channels, size = usual_images(name)
    config = SphereVisionConfig(backbone=name, backbone_kwargs=options, num_channels=channels, image_size=size)
    net = SphereVisionModel(config).backbone
    assert not layers_of(net, nn.BatchNorm2d)
    for layer in layers_of(net, (nn.Conv2d, nn.Linear)):
        count, inputs = layer.weight.numel(), layer.weight[0].numel()
        # The mean of `count` squared normal variables has a relative standard deviation of sqrt(2 / count).
        assert layer.weight.square().mean().item() * inputs / 2 == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
        assert layer.bias.abs().max() == 0


def test_small_stem_resnets_keep_the_resolution_of_the_first_stage_and_the_initialization_of_timm():
    net = build("resnet18_cifar").eval()
    assert net.forward_features(images("resnet18_cifar")).shape == (2, 512, 4, 4)
    assert all(block.bn2.weight.abs().max() == 0 for block in net.layer1)  # zero-initialized residual
    fan_out = net.conv1.weight[:, 0].numel()
    assert net.conv1.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_small_stem_resnet_with_max_pool_differs_from_timm_only_in_its_first_convolution():
    net = build("resnet50_cifar", max_pool=True).eval()
    theirs = timm.create_model("resnet50", num_classes=0, zero_init_last=True).eval()
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.load_state_dict(net.state_dict())
    x = images("resnet50_cifar")
    torch.testing.assert_close(net(x), theirs(x))
    assert net.forward_features(x).shape == (2, 2048, 2, 2)
    assert all(block.bn3.weight.abs().max() == 0 for block in net.layer2)  # zero-initialized residual


def test_small_stem_densenet_passes_its_first_convolution_to_the_first_block():
    net = build("densenet121_cifar").eval()
    inputs = []
    net.features.denseblock1.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    x = images("densenet121_cifar")
    net(x)
    torch.testing.assert_close(inputs[0], net.features.conv0(x), rtol=0, atol=0)


def resnet12(**options) -> nn.Module:
    """Build a narrow resnet12 with random batch-norm scales and shifts."""
    net = build("resnet12", **{"widths": (4, 6, 5, 7)} | options).eval()
    for norm in layers_of(net, nn.BatchNorm2d):
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return net


def resnet12_by_hand(net: nn.Module, x: torch.Tensor, *, final_activation: bool) -> torch.Tensor:
    for number, block in enumerate(net.layers):
        total, (convolution, norm) = x, block.shortcut
        for place in (0, 3, 6):
            total = block.residual[place + 1](nn.functional.conv2d(total, block.residual[place].weight, padding=1))
            total = nn.functional.leaky_relu(total, 0.1) if place < 6 else total
        total = total + norm(nn.functional.conv2d(x, convolution.weight))
        if number < 3 or final_activation:
            total = nn.functional.leaky_relu(total, 0.1)
        x = nn.functional.max_pool2d(total, 2)
    return x.mean(dim=(2, 3))


@pytest.mark.parametrize("final_activation", [True, False])
def test_resnet12_is_four_pooled_residual_blocks_and_average_pooling(final_activation):
    net, x = resnet12(final_activation=final_activation, drop_rate=0.5), torch.randn(2, 3, 37, 52)
    torch.testing.assert_close(net(x), resnet12_by_hand(net, x, final_activation=final_activation))
    assert [m.p for m in layers_of(net, nn.Dropout)] == [0.5] * final_activation
    net.remove_final_activation()
    torch.testing.assert_close(net(x), resnet12_by_hand(net, x, final_activation=False))


@pytest.mark.parametrize("place", ["residual", "shortcut"])
def test_resnet12_has_he_initialization_for_leaky_relu(place):
    convolution = getattr(build("resnet12").layers[1], place)[0]
    fan_out = convolution.kernel_size[0] ** 2 * 160
    assert convolution.weight.std().item() == pytest.approx((2 / (1 + 0.1**2) / fan_out) ** 0.5, rel=0.03)


def test_lenet9_dropout_drops_before_its_linear_layers_and_has_the_uniform_weights_of_its_program():
    net = build("lenet9_dropout")
    kinds = [type(module) for module in net.layers]
    assert [kinds[index + 1] for index, kind in enumerate(kinds) if kind is nn.Dropout] == [nn.Linear, nn.Linear]
    for module in layers_of(net, (nn.Conv2d, nn.Linear)):
        inputs, outputs = (module.weight[0].numel(), module.weight[:, 0].numel())
        bound = (2 * 6 / (inputs + outputs)) ** 0.5
        assert 0.9 * bound < module.weight.abs().max() <= bound
        assert not module.bias.any()


# Backbones of timm in image models


def test_backbones_support_an_image_size_that_is_not_their_own(tmp_path):
    names = ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "mobilenetv3_small_050"]
    for backbone, image_size in ((name, size) for name in names for size in (64, [96, 32])):
        config = SphereVisionConfig(backbone=backbone, image_size=image_size, num_labels=5)
        model, x = SphereVisionForImageClassification(config).eval(), torch.randn(1, 3, *config.input_size)
        assert model(x).logits.shape == (1, 5)
        if backbone == names[0]:
            model.save_pretrained(tmp_path)
            loaded = SphereVisionForImageClassification.from_pretrained(tmp_path).eval()
            assert torch.equal(loaded(x).logits, model(x).logits)
    net = create_backbone("vit_tiny_patch16_224", num_channels=3, image_size=64, img_size=32)  # an option overrides it
    assert net.patch_embed.img_size == (32, 32)


class Shared(nn.Module):
    """A backbone that uses one norm and one matrix twice, the matrix in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 8
        self.first, self.last = nn.Linear(64, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last[1].weight = self.last[0].weight
        self.norm = nn.BatchNorm1d(8)
        self.norms = nn.ModuleList([self.norm, self.norm])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        for layer, norm in zip(self.last, self.norms, strict=True):
            x = norm(layer(x))
        return x


@pytest.mark.parametrize("backbone", ["coat_lite_tiny", "shared"])
@torch.no_grad()
def test_a_backbone_with_shared_tensors_is_saved_and_loaded(backbone, monkeypatch, tmp_path):
    monkeypatch.setitem(_registry._model_entrypoints, "shared", lambda pretrained=False, **options: Shared())
    side, channels = (8, 1) if backbone == "shared" else (32, 3)
    config = SphereVisionConfig(backbone=backbone, image_size=side, num_channels=channels, num_labels=3)
    model, x = SphereVisionForImageClassification(config), torch.randn(4, channels, side, side)
    model(x)  # changes the statistics of batch norms
    model.eval().save_pretrained(tmp_path)
    loaded, report = SphereVisionForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(loaded.eval()(x).logits, model(x).logits)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


# The network that trains in minutes


@pytest.fixture
def pictures() -> torch.Tensor:
    """Images whose pixels are correlated within and between channels, with different variances."""
    torch.manual_seed(0)
    mixed = torch.einsum("dc,bchw->bdhw", torch.randn(3, 3), torch.randn(200, 3, 12, 12))
    return nn.functional.avg_pool2d(mixed, 3, 1)


def new_model(**options) -> SphereVisionForImageClassification:
    config = SphereVisionConfig(backbone="airbench_cifar", image_size=16, num_labels=4, **options)
    return SphereVisionForImageClassification(config)


def test_responses_of_untrained_filters_are_uncorrelated_with_unit_variance(pictures):
    layer = PatchWhitening(3, epsilon=0.0)
    layer.initialize_from_data(pictures)
    responses = layer(pictures).movedim(1, -1).flatten(0, 2).detach()  # (patches, filters)
    torch.testing.assert_close(responses[:, :12].T.cov(), torch.eye(12), rtol=0, atol=1e-4)
    assert torch.equal(layer.weight[:12], -layer.weight[12:])
    assert dict(layer.named_parameters()).keys() == {"bias"}
    layer = PatchWhitening(1, epsilon=0.25)
    layer.initialize_from_data(torch.ones(4, 1, 5, 5))
    torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.full((8,), 2.0))


def test_convolutions_begin_as_identities_and_gains_of_batch_norms_are_fixed():
    net = create_backbone("airbench_cifar", num_channels=3, image_size=32)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    widths = [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)]
    assert [(c.in_channels, c.out_channels) for c in convs] == widths
    for conv in convs:
        x = torch.randn(2, conv.in_channels, 5, 5)
        torch.testing.assert_close(conv(x)[:, : conv.in_channels], x)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [list(dict(n.named_parameters())) for n in norms] == [["bias"]] * 6
    narrow = create_backbone("airbench_cifar", num_channels=3, image_size=12, widths=[16, 40])
    assert narrow(torch.rand(2, 3, 12, 12)).shape == (2, 40)


def test_recipes_whiten_a_new_network_once_also_if_it_is_saved(pictures, tmp_path):
    model = new_model(head="softmax").eval()
    backbone = model.base_model.backbone
    assert backbone.needs_data_initialization
    initialize_from_data(model, [{"pixel_values": pictures}])
    expected = PatchWhitening(3)
    expected.initialize_from_data(pictures)
    assert torch.equal(backbone.layers[0].weight, expected.weight)
    assert not backbone.needs_data_initialization
    initialize_from_data(model, [{"pixel_values": 2 * pictures}])
    assert torch.equal(backbone.layers[0].weight, expected.weight)
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    assert not loaded.base_model.backbone.needs_data_initialization
    assert loaded.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True)
    torch.testing.assert_close(loaded(pictures).logits, model(pictures).logits)


def test_head_is_initialized_from_embeddings_of_the_whitened_network(pictures):
    model, whitened = new_model(head="vmf"), new_model(head="vmf")
    whitened.load_state_dict(model.state_dict())
    whitened.base_model.backbone.initialize_from_data(pictures)
    for each in (model, whitened):
        initialize_from_data(each, [{"pixel_values": pictures}])
    torch.testing.assert_close(model.state_dict(), whitened.state_dict())
