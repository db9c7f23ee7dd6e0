import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from hf_sphere.hyperplanes.layers import find_layers
from hf_sphere.hyperplanes.reinitialization import following_batch_norms, named_tensors, with_values


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))


@pytest.mark.parametrize("name", ["out.weight", "words.weight"])
def test_a_tied_weight_is_replaced_everywhere(name):
    model, weight = Tied(), torch.randn(5, 3)
    with with_values(model, {name: weight}):
        torch.testing.assert_close(model(torch.arange(5)), weight @ weight.T)


def test_the_tensors_of_a_parametrized_weight_are_replaced_and_restored():
    layer, other = (orthogonal(nn.Linear(3, 3, bias=False)) for _ in range(2))
    plain = layer.weight.detach().clone()
    with with_values(layer, named_tensors(other)):
        torch.testing.assert_close(layer.weight, other.weight)
    torch.testing.assert_close(layer.weight, plain)


class Block(nn.Module):
    """Layers in the order of the definition of residual blocks that normalize first."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(2), nn.Conv2d(2, 4, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)


@pytest.mark.parametrize(
    ("network", "norms"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Identity(), nn.BatchNorm2d(2)), {"0": "2"}),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)), {}),
        (nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(2)), {}),
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), {"0": "1"}),
        (nn.Sequential(nn.Conv2d(2, 2, 1), BatchNormAct2d(2), nn.Conv2d(2, 2, 1)), {"0": "1"}),
        (nn.Sequential(Block(), Block()), {"0.conv1": "0.norm2", "1.conv1": "1.norm2"}),
    ],
)
def test_a_batch_norm_belongs_to_the_layer_before_it_in_the_same_module(network, norms):
    assert following_batch_norms(network, find_layers(network, "all", include_1x1=True)) == norms


@pytest.mark.parametrize("name", ["vgg11_bn", "resnet18", "test_efficientnet"])
def test_the_batch_norm_after_a_layer_receives_its_output(name):
    network = timm.create_model(name).eval()
    layers, outputs, found = find_layers(network, "all", include_1x1=True), {}, {}
    paths = {module: path for path, module in network.named_modules()}

    def returned(module, args, output):
        outputs[id(output)] = paths[module], output

    def received(module, args):
        if id(args[0]) in outputs:
            found[outputs[id(args[0])][0]] = paths[module]

    for layer in layers.values():
        layer.register_forward_hook(returned)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(received)
    with torch.inference_mode():
        network(torch.randn(1, 3, 64, 64))
    assert following_batch_norms(network, layers) == found != {}
