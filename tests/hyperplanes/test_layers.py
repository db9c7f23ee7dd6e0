import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from hf_sphere.hyperplanes import iterate_layers
from hf_sphere.hyperplanes.layers import filters, find_layers, layer_kind


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


def test_a_subclass_has_the_kind_of_its_base_and_may_be_the_model():
    assert layer_kind(OurConvolution(2, 3, 3)) == "conv"
    assert layer_kind(Conv1D(3, 2)) == "linear"
    assert layer_kind(nn.Embedding(3, 2)) is None
    assert list(find_layers(nn.Linear(3, 2), "linear")) == [""]


def test_a_shared_weight_counts_once_but_not_a_parametrized_one():
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


def test_bad_input_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(3, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"2 linear layers, 1 pointwise convolution.*include_1x1=True or layers="):
        find_layers(model)
    with pytest.raises(ValueError, match="neither kind"):
        find_layers(nn.ReLU(), "all")
    with pytest.raises(ValueError, match="conv, linear, all; got 'convs'"):
        find_layers(Small(), "convs")
    with pytest.raises(TypeError, match="got str"):
        find_layers("resnet18")
    with pytest.raises(ValueError, match="BatchNorm2d is neither"):
        filters(nn.BatchNorm2d(3))


def quantized_module():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    packed = nn.Module()
    packed.register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    model[1] = packed
    return model


def eight_bit_module(dtype):
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(model.weight.detach().to(dtype), requires_grad=False)
    return model


def flattened_shard():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.zeros(0))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (quantized_module(), "1 is quantized"),
        (eight_bit_module(torch.int8), "quantized.*int8"),
        (eight_bit_module(torch.float8_e4m3fn), "quantized.*float8"),
        (nn.Linear(3, 2, device="meta"), "meta device.*device_map"),
        (nn.LazyLinear(3), "lazy"),
        (flattened_shard(), r"shape \(0,\).*full state dict"),
    ],
)
def test_unavailable_weights_are_rejected(model, message):
    with pytest.raises(ValueError, match=message):
        list(iterate_layers(model, "linear"))


def test_quantized_modules_of_an_unselected_kind_are_ignored():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), quantized_module())
    assert list(find_layers(model, "conv")) == ["0"]
    with pytest.raises(ValueError, match=r"1\.1 is quantized"):
        find_layers(model, "all")


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_quantized_torch_modules_are_rejected():
    from torch.ao.nn.quantized import Conv2d, Linear

    model = nn.Sequential(Linear(2, 3), nn.Conv2d(1, 2, 3))
    assert list(find_layers(model, "conv")) == ["1"]
    with pytest.raises(ValueError, match=r"0 is quantized \(a torch\.ao.*Linear\)"):
        find_layers(model, "linear")
    with pytest.raises(ValueError, match="0 is quantized"):
        find_layers(nn.Sequential(Conv2d(1, 2, 3)), "conv")


def test_sharded_tensors_are_rejected(free_port):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", f"tcp://localhost:{free_port}", world_size=1, rank=0)
    try:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(ValueError, match="Gather the full state dict"):
            filters(layer, "fc")
        with pytest.raises(ValueError, match="Gather the full state dict"):
            list(iterate_layers(layer.state_dict(), "linear"))
    finally:
        distributed.destroy_process_group()
