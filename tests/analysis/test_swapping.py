import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from hf_sphere.analysis.swapping import (
    evaluation_mode,
    named_tensors,
    observed_batch_norms,
    patched_forwards,
    swapped_tensors,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)).eval()


def test_the_model_computes_with_what_was_put_in(net):
    other = nn.Linear(3, 2)
    images = torch.randn(4, 2, 3, 3)
    with swapped_tensors(net, {"3.weight": other.weight, "3.bias": other.bias}):
        inside = net(images)
    torch.testing.assert_close(inside, other(net[:3](images)), rtol=0, atol=0)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_same_objects_are_put_back_in_order(net, error):
    before = named_tensors(net)
    values = {name: value.detach().clone() for name, value in before.items()}
    others = {name: torch.zeros_like(value) for name, value in before.items()}
    try:
        with swapped_tensors(net, others):
            assert not any(value.any() for value in net.state_dict().values())
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error  # noqa: PT017
    after = named_tensors(net)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in before)


def test_a_tied_weight_is_replaced_everywhere():
    model = Tied()
    weight = torch.randn(5, 3)
    with swapped_tensors(model, {"out.weight": weight}):
        torch.testing.assert_close(model(torch.arange(5)), weight @ weight.T)
    assert model.out.weight is model.words.weight


def test_a_parametrised_weight_is_replaced_by_what_it_is_made_of():
    layer = orthogonal(nn.Linear(3, 3, bias=False))
    other = orthogonal(nn.Linear(3, 3, bias=False))
    plain = layer.weight.detach().clone()
    with swapped_tensors(layer, named_tensors(other)):
        torch.testing.assert_close(layer.weight, other.weight)
    torch.testing.assert_close(layer.weight, plain)


def test_a_forward_method_of_the_instance_comes_back(net):
    def own(x):
        return 2 * x

    net[2].forward = own
    with patched_forwards({net[2]: lambda forward: lambda x: forward(x) + 1, net[3]: lambda forward: lambda x: x}):
        assert net[2](torch.ones(1)) == 3
        assert net[3](torch.ones(1)) == 1
    assert net[2].forward is own
    assert "forward" not in net[3].__dict__


def test_modes_come_back_module_by_module(net):
    net.train()
    net[1].eval()
    with evaluation_mode(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net] == [True, False, True, True]


def test_a_batch_norm_belongs_to_the_layer_whose_very_output_it_takes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.unused = (nn.Conv2d(2, 2, 1) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3))

        def forward(self, x):
            x = self.norms[1](self.a(x))
            y = self.b(x)
            return self.norms[0](self.c(x) + 1) + self.norms[2](input=y)  # only after another layer ran

    net = Net().eval()
    layers = {name: module for name, module in net.named_children() if isinstance(module, nn.Conv2d)}
    with observed_batch_norms(net, layers) as found:
        net(torch.randn(2, 2, 4, 4))
    assert found == {"a": ["norms.1"], "b": ["norms.2"], "c": []}
    assert not any("forward" in module.__dict__ for module in net.modules())
