import copy
import json

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from hf_sphere.hyperplanes import LayerDistance, distance_from_initialization, iterate_layers, projection_statistics
from hf_sphere.hyperplanes.layers import filters, find_layers
from hf_sphere.nn import AngularConv2d
from hf_sphere.utils.snapshots import Snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.narrow = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.upward = nn.ConvTranspose2d(4, 2, 3)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))


class OurConvolution(nn.Conv1d):
    pass


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({}, ["stem", "upward"]),
        ({"layers": "linear"}, ["head.0", "head.2"]),
        ({"layers": "all"}, ["stem", "upward", "head.0", "head.2"]),
        ({"layers": "all", "include_1x1": True}, ["stem", "narrow", "upward", "head.0", "head.2"]),
    ],
)
def test_layers_are_found_by_kind_in_the_order_of_definition(selection, expected):
    model = Small()
    found = find_layers(model, **selection)
    assert list(found) == expected
    assert all(found[name] is model.get_submodule(name) for name in expected)


@pytest.mark.parametrize("model", [nn.MultiheadAttention(4, 2), nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 2))])
def test_weights_of_attention_and_recurrent_layers_are_named_as_left_out(model, caplog):
    for source in (model, model.state_dict()):
        caplog.clear()
        assert len([*iterate_layers(source, "linear")]) == 1
        assert f"Not among the linear layers: {next(iter(model.state_dict()))}" in caplog.text


def test_a_subclass_has_the_kind_of_its_base_and_a_shared_weight_counts_once_but_not_a_parametrized_one():
    model = nn.Sequential(OurConvolution(2, 3, 3), Conv1D(3, 2), nn.Embedding(3, 2))
    assert [(layer.name, layer.kind) for layer in iterate_layers(model, "all")] == [("0", "conv"), ("1", "linear")]
    assert list(find_layers(nn.Linear(3, 2), "linear")) == [""]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert list(find_layers(model, "linear")) == ["0", "1"]
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(6)))
    assert len(find_layers(model, "linear")) == 6


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_filter_contains_the_weights_of_its_output_channel(kind, groups):
    layer = kind(4, 6, 3, groups=groups, bias=False)
    rows = filters(layer)
    assert rows.shape == (6, 4 // groups * 9)
    for output in range(6):
        # The gradient of an output channel is nonzero only at the weights of its filter.
        layer.zero_grad()
        layer(torch.ones(1, 4, 5, 5))[0, output].sum().backward()
        own = layer.weight[layer.weight.grad != 0]
        assert torch.equal(own.sort().values, rows[output].sort().values)


def test_filters_of_linear_layers_have_the_outputs_first():
    linear, turned = nn.Linear(3, 5), Conv1D(5, 3)
    assert torch.equal(filters(linear), linear.weight)
    inputs = torch.randn(2, 3)
    torch.testing.assert_close(F.linear(inputs, filters(turned), turned.bias), turned(inputs))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_layers_are_refused_only_if_they_are_selected(dtype):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[1].weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match="1 is quantized"):
        projection_statistics(model, "all")
    assert list(projection_statistics(model, "conv").layers) == ["0"]
    model[1] = nn.Module()  # as of GPTQ
    model[1].register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="1 is quantized"):
        projection_statistics(model, "all")


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(3, 4)), "conv", "has 1 1x1 conv, 1 linear.*include_1x1=True"),
        (nn.ReLU(), "all", "neither"),
        (Small(), "convs", "layers='convs'.* Choose layers='conv'"),
    ],
)
def test_a_model_without_selected_layers_is_refused(model, layers, message):
    with pytest.raises(ValueError, match=message):
        find_layers(model, layers)


def test_a_sharded_weight_is_gathered(free_port):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", f"tcp://localhost:{free_port}", world_size=1, rank=0)
    try:
        layer = nn.Linear(4, 4)
        weight = layer.weight.detach().clone()
        layer.weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
        for source in (layer, layer.state_dict()):
            (found,) = iterate_layers(source, "linear")
            assert torch.equal(torch.cat(list(found.chunks())), weight.double())
    finally:
        distributed.destroy_process_group()


HOOKS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Linear])
def test_the_weight_is_that_of_a_hook_whose_attribute_may_be_outdated(hook, kind):
    sizes = (4, 6) if kind is nn.Linear else (4, 6, 3)
    trained, loaded = hook(kind(*sizes)), hook(kind(*sizes))
    loaded.load_state_dict(trained.state_dict())
    stale = loaded.weight
    assert distance_from_initialization(trained, loaded, "all").layers[""].l2 == pytest.approx(0, abs=1e-6)
    found = filters(loaded)
    loaded.eval()(torch.zeros(1, *((4,) if kind is nn.Linear else (4, 5, 5))))
    plain = kind(*sizes)
    plain.weight = nn.Parameter(loaded.weight.detach())
    assert torch.equal(found, filters(plain))
    assert not torch.equal(loaded.weight, stale)


class Doubled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


@pytest.mark.parametrize("layer", [timm.layers.StdConv2d(3, 4, 3), AngularConv2d(3, 4, 3), Doubled(3, 4, 3)])
def test_a_layer_with_its_own_forward_pass_is_refused_but_its_stored_weight_can_be_read(layer):
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "head": layer})
    with pytest.raises(ValueError, match=r"head, a .*, has its own forward pass.* pass the state dict"):
        projection_statistics(model, "all")
    assert list(projection_statistics(model.state_dict(), "all").layers) == ["stem", "head"]


def adapted(method="LoraConfig", **options):
    """Build a model with an adapter of PEFT on its linear layers."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 2))
    return peft.get_peft_model(model, getattr(peft, method)(target_modules=["2"], **options))


@pytest.mark.parametrize(
    ("method", "options"), [("LoraConfig", {}), ("IA3Config", {"feedforward_modules": []}), ("OFTConfig", {})]
)
def test_a_layer_with_an_adapter_is_refused_as_module_file_or_state_dict(method, options, tmp_path):
    model = adapted(method, **options)
    sources = [model, model.state_dict()]
    if method == "LoraConfig":
        model.save_pretrained(tmp_path)
        sources += [tmp_path, {name: value for name, value in model.state_dict().items() if "lora_" in name}]
    for source in sources:
        with pytest.raises(ValueError, match=r"model\.2.* belongs to an adapter.*merge_and_unload"):
            list(iterate_layers(source, "linear"))
    assert list(find_layers(model, "conv")) == ["base_model.model.0"]
    assert list(find_layers(model.merge_and_unload(), "linear")) == ["2", "3"]
    with pytest.raises(ValueError, match=r"3\.original_module belongs to an adapter"):
        find_layers(adapted(modules_to_save=["3"]).base_model.model[3:], "linear")


@pytest.mark.parametrize("name", ["base_layer.0", "exploration_head", "flora"])
def test_other_layers_are_not_taken_for_adapters(name):
    assert [layer.name for layer in iterate_layers({f"{name}.weight": torch.randn(2, 2)}, "linear")] == [name]


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 2))


def changed(model, factor):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data *= factor
    return other


def test_distances_match_the_reference_implementation(root):
    folder = root / "tests" / "golden"
    known = json.loads((folder / "projections.json").read_text())["raw"]
    tensors = load_file(folder / "projections.safetensors")
    initial, trained = (
        {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(part)}
        for part in ("init", "trained")
    )
    distances = distance_from_initialization(trained, initial).layers
    cells = {"features.0": known["0"]["0"], "features.2": known["0"]["1"], "features.7": known["1"]["0"]}
    assert distances.keys() == cells.keys()
    for name, cell in cells.items():
        assert distances[name].l2 == pytest.approx(cell["l2_dist"], abs=1e-6)
        assert distances[name].l_inf == pytest.approx(cell["l_inf_dist"], abs=1e-6)


def test_a_layer_initialized_with_zeros_has_absolute_distances(model):
    initial = copy.deepcopy(model)
    initial[0].weight.data.zero_()
    distances = distance_from_initialization(model, initial).layers
    weight = model[0].weight.detach().double()
    assert distances["0"] == LayerDistance(
        pytest.approx(weight.norm().item()), pytest.approx(weight.abs().max().item()), relative=False
    )
    assert distances["1"] == LayerDistance(0, 0, relative=True)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_weights_has_distance_zero():
    for layer in (nn.Linear(0, 3), nn.Linear(3, 0)):
        distances = distance_from_initialization(layer, copy.deepcopy(layer), "linear")
        assert distances.layers[""] == LayerDistance(0, 0, relative=False)


def test_weight_sources_and_dtypes_can_be_mixed(model, tmp_path):
    save_model(model, str(tmp_path / "model.safetensors"))
    trained = changed(model, 1.5)
    expected = distance_from_initialization(trained, model, "all").to_dict()
    assert distance_from_initialization(trained, tmp_path, "all").to_dict() == expected
    assert distance_from_initialization(trained.state_dict(), model, "all").to_dict() == expected
    snapshot = Snapshot(tmp_path / "model.safetensors", 0)
    assert distance_from_initialization(trained, snapshot, "all").to_dict() == expected
    half = distance_from_initialization(copy.deepcopy(model).bfloat16(), model, "all").layers
    assert all(0 < layer.l2 < 0.01 for layer in half.values())


def test_other_architectures_and_weights_that_are_not_finite_are_named(model):
    other, infinite = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 5, 3), nn.Linear(4, 2)), copy.deepcopy(model)
    infinite[1].weight.data[0] = torch.nan
    missing = r"only one of the model and its initialization has 1\."
    for pair, message in (
        ((model, other), r"1 has filters of shape \(4, 27\), but \(5, 27\)"),
        ((model, model[:1]), missing),
        ((model[:1], model), missing),
        ((infinite, model), "1 has a weight that is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            distance_from_initialization(*pair)


def test_the_table_has_a_row_per_layer(model):
    lines = str(distance_from_initialization(changed(model, 1.25), model, "all")).splitlines()
    assert [line.split() for line in lines[::3]] == [["l2", "l_inf", "relative"], ["2", "0.25", "0.25", "True"]]
