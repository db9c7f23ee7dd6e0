from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hf_sphere.optim import find_scale_invariant_weights

Dims = dict[str, tuple[int, ...]]


def found_in(model: nn.Module, batch: Any = None) -> Dims:
    return find_scale_invariant_weights(model, batch).channel_dims


# Individual norms


V = "parametrizations.weight.original1"
FIRST, SECOND, ALL = {"0.weight": (0,)}, {"0.weight": (1,)}, {"0.weight": ()}
CHAINS: dict[str, tuple[list[nn.Module], Dims]] = {
    "linear, BatchNorm1d": ([nn.Linear(6, 4), nn.BatchNorm1d(4)], FIRST),
    "Conv1d, BatchNorm1d": ([nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4)], FIRST),
    "Conv2d, BatchNorm2d": ([nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)], FIRST),
    "Conv3d, BatchNorm3d": ([nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4)], FIRST),
    "transposed convolution": ([nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4)], SECOND),
    "depthwise convolution": ([nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)], FIRST),
    "grouped convolution": ([nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)], FIRST),
    "one filter": ([nn.Conv2d(6, 1, 3), nn.BatchNorm2d(1)], ALL),
    "GroupNorm with one group": ([nn.Conv2d(6, 4, 3, bias=False), nn.GroupNorm(1, 4)], ALL),
    "GroupNorm with one group per channel": ([nn.Conv2d(6, 4, 3), nn.GroupNorm(4, 4)], FIRST),
    "GroupNorm after a bias": ([nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4)], {}),
    "LayerNorm": ([nn.Linear(6, 4, bias=False), nn.LayerNorm(4)], ALL),
    "LayerNorm after a bias": ([nn.Linear(6, 4), nn.LayerNorm(4)], {}),
    "RMSNorm": ([nn.Linear(6, 4, bias=False), nn.RMSNorm(4)], ALL),
    "weight norm": ([weight_norm(nn.Conv2d(6, 4, 3))], {f"0.{V}": (0,)}),
    "weight norm, then batch norm": ([weight_norm(nn.Conv2d(6, 4, 3)), nn.BatchNorm2d(4)], {f"0.{V}": (0,)}),
    "LayerNorm over the width": ([nn.Conv2d(6, 4, 3, bias=False), nn.LayerNorm(3)], FIRST),
    "ReLU between": ([nn.Conv2d(6, 4, 3, bias=False), nn.ReLU(), nn.LayerNorm((4, 3, 3))], ALL),
    "ReLU between, before BatchNorm": ([nn.Conv2d(6, 4, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(4)], FIRST),
    "ReLU after a bias": ([nn.Conv2d(6, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)], {}),
    "GELU between": ([nn.Conv2d(6, 4, 3, bias=False), nn.GELU(), nn.BatchNorm2d(4)], {}),
    "pooling and dropout between": (
        [nn.Conv2d(6, 4, 2, bias=False), nn.AvgPool2d(2), nn.Dropout2d(0.1), nn.BatchNorm2d(4)],
        FIRST,
    ),
    "no norm": ([nn.Conv2d(6, 4, 3, bias=False), nn.ReLU()], {}),
    # The second layer is invariant to the scale of the first as one group and to that of each of its own filters.
    "two layers before a norm": (
        [nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)],
        {"0.weight": (), "1.weight": (0,)},
    ),
    "batch norm without statistics, in evaluation": (
        [nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False).eval()],
        FIRST,
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_each_norm_determines_its_own_groups(chain):
    layers, expected = CHAINS[chain]
    axes = len(getattr(layers[0], "kernel_size", ()))
    assert found_in(nn.Sequential(*layers), torch.randn(8, 6, *[5] * axes)) == expected


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


def linear() -> nn.Linear:
    return nn.Linear(6, 6, bias=False)


BOTH, B, B_ALL = {"a.weight": (0,), "b.weight": (0,)}, {"b.weight": (0,)}, {"b.weight": ()}
GRAPHS: dict[str, tuple[Callable[[Graph, Tensor], Any], Dims, dict[str, Any]]] = {
    "a residual sum": (lambda m, x: m.norm(m.b(x) + x), {}, {}),
    "a sum of two weights": (lambda m, x: m.norm(m.a(x) + m.b(x)), {}, {}),
    "a sum of one weight with itself": (lambda m, x: m.norm(m.b(x) + m.b(x.flip(0))), B, {}),
    "a constant added before RMSNorm": (lambda m, x: m.norm(m.b(x) + 1.0), {}, {"norm": nn.RMSNorm(6)}),
    # LayerNorm subtracts anything constant across features.
    "a constant added before LayerNorm": (lambda m, x: m.norm(m.b(x) + 1.0), B_ALL, {"norm": nn.LayerNorm(6)}),
    "division by a constant": (lambda m, x: m.norm(m.b(x) / 3.0), B, {}),
    "a concatenation": (lambda m, x: m.norm(torch.cat([m.a(x), m.b(x)], 1)), BOTH, {"norm": nn.BatchNorm1d(12)}),
    "one before LayerNorm": (lambda m, x: m.norm(torch.cat([m.a(x), m.b(x)], 1)), {}, {"norm": nn.LayerNorm(12)}),
    "one before a layer": (lambda m, x: m.norm(m.b(torch.cat([m.a(x)[:, :3], x[:, 3:]], 1))), B, {}),
    "an output that bypasses the norm": (lambda m, x: (lambda y: (m.norm(y), y))(m.b(x)), {}, {}),
    "a second use that bypasses the norm": (lambda m, x: (lambda y: m.norm(y) + y.mean())(m.b(x)), {}, {}),
    # The check uses gradients, like training.
    "a second use without a gradient": (lambda m, x: (lambda y: m.norm(y) + y.mean().item())(m.b(x)), B, {}),
    "two norms": (lambda m, x: (lambda y: m.norm(y) + F.normalize(y))(m.b(x)), B_ALL, {}),
    "one weight before two norms": (lambda m, x: m.norm(m.b(m.norm(m.b(x)))), B, {}),
    "one weight before and after a norm": (lambda m, x: m.b(m.norm(m.b(x))), {}, {}),
    "a transposed weight matrix": (
        lambda m, x: m.norm(x @ m.w),
        {"w": (1,)},
        {"w": torch.randn(6, 4), "norm": nn.BatchNorm1d(4)},
    ),
    "normalized class weights": (
        lambda m, x: F.linear(F.normalize(x), F.normalize(m.w)),
        {"w": (0,)},
        {"w": torch.randn(4, 6)},
    ),
    "normalized class weights and features": (
        lambda m, x: F.normalize(m.a(x)) @ F.normalize(m.w).T,
        {"w": (0,), "a.weight": ()},
        {"w": torch.randn(4, 6)},
    ),
    "a norm with fixed statistics": (lambda m, x: m.norm(m.b(x)), {}, {"norm": nn.BatchNorm1d(6).eval()}),
    # Functions that are not homogeneous because of a constant
    "padding with ones": (lambda m, x: m.norm(F.pad(m.b(x), (1, 1), value=1.0)), {}, {"norm": nn.LayerNorm(8)}),
    # Homogeneous except at the threshold, so that the gradient is tangent to the sphere.
    "a threshold": (lambda m, x: m.norm(F.threshold(m.b(x), 0.1, 0.0)), B_ALL, {"norm": nn.LayerNorm(6)}),
    "one with another value": (lambda m, x: m.norm(F.threshold(m.b(x), 0.1, 0.2)), {}, {"norm": nn.LayerNorm(6)}),
    "maximum with a constant": (lambda m, x: m.norm(m.b(x).clamp_min(0.1)), {}, {"norm": nn.LayerNorm(6)}),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_path_from_a_weight_must_end_in_a_norm(graph):
    run, expected, parts = GRAPHS[graph]
    model = Graph(run, **{"a": linear(), "b": linear(), "norm": nn.BatchNorm1d(6), **parts})
    assert found_in(model, torch.randn(8, 6)) == expected


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


def test_nearly_zero_weights_and_large_matrices_are_not_scale_invariant():
    assert found_in(TinyToken(), torch.randn(4, 3, 64)) == {}
    # In many dimensions, independent random directions are nearly orthogonal.
    large = nn.Sequential(nn.Linear(2048, 2048, bias=False), MyLayerNorm(2048))
    assert found_in(large, torch.randn(8, 2048)) == {}


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


def test_a_model_is_checked_in_full_precision_where_tf32_is_allowed(monkeypatch):
    backends, seen = torch.backends, set[str]()
    operations = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda *_: seen.update(each.fp32_precision for each in operations))
    monkeypatch.setattr(backends, "fp32_precision", "tf32")  # as by TrainingArguments(tf32=True)
    before = [each.fp32_precision for each in operations]
    assert found_in(model, torch.randn(4, 3, 8, 8)) == FIRST
    assert seen == {"ieee"}
    assert [each.fp32_precision for each in operations] == before
