import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from hf_sphere.analysis.swapping import (
    evaluation_mode,
    left_as_it_was,
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


def test_an_activation_that_writes_into_the_output_is_between_it_and_the_batch_norm():
    convolution = nn.Conv2d(2, 2, 1)
    for between, norms in ((nn.ReLU(inplace=True), []), (nn.ReLU(), []), (nn.Identity(), ["2"])):
        net = nn.Sequential(convolution, between, nn.BatchNorm2d(2)).eval()
        with observed_batch_norms(net, {"0": convolution}) as found, torch.inference_mode():
            net(torch.randn(2, 2, 4, 4))
        assert found == {"0": norms}


def test_a_deep_copy_computes_as_itself(net):
    images = torch.randn(4, 2, 3, 3)
    expected = net(images)
    net[2].forward = partial(nn.Flatten.forward, net[2])  # as accelerate does it

    def wrong(forward):
        return lambda x: 0 * forward(x)

    with patched_forwards(dict.fromkeys(net.modules(), wrong)), patched_forwards({net: wrong, net[3]: wrong}):
        other = copy.deepcopy(net)
        assert not net(images).any()
        torch.testing.assert_close(other(images), expected, rtol=0, atol=0)
        torch.testing.assert_close(other.double()(images.double()), expected.double())
        assert list(inspect.signature(net.forward).parameters) == ["input"]
    assert other[2].forward.args[0] is other[2]
    assert not any(a is b for a, b in zip(net.parameters(), other.parameters(), strict=True))


class Remembers(nn.Module):
    """Changes in all the ways in which a forward method changes a module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(2, 2))
        self.register_buffer("peak", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("tied", self.peak)
        self.calls, self.sum, self.unset = 0, torch.zeros(2), None

    def forward(self, x):
        x = self.layer(x)
        self.peak.copy_(x.abs().amax(0))
        assert self.inner.tied is self.peak
        self.mean = self.mean + x.mean(0)
        self.sum += x.sum(0)
        self.calls += 1
        self.features = self.unset = x
        self.register_buffer("new", x)
        return x


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_model_is_left_as_it_was_whatever_it_writes_and_keeps(error):
    def state():
        places = [place for module in model.modules() for place in (vars(module), module._buffers)]
        return [(key, id(value)) for place in places for key, value in place.items()]

    model = Remembers().eval()
    before, weight = state(), model.layer.weight.detach().clone()
    try:
        with left_as_it_was(model):
            with swapped_tensors(model, {"layer.weight_v": torch.randn(2, 2), "peak": torch.ones(2)}):
                model(torch.randn(3, 2))
            model.train()(torch.randn(3, 2))
            assert (model.calls, model.peak.any().item()) == (2, True)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        assert error is not None
    assert state() == before
    assert torch.equal(model.layer.weight, weight)
    assert not any(value.any() for value in (model.peak, model.mean, model.sum))
