import copy
import json
import statistics

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from transformers import BertConfig, BertForSequenceClassification

from hf_sphere.hyperplanes import LayerRobustness, ReinitializationRobustness, reinitialization_robustness
from hf_sphere.hyperplanes.layers import find_layers
from hf_sphere.hyperplanes.reinitialization import following_batch_norms, named_tensors, with_values
from hf_sphere.utils.snapshots import read_snapshot, save_snapshot

IMAGES = torch.randn(23, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, classes=3, width=6):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
        self.conv2, self.drop, self.fc = nn.Conv2d(width, 6, 1), nn.Dropout(0.5), nn.Linear(6, classes)

    def forward(self, x):
        x = self.conv2(self.norm1(self.conv1(x)).relu())
        return self.fc(self.drop(x.relu().mean((2, 3))))


LAYERS = ["conv1", "conv2", "fc"]


def new_net(seed=0, **options):
    """A net with batch norm statistics; its weights depend on `seed`."""
    torch.manual_seed(seed)
    net = Net(**options)
    for _ in range(3):
        net(3 * torch.randn(20, 3, 8, 8) + 1)
    return net


def share(model):
    """A value in [0, 1] that depends on all weights."""
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        return torch.cat([model(x.to(dtype)) for x in IMAGES.split(10)]).float().softmax(-1)[:, 0].mean().item()


def plain_share(net, other, names):
    """`share` of a copy of the net with the named tensors of another net."""
    mixed = Net(classes=net.fc.out_features)
    state = other.state_dict()
    mixed.load_state_dict({name: state[name] if name in names else value for name, value in net.state_dict().items()})
    return share(mixed.eval())


def names_of(net, *modules):
    return {name for name in net.state_dict() if name.split(".")[0] in modules}


@pytest.mark.parametrize("with_norm", [True, False])
def test_one_layer_at_a_time_gets_the_weights_of_each_snapshot(with_norm):
    net, others = new_net(), [new_net(1), new_net(2)]
    result = reinitialization_robustness(net, [others[0], others[1].state_dict()], share, include_batch_norm=with_norm)
    assert result.accuracy == pytest.approx(share(net.eval()), abs=1e-7)
    assert list(result.layers) == LAYERS
    for layer in LAYERS:
        names = names_of(net, layer, *(["norm1"] if with_norm and layer == "conv1" else []))
        expected = {str(place): plain_share(net, other, names) for place, other in enumerate(others)}
        assert result.layers[layer].snapshots == pytest.approx(expected, abs=1e-6)
        assert min(abs(value - result.accuracy) for value in expected.values()) > 1e-4


def everything_of(net):
    """Everything that must not change: tensors by identity and value, modes, hooks, attributes."""
    tensors = {name: (id(value), value.detach().clone()) for name, value in named_tensors(net).items()}
    modules = {
        name: (module.training, list(module.__dict__), list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in net.named_modules()
    }
    return tensors, modules


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_unchanged_afterwards(error):
    net, calls = new_net().train(), []
    net.drop.eval()

    def evaluate(model):
        calls.append(1)
        if error is not None and len(calls) == 4:
            with torch.no_grad():
                model(IMAGES[:10])  # during a forward pass
            raise error
        return share(model)

    tensors, modules = everything_of(net)
    try:
        reinitialization_robustness(net, [new_net(1)], evaluate, num_random=1, fresh=Net)
    except BaseException as raised:
        assert type(raised) is error  # noqa: PT017
    after, modules_after = everything_of(net)
    assert modules_after == modules
    assert list(after) == list(tensors)
    for name, (identity, value) in tensors.items():
        assert after[name][0] == identity
        assert torch.equal(after[name][1], value)


def test_the_label_of_a_file_is_its_epoch_and_a_missing_file_is_an_error(tmp_path):
    net, others = new_net(), [new_net(1), new_net(2)]
    paths = [save_snapshot(other, tmp_path, 10 * epoch) for epoch, other in enumerate(others)]
    with pytest.raises(FileNotFoundError, match="epoch-0005"):
        reinitialization_robustness(net, [tmp_path / "epoch-0005.safetensors"], share)
    result = reinitialization_robustness(net, [read_snapshot(paths[0]), str(paths[1])], share)
    expected = reinitialization_robustness(net, others, share)
    for layer in LAYERS:
        assert list(result.layers[layer].snapshots) == ["0", "10"]
        values = list(expected.layers[layer].snapshots.values())
        assert list(result.layers[layer].snapshots.values()) == pytest.approx(values, abs=1e-7)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))


def test_a_tied_weight_is_found_under_its_other_name(tmp_path):
    net, other = Tied(), Tied()
    save_file({"words.weight": other.out.weight}, tmp_path / "epoch-0001.safetensors")

    def evaluate(model):
        return model(torch.arange(5)).sigmoid().mean().item()

    result = reinitialization_robustness(net, [tmp_path / "epoch-0001.safetensors"], evaluate)
    assert result.layers["out"].snapshots["1"] == pytest.approx(evaluate(other), abs=1e-7)
    assert result.accuracy == evaluate(net) != pytest.approx(evaluate(other), abs=1e-5)


def test_random_weights_come_from_the_factory_and_the_seed_and_a_progress_bar_names_layers(capsys):
    net, built, state = new_net(), [], torch.random.get_rng_state()

    def reset(seed, **options):
        fresh = lambda: built.append(Net()) or built[-1]  # noqa: E731
        return reinitialization_robustness(net, [], share, num_random=3, fresh=fresh, seed=seed, **options).layers

    first = reset(5, progress=True)
    assert "fc of random2" in capsys.readouterr().err
    assert torch.equal(torch.random.get_rng_state(), state)
    for layer in LAYERS:
        names = names_of(net, layer, *(["norm1"] if layer == "conv1" else []))
        expected = [plain_share(net, other, names) for other in built]
        assert first[layer].random == pytest.approx(expected, abs=1e-6)
        assert len({*expected}) == len(built) == 3
        assert first[layer].random_mean == pytest.approx(statistics.fmean(expected), abs=1e-6)
        assert first[layer].random_deviation == pytest.approx(statistics.stdev(expected), abs=1e-6)
    torch.manual_seed(99)
    assert reset(5, layers="linear")["fc"] == first["fc"]  # independent of other draws
    other = reset(6)
    assert all(other[layer].random != first[layer].random for layer in LAYERS)


def test_random_weights_of_a_transformers_model_come_from_its_configuration():
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_labels=2))

    def evaluate(model):
        return model(input_ids=torch.arange(20).view(4, 5)).logits.softmax(-1)[:, 0].mean()

    result = reinitialization_robustness(model, [], evaluate, num_random=2)
    assert len(result.layers) == 8  # three projections, three dense layers, pooler, classifier
    assert len(set(result.layers["classifier"].random)) == 2


def test_known_accuracies_are_reused():
    net, known, calls, snapshots = new_net(), {}, [], [new_net(1), new_net(2)]
    options = {"num_random": 1, "fresh": Net}

    def evaluate(model):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return share(model)

    with pytest.raises(KeyboardInterrupt):
        reinitialization_robustness(net, snapshots, evaluate, finished=known, **options)
    assert list(known) == ["baseline", "conv1@0", "conv1@1", "conv1@random0"]
    result = reinitialization_robustness(net, snapshots, evaluate, finished=known, **options)
    assert len(calls) == 5 + 1 + 6
    assert result == reinitialization_robustness(net, snapshots, share, **options)
    reinitialization_robustness(net, snapshots, evaluate, finished=known, **options)
    assert len(calls) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_snapshots_are_cast_to_the_dtype_of_the_model(dtype):
    net, other = new_net().to(dtype), new_net(1)
    result = reinitialization_robustness(net, [other], share, include_batch_norm=False)
    for layer in LAYERS:
        changed = copy.deepcopy(net).eval()
        changed.get_submodule(layer).load_state_dict(other.get_submodule(layer).state_dict())
        assert result.layers[layer].snapshots["0"] == pytest.approx(share(changed), abs=1e-6)
    assert {value.dtype for value in net.parameters()} == {dtype}
    assert {value.dtype for value in other.parameters()} == {torch.float32}


@pytest.fixture
def result():
    layers = {
        "stem": LayerRobustness({"0": 0.5, "5": 0.9}, [0.2, 0.4]),
        "body": LayerRobustness({"0": 0.88, "5": 0.9}, [0.1, 0.3]),
        "head": LayerRobustness({"0": 0.1, "5": 0.2}, [0.5, 0.5]),
    }
    return ReinitializationRobustness(0.9, layers)


def test_a_result_is_saved(result, tmp_path):
    result.layers["fc"] = LayerRobustness({"0": 0.5})
    result.save(tmp_path / "result.json")
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["layers"]["fc"]["random"] is None
    assert stored["layers"]["stem"] == {
        "snapshots": {"0": 0.5, "5": 0.9},
        "random": {"mean": pytest.approx(0.3), "deviation": pytest.approx(0.2**0.5 / 10**0.5), "values": [0.2, 0.4]},
    }
    assert LayerRobustness(random=[0.5]).random_deviation is None


def test_critical_layers_have_the_largest_accuracy_drop(result):
    assert "critical): head, stem" in str(result)
    assert "lose at most 0.05: body" in str(result)
    assert result.critical_layers() == ["head", "stem"]
    assert result.critical_layers(drop=0.5) == ["head"]
    assert result.critical_layers(drop=0.01) == ["head", "stem", "body"]
    borderline = ReinitializationRobustness(0.9, {"layer": LayerRobustness({"0": 0.85})})
    assert 0.9 - 0.85 > 0.05  # because of rounding
    assert borderline.critical_layers() == []
    draws = {name: LayerRobustness({}, layer.random) for name, layer in result.layers.items()}
    assert ReinitializationRobustness(0.9, draws).critical_layers() == ["body", "stem", "head"]


def test_results_do_not_depend_on_earlier_evaluations():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.second(self.first(x)) + torch.tensor([float(self.seen), 0.0])

    model, x = Counting(), torch.randn(64, 4)
    snapshots = [Counting().state_dict() for _ in range(3)]
    forward, backward = (
        reinitialization_robustness(model, order, lambda net: float((net(x).argmax(-1) == 0).float().mean()))
        for order in (snapshots, snapshots[::-1])
    )
    for name, layer in forward.layers.items():
        assert list(layer.snapshots.values()) == list(backward.layers[name].snapshots.values())[::-1]
    assert model.seen == 0


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda folder: [save_snapshot(new_net(), folder / name, 3) for name in "ab"], {}, "label 3"),
        (lambda folder: [new_net(1)], {"num_random": 1}, "random weights of a Net need fresh"),
        (lambda folder: [], {}, "there are no weights to reset the layers to"),
        (
            lambda folder: [save_snapshot(new_net(width=5), folder, 7)],
            {},
            r"7 has conv1.weight of shape \(5, 3, 3, 3\).*\(6, 3, 3, 3\)",
        ),
        (lambda folder: [{"other": torch.zeros(3)}], {}, r"has no conv1.weight, .*\(6, 3, 3, 3\)"),
        (lambda folder: [{k: v for k, v in new_net(1).state_dict().items() if "norm" not in k}], {}, "norm1"),
    ],
)
def test_bad_input_is_refused_before_evaluation(build, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reinitialization_robustness(new_net(), build(tmp_path), lambda model: pytest.fail("too late"), **options)


def test_a_value_that_is_no_fraction_is_refused():
    for value in (91.3, float("nan")):
        with pytest.raises(ValueError, match=rf"as a fraction in \[0, 1\]; got {value}"):
            reinitialization_robustness(new_net(), [new_net(1)], lambda model, value=value: value)


def test_batch_norms_that_follow_no_layer_are_named_since_they_keep_their_state(caplog):
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 3))
    reinitialization_robustness(net, [net.state_dict()], lambda model: 0.5, num_random=1, fresh=lambda: net)
    assert "1 batch norm(s), such as 0, do not directly follow a layer of their size" in caplog.text


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
