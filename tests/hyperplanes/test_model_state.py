import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from hf_sphere.hyperplanes.model_state import evaluate_with, evaluation_mode, named_tensors, observed_batch_norms


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


def test_the_model_uses_the_replacement_tensors(net):
    other = nn.Linear(3, 2)
    images = torch.randn(4, 2, 3, 3)
    inside = evaluate_with(net, lambda model: model(images), {"3.weight": other.weight, "3.bias": other.bias})
    torch.testing.assert_close(inside, other(net[:3](images)), rtol=0, atol=0)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_same_objects_are_restored_in_order(net, error):
    before = named_tensors(net)
    values = {name: value.detach().clone() for name, value in before.items()}

    def evaluate(model):
        assert model is net
        assert not any(value.any() for value in model.state_dict().values())
        if error is not None:
            raise error

    try:
        evaluate_with(net, evaluate, {name: torch.zeros_like(value) for name, value in before.items()})
    except BaseException as raised:
        assert type(raised) is error  # noqa: PT017
    after = named_tensors(net)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in before)


@pytest.mark.parametrize("names", [["out.weight"], ["words.weight"], ["words.weight", "out.weight"]])
def test_a_tied_weight_is_replaced_everywhere(names):
    model, weight = Tied(), torch.randn(5, 3)
    output = evaluate_with(model, lambda model: model(torch.arange(5)), {name: weight.clone() for name in names})
    torch.testing.assert_close(output, weight @ weight.T)
    assert model.out.weight is model.words.weight


def test_a_module_with_two_names_is_restored():
    layer = nn.Linear(3, 3)
    model, before = nn.Sequential(layer, nn.Tanh(), layer), layer.weight
    output = evaluate_with(model, lambda model: model(torch.ones(1, 3)), {"2.weight": torch.zeros(3, 3)})
    torch.testing.assert_close(output, layer.bias[None])
    assert layer.weight is before


def test_the_tensors_of_a_parametrized_weight_are_replaced():
    layer, other = (orthogonal(nn.Linear(3, 3, bias=False)) for _ in range(2))
    plain = layer.weight.detach().clone()
    inside = evaluate_with(layer, lambda layer: layer.weight, named_tensors(other))
    torch.testing.assert_close(inside, other.weight)
    torch.testing.assert_close(layer.weight, plain)


def test_modes_are_restored_per_module(net):
    net.train()
    net[1].eval()
    with evaluation_mode(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net] == [True, False, True, True]


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
    assert found == {"a": ["norms.1"], "b": ["norms.2"], "c": []}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_an_activation_separates_a_layer_from_its_batch_norm():
    convolution = nn.Conv2d(2, 2, 1)
    for between, norms in ((nn.ReLU(inplace=True), []), (nn.ReLU(), []), (nn.Identity(), ["2"])):
        net = nn.Sequential(convolution, between, nn.BatchNorm2d(2)).eval()
        with observed_batch_norms(net, {"0": convolution}) as found, torch.inference_mode():
            net(torch.randn(2, 2, 4, 4))
        assert found == {"0": norms}


class Remembers(nn.Module):
    """A module whose forward pass has every kind of side effect."""

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
def test_side_effects_of_the_forward_pass_are_undone(error):
    def state():
        places = [place for module in model.modules() for place in (vars(module), module._buffers)]
        return [(key, id(value)) for place in places for key, value in place.items()]

    model = Remembers().eval()
    before, weight = state(), model.layer.weight.detach().clone()
    replaced = {"layer.weight_v": torch.randn(2, 2), "peak": torch.ones(2)}
    try:
        with evaluation_mode(model):
            evaluate_with(model, lambda model: model(torch.randn(3, 2)), replaced)
            model.train()(torch.randn(3, 2))
            assert (model.calls, model.peak.any().item()) == (2, True)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        assert error is not None
    assert state() == before
    assert torch.equal(model.layer.weight, weight)
    assert not any(value.any() for value in (model.peak, model.mean, model.sum))
