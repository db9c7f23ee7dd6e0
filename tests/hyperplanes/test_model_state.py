import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from hf_sphere.hyperplanes.reinitialization import named_tensors, observed_batch_norms, with_values


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


def test_a_batch_norm_belongs_to_the_layer_that_produces_its_input():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.unused = (nn.Conv2d(2, 2, 1) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3))

        def forward(self, x):
            x = self.norms[1](self.a(x))
            y = self.b(x)
            return self.norms[0](self.c(x) + 1) + self.norms[2](input=y)  # runs after another layer

    net = Net().eval()
    layers = {name: module for name, module in net.named_children() if isinstance(module, nn.Conv2d)}
    with observed_batch_norms(net, layers) as found:
        net(torch.randn(2, 2, 4, 4))
    assert found == {"a": ["norms.1"], "b": ["norms.2"], "c": [], "unused": []}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_an_activation_separates_a_layer_from_its_batch_norm():
    convolution = nn.Conv2d(2, 2, 1)
    for between, norms in ((nn.ReLU(inplace=True), []), (nn.ReLU(), []), (nn.Identity(), ["2"])):
        net = nn.Sequential(convolution, between, nn.BatchNorm2d(2)).eval()
        with observed_batch_norms(net, {"0": convolution}) as found, torch.inference_mode():
            net(torch.randn(2, 2, 4, 4))
        assert found == {"0": norms}
