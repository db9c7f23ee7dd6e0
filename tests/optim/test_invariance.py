from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import Olmo2Config, Olmo2ForCausalLM

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.optim import find_scale_invariant_weights

Dims = dict[str, tuple[int, ...]]


def found_in(model: nn.Module, batch: Any = None) -> Dims:
    return find_scale_invariant_weights(model, batch).channel_dims


def filters(*names: str) -> Dims:
    return {f"{name}.weight": (0,) for name in names}


def whole(*names: str) -> Dims:
    return {f"{name}.weight": () for name in names}


# Real models; the expected weights are listed by hand. Others are in test_scale_invariance_of_models.py.


CONVNEXT = ["stem.0", *(f"stages.{s}.blocks.{b}.conv_dw" for s, n in enumerate((2, 2, 6, 2)) for b in range(n))]
RESNET = ["conv1", "layer2.0.downsample.0", "layer3.0.downsample.0"]
RESNET += [f"layer{stage}.{block}.conv{number}" for stage in (1, 2, 3) for block in range(3) for number in (1, 2)]
# An RMS norm follows queries, keys, and the outputs of attention, which are linear in the values, and MLP.
OLMO2 = [f"self_attn.{kind}_proj" for kind in "qkvo"] + [f"mlp.{kind}_proj" for kind in ("up", "down")]


def sphere_vision() -> nn.Module:
    config = {"backbone": "resnet20_cifar", "image_size": 16, "num_channels": 3, "num_labels": 5}
    return SphereVisionForImageClassification(SphereVisionConfig(**config))


def olmo2() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}
    return Olmo2ForCausalLM(Olmo2Config(**sizes, **heads))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, Dims]] = {
    "sphere_vision": (sphere_vision, 16, filters(*(f"sphere_vision.backbone.{name}" for name in RESNET))),
    # Batch norm cancels the biases of the convolutions; the convolutions of pre_logits have no norm.
    "vgg11_bn": (
        lambda: timm.create_model("vgg11_bn", num_classes=5, mlp_ratio=0.01),
        32,
        filters(*(f"features.{index}" for index in (0, 4, 8, 11, 15, 18, 22, 25))),
    ),
    "convnext without biases": (
        lambda: timm.create_model("convnext_atto", num_classes=5, dims=(8, 16, 24, 32), conv_bias=False),
        64,
        whole(*CONVNEXT),
    ),
    "OLMo 2": (olmo2, 0, whole(*(f"model.layers.{i}.{name}" for i in (0, 1) for name in OLMO2))),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_output_is_invariant_to_scaling_of_scale_invariant_groups_only(name):
    build, side, expected = MODELS[name]
    model = build()
    batch = {"pixel_values" if name == "sphere_vision" else "x": torch.randn(4, 3, side, side)}
    batch = batch if side else {"input_ids": torch.arange(12).view(2, 6)}
    assert found_in(model, batch) == expected
    for module in model.double().train().modules():  # the invariance is exact without the epsilon of norms
        for epsilon in ("eps", "variance_epsilon"):
            if hasattr(module, epsilon):
                setattr(module, epsilon, 1e-30)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    def answer() -> Tensor:
        torch.manual_seed(1)  # for dropout
        output = model(**batch)
        return output if isinstance(output, Tensor) else output["logits"]

    before = answer()
    for weight_name, weight in model.named_parameters():
        if weight.ndim > 1:
            kept, scaled = weight.clone(), weight[0] if expected.get(weight_name) == (0,) else weight
            scaled.mul_(3.0)
            change = (answer() - before).norm() / before.norm()
            assert change < 1e-5 if weight_name in expected else change > 1e-4, weight_name
            weight.copy_(kept)


# Individual norms


V = "parametrizations.weight.original1"
FIRST, SECOND, ALL = {"0.weight": (0,)}, {"0.weight": (1,)}, {"0.weight": ()}
CHAINS: dict[str, tuple[Callable[[], list[nn.Module]], Dims]] = {
    "linear, BatchNorm1d": (lambda: [nn.Linear(6, 4), nn.BatchNorm1d(4)], FIRST),
    "Conv1d, BatchNorm1d": (lambda: [nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4)], FIRST),
    "Conv2d, BatchNorm2d": (lambda: [nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)], FIRST),
    "Conv3d, BatchNorm3d": (lambda: [nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4)], FIRST),
    "transposed convolution": (lambda: [nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4)], SECOND),
    "depthwise convolution": (lambda: [nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)], FIRST),
    "grouped convolution": (lambda: [nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)], FIRST),
    "one filter": (lambda: [nn.Conv2d(6, 1, 3), nn.BatchNorm2d(1)], ALL),
    "GroupNorm with one group": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.GroupNorm(1, 4)], ALL),
    "GroupNorm with one group per channel": (lambda: [nn.Conv2d(6, 4, 3), nn.GroupNorm(4, 4)], FIRST),
    "GroupNorm after a bias": (lambda: [nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4)], {}),
    "LayerNorm": (lambda: [nn.Linear(6, 4, bias=False), nn.LayerNorm(4)], ALL),
    "LayerNorm after a bias": (lambda: [nn.Linear(6, 4), nn.LayerNorm(4)], {}),
    "RMSNorm": (lambda: [nn.Linear(6, 4, bias=False), nn.RMSNorm(4)], ALL),
    "weight norm": (lambda: [weight_norm(nn.Conv2d(6, 4, 3))], {f"0.{V}": (0,)}),
    "weight norm, then batch norm": (lambda: [weight_norm(nn.Conv2d(6, 4, 3)), nn.BatchNorm2d(4)], {f"0.{V}": (0,)}),
    "LayerNorm over the width": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.LayerNorm(3)], FIRST),
    "ReLU between": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.ReLU(), nn.LayerNorm((4, 3, 3))], ALL),
    "ReLU between, before BatchNorm": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(4)], FIRST),
    "ReLU after a bias": (lambda: [nn.Conv2d(6, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)], {}),
    "GELU between": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.GELU(), nn.BatchNorm2d(4)], {}),
    "pooling and dropout between": (
        lambda: [nn.Conv2d(6, 4, 2, bias=False), nn.AvgPool2d(2), nn.Dropout2d(0.1), nn.BatchNorm2d(4)],
        FIRST,
    ),
    "no norm": (lambda: [nn.Conv2d(6, 4, 3, bias=False), nn.ReLU()], {}),
    # The second layer is invariant to the scale of the first as one group and to that of each of its own filters.
    "two layers before a norm": (
        lambda: [nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)],
        {"0.weight": (), "1.weight": (0,)},
    ),
    "batch norm without statistics, in evaluation": (
        lambda: [nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False).eval()],
        FIRST,
    ),
}


def batch_for(model: nn.Module) -> Tensor:
    first = next(module for module in model.modules() if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)))
    return torch.randn(8, 6, *[5] * len(getattr(first, "kernel_size", ())))


@pytest.mark.parametrize("chain", CHAINS)
def test_each_norm_determines_its_own_groups(chain):
    build, expected = CHAINS[chain]
    model = nn.Sequential(*build())
    assert found_in(model, batch_for(model)) == expected


# Operations between a weight and its norm


class Graph(nn.Module):
    """Modules or parameters by name, and a forward pass that is a function of them and the input."""

    def __init__(self, run: Callable[["Graph", Tensor], Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def linear(outputs: int = 6, bias: bool = False) -> nn.Linear:
    return nn.Linear(6, outputs, bias=bias)


def two(run: Callable[[Graph, Tensor], Any], norm: nn.Module | None = None) -> Graph:
    return Graph(run, a=linear(), b=linear(), norm=norm or nn.BatchNorm1d(6))


BOTH = {"a.weight": (0,), "b.weight": (0,)}
B = {"b.weight": (0,)}
GRAPHS: dict[str, tuple[Callable[[], nn.Module], Dims]] = {
    "a residual sum": (lambda: two(lambda m, x: m.norm(m.b(x) + x)), {}),
    "a sum of two weights": (lambda: two(lambda m, x: m.norm(m.a(x) + m.b(x))), {}),
    "a sum of one weight with itself": (lambda: two(lambda m, x: m.norm(m.b(x) + m.b(x.flip(0)))), B),
    "a constant added before RMSNorm": (lambda: two(lambda m, x: m.norm(m.b(x) + 1.0), nn.RMSNorm(6)), {}),
    # LayerNorm subtracts anything constant across features.
    "a constant added before LayerNorm": (
        lambda: two(lambda m, x: m.norm(m.b(x) + 1.0), nn.LayerNorm(6)),
        {"b.weight": ()},
    ),
    "division by a constant": (lambda: two(lambda m, x: m.norm(m.b(x) / 3.0)), B),
    "a concatenation": (lambda: two(lambda m, x: m.norm(torch.cat([m.a(x), m.b(x)], 1)), nn.BatchNorm1d(12)), BOTH),
    "a concatenation before LayerNorm": (
        lambda: two(lambda m, x: m.norm(torch.cat([m.a(x), m.b(x)], 1)), nn.LayerNorm(12)),
        {},
    ),
    "a concatenation before a layer": (
        lambda: two(lambda m, x: m.norm(m.b(torch.cat([m.a(x)[:, :3], x[:, 3:]], 1)))),
        B,
    ),
    "an output that bypasses the norm": (lambda: two(lambda m, x: (lambda y: (m.norm(y), y))(m.b(x))), {}),
    "a second use that bypasses the norm": (lambda: two(lambda m, x: (lambda y: m.norm(y) + y.mean())(m.b(x))), {}),
    # The check uses gradients, like training.
    "a second use without a gradient": (lambda: two(lambda m, x: (lambda y: m.norm(y) + y.mean().item())(m.b(x))), B),
    "two norms": (lambda: two(lambda m, x: (lambda y: m.norm(y) + F.normalize(y))(m.b(x))), {"b.weight": ()}),
    "one weight before two norms": (lambda: two(lambda m, x: m.norm(m.b(m.norm(m.b(x))))), B),
    "one weight before and after a norm": (lambda: two(lambda m, x: m.b(m.norm(m.b(x)))), {}),
    "a transposed weight matrix": (
        lambda: Graph(lambda m, x: m.norm(x @ m.w), w=torch.randn(6, 4), norm=nn.BatchNorm1d(4)),
        {"w": (1,)},
    ),
    "normalized class weights": (
        lambda: Graph(lambda m, x: F.linear(F.normalize(x), F.normalize(m.w)), w=torch.randn(4, 6)),
        {"w": (0,)},
    ),
    "normalized class weights and features": (
        lambda: Graph(lambda m, x: F.normalize(m.a(x)) @ F.normalize(m.w).T, a=linear(), w=torch.randn(4, 6)),
        {"w": (0,), "a.weight": ()},
    ),
    "a norm with fixed statistics": (lambda: two(lambda m, x: m.norm(m.b(x)), nn.BatchNorm1d(6).eval()), {}),
    # Functions that are not homogeneous because of a constant
    "padding with ones": (lambda: two(lambda m, x: m.norm(F.pad(m.b(x), (1, 1), value=1.0)), nn.LayerNorm(8)), {}),
    # Homogeneous except at the threshold, so that the gradient is tangent to the sphere.
    "a threshold above zero": (
        lambda: two(lambda m, x: m.norm(F.threshold(m.b(x), 0.1, 0.0)), nn.LayerNorm(6)),
        {"b.weight": ()},
    ),
    "a threshold with another value": (
        lambda: two(lambda m, x: m.norm(F.threshold(m.b(x), 0.1, 0.2)), nn.LayerNorm(6)),
        {},
    ),
    "maximum with a constant": (
        lambda: two(lambda m, x: m.norm(torch.max(m.b(x), torch.tensor(0.1))), nn.LayerNorm(6)),
        {},
    ),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_path_from_a_weight_must_end_in_a_norm(graph):
    build, expected = GRAPHS[graph]
    assert found_in(build(), torch.randn(8, 6)) == expected


# Layers that look like norms


class MyLayerNorm(nn.Module):
    """Not a norm, despite its name."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class MyShiftedLayerNorm(MyLayerNorm):
    """A norm, but of the sum of its input and a learned number."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + self.scale, (6,))


class Unseen(torch.autograd.Function):
    """A mean that no torch function computes, as in an extension written in C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        with torch._C.DisableTorchFunction():
            return x.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.shape) / ctx.shape.numel()


NOT_NORMS: dict[str, Callable[[], nn.Module]] = {
    "a norm in name only": MyLayerNorm,
    "a norm with an inner shift": MyShiftedLayerNorm,
    "a norm with fixed statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), torchvision.ops.FrozenBatchNorm2d(6)
    ),
    "a second use in opaque code": lambda: Graph(lambda m, x: m.norm(x) + Unseen.apply(x), norm=nn.LayerNorm(6)),
}


@pytest.mark.parametrize("layer", NOT_NORMS)
def test_a_layer_that_only_resembles_a_norm_does_not_make_weights_scale_invariant(layer):
    model = Graph(
        lambda m, x: (m.layer(m.suspect(x)), m.norm(m.invariant(x))),
        layer=NOT_NORMS[layer](),
        suspect=linear(),
        invariant=linear(),
        norm=nn.LayerNorm(6),
    )
    found = find_scale_invariant_weights(model, torch.randn(8, 6))
    assert found.channel_dims == {"invariant.weight": ()}
    assert "not 0" in found.rejected["suspect.weight"]


class TinyToken(nn.Module):
    """A token concatenated with others, like the class token of DeiT-III, which is initialized at scale 1e-6."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(1e-6 * torch.randn(1, 1, 64))
        self.norm, self.linear, self.last = nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.last(x + self.linear(self.norm(x)))


@pytest.mark.parametrize("seed", range(20))
def test_a_single_group_is_not_scale_invariant_by_chance(seed):
    """One check passes by chance in about 1 of 100 cases; a token embedding of one token has one group."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(20, 512), nn.Linear(512, 512, bias=False), nn.GELU())
    assert found_in(model, torch.zeros(4, 1, dtype=torch.long)) == {}


WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Dims]] = {
    "a nearly zero weight": (TinyToken, (4, 3, 64), {}),
    # In many dimensions, independent random directions are nearly orthogonal.
    "a large matrix": (lambda: nn.Sequential(nn.Linear(2048, 2048, bias=False), MyLayerNorm(2048)), (8, 2048), {}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_check_is_reliable_in_whole_models(name):
    build, shape, expected = WHOLE[name]
    assert found_in(build(), torch.randn(shape)) == expected


def test_batch_norms_are_checked_in_training_mode_unless_one_is_in_evaluation_mode_which_is_named(caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    assert found_in(model, torch.randn(8, 4)) == {"0.weight": (0,)}
    assert not caplog.text
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 2))
    assert found_in(model, torch.randn(8, 4)) == {}
    assert "batch norm 1 is in evaluation mode, and weights before it are not scale-invariant" in caplog.text


class KeepsFeatures(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        self.features = super().forward(inputs)
        return self.features


def test_a_model_that_keeps_its_features_is_checked_after_a_forward_pass():
    model = KeepsFeatures(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    images = torch.randn(8, 4)
    model(images)
    assert set(find_scale_invariant_weights(model, images).channel_dims) == {"0.weight"}
    assert model.features.requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_model_with_the_weight_norm_of_hooks_is_checked():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), torch.nn.utils.weight_norm(nn.Linear(6, 2)))
    assert "0.weight" in find_scale_invariant_weights(model, torch.randn(8, 4)).channel_dims
