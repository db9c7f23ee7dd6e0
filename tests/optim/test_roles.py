"""The roles of parameters in models of timm, transformers and torch."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from hf_sphere.optim import AdamSRT, Muon, MuonHyperball, parameter_groups
from hf_sphere.optim.roles import find_roles

REASONS = {
    "output": "output layer",
    "embedding": "embedding",
    "undecayed": "no weight decay|no_weight_decay",
    "thin": "one of its first two axes is 1",
    "stack": "the axes of its matrices are unknown",
    "unused": "role unknown",
    "hidden": "hidden matrix",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_roles_of_the_parameters_of_an_architecture(name):
    if name in ("Swin v2", "MaxViT") and Version(timm.__version__) < Version("1.0.31"):
        pytest.skip("timm below 1.0.31 lacks it, or decays other parameters")
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = architecture.build().train()
    expected = {name: architecture.role_of(name, weight) for name, weight in model.named_parameters()}
    muon, adamw = Muon.form_groups(model, architecture.batch), parameter_groups(model, batch=architecture.batch)
    for groups in (muon, adamw):
        decays = {name: group.get("weight_decay") != 0 for group in groups for name, _ in group["params"]}
        assert decays == {name: expected[name] != "undecayed" for name in decays}
    for parameter, rule in muon.rules.items():
        assert (parameter, rule.name) == (parameter, "muon" if expected[parameter] == "hidden" else "adamw")
        assert re.search(REASONS[expected[parameter]], rule.reason), parameter


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A model of parts that a function calls."""

    def __init__(self, function: Callable, **parts: Any) -> None:
        super().__init__()
        self.function = (function,)  # not a method
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part)

    def forward(self, *args: Any) -> Any:
        return self.function[0](self, *args)


def roles(model: nn.Module, batch: Any = X) -> dict[str, str]:
    """Role by name, "" for hidden matrices."""
    return {name: "" if role.is_matrix else role.value for name, role in find_roles(model, batch).items()}


def with_head(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))


PLAIN, NORM = "scale, bias, position or token: no weight decay", "bias, norm or scalar: no weight decay"
OUTPUT, UNKNOWN = "output layer", "role unknown: no operation of torch on it in a forward pass"


# Norms


@pytest.mark.parametrize("kind", [AdamSRT, MuonHyperball])
def test_a_scale_invariant_gain_is_not_on_the_sphere(kind):
    flat = nn.Flatten(1)
    shaped = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.RMSNorm([2, 3]), flat)
    model = nn.Sequential(shaped, nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2))
    groups = kind.form_groups(model, X)
    assert groups.rules["0.1.weight"].reason == NORM
    assert groups.rules["1.weight"].name in ("on the sphere", "muon_hyperball")


# Output layers


@dataclass
class Pair:
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("output", [lambda *both: both, Pair, lambda a, b: {"a": a, "rest": [b]}, torch.add])
def test_every_head_of_a_model_is_an_output_layer(output):
    model = Model(
        lambda m, x: output(m.a(m.hidden(x).tanh()), m.b(m.hidden(x).tanh())),
        hidden=nn.Linear(6, 6),
        a=nn.Linear(6, 3),
        b=nn.Linear(6, 3),
    )
    assert roles(model) == {"hidden.weight": "", "a.weight": OUTPUT, "b.weight": OUTPUT}


def test_a_head_by_the_weights_of_the_embedding_is_the_output_layer():
    model = Model(
        lambda m, ids: F.linear(m.hidden(m.embedding(ids)).tanh(), m.embedding.weight),
        embedding=nn.Embedding(9, 6),
        hidden=nn.Linear(6, 6),
    )
    assert roles(model, IDS) == {"embedding.weight": "embedding and output layer", "hidden.weight": ""}


HEADS = {
    "of a loss with a penalty of the features": lambda h, w: F.linear(h, w).logsumexp(1).mean() + h.square().mean(),
    "scaled by the norm of the features": lambda h, w: (
        F.linear(F.normalize(h), F.normalize(w)) * h.norm(dim=1)[:, None]
    ),
    "of sampled classes": lambda h, w: F.linear(h, w[torch.tensor([0, 2, 4])]),
    "of distances": torch.cdist,
    "with the features as another output": lambda h, w: (h @ w.T, h),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_without_module_is_the_output_layer(head):
    model = Model(lambda m, x: HEADS[head](m.hidden(x).tanh(), m.w), hidden=nn.Linear(6, 6), w=(9, 6))
    assert roles(model) == {"w": OUTPUT, "hidden.weight": ""}


# Parameters that belong to no module of torch


RAW = {
    "matrices": (lambda m, x: (x @ m.a).tanh() @ m.b, {"a": (6, 5), "b": (5, 3)}, X, {"a": "", "b": OUTPUT}),
    "scale and bias": (
        lambda m, x: m.head(x @ m.a * m.scale + m.bias),
        {"a": (6, 6), "scale": (4, 6), "bias": (4, 6), "head": nn.Linear(6, 3)},
        X,
        {"a": "", "scale": PLAIN, "bias": PLAIN, "head.weight": OUTPUT},
    ),
    "gain of a weight": (
        lambda m, x: m.head(F.linear(x, m.gain * F.normalize(m.a)).tanh()),
        {"a": (6, 6), "gain": (6, 1), "head": nn.Linear(6, 3)},
        X,
        {"a": "", "gain": PLAIN, "head.weight": OUTPUT},
    ),
    "a matrix beside a weight": (
        lambda m, x: m.head(m.a(x) * m.a.weight_scale[0]),
        {"a": nn.Linear(6, 6), "head": nn.Linear(6, 3)},
        X,
        {"a.weight": "", "a.weight_scale": PLAIN, "head.weight": OUTPUT},
    ),
    "queries": (
        lambda m, x: m.head(m.attention(m.queries.expand(4, -1, -1), x, x)[0].mean(1)),
        {"queries": (3, 6), "attention": nn.MultiheadAttention(6, 2, batch_first=True), "head": nn.Linear(6, 3)},
        SEQUENCE,
        {"queries": PLAIN, "attention.in_proj_weight": "", "attention.out_proj.weight": "", "head.weight": OUTPUT},
    ),
    "initial state": (
        lambda m, x: m.head(m.rnn(x, (m.start, m.start))[0].mean(1)),
        {"start": (1, 4, 5), "rnn": nn.LSTM(6, 5, batch_first=True), "head": nn.Linear(5, 3)},
        SEQUENCE,
        {"start": PLAIN, "rnn.weight_ih_l0": "", "rnn.weight_hh_l0": "", "head.weight": OUTPUT},
    ),
    "tables": (
        lambda m, ids: m.head(F.layer_norm(F.embedding(ids, m.tokens) + m.positions[torch.arange(5)], (6,))),
        {"tokens": (9, 6), "positions": (8, 6), "head": nn.Linear(6, 3)},
        IDS,
        {"tokens": "embedding", "positions": PLAIN, "head.weight": OUTPUT},
    ),
    "heads of attention": (
        lambda m, x: m.head(torch.einsum("bd,dhk->bhk", x, m.a).flatten(1)),
        {"a": (6, 2, 3), "head": nn.Linear(6, 3)},
        X,
        {"a": "the axes of its matrices are unknown", "head.weight": OUTPUT},
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_parameters_of_an_own_module_have_the_roles_of_their_operations(name):
    function, parts, batch, expected = RAW[name]
    model = Model(function, **copy.deepcopy(parts))
    if "a.weight_scale" in expected:
        model.a.weight_scale = nn.Parameter(torch.randn(6, 6))
    assert roles(model, batch) == expected


class LowRank(nn.Module):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return u @ v

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:, :2].clone(), weight[:2].clone()


def low_rank(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


PARAMETRIZED = {
    "weight_norm": (parametrizations.weight_norm, {"original0": NORM, "original1": ""}),
    "hooks of weight_norm": (torch.nn.utils.weight_norm, {"weight_g": PLAIN, "weight_v": ""}),
    "spectral_norm": (parametrizations.spectral_norm, {"original": ""}),
    "hooks of spectral_norm": (torch.nn.utils.spectral_norm, {"weight_orig": ""}),
    "orthogonal": (parametrizations.orthogonal, {"original": ""}),
    "low rank": (low_rank, {"original0": "", "original1": ""}),
    "pruned": (lambda layer: prune.random_unstructured(layer, "weight", 0.5), {"weight_orig": ""}),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated")
def test_parametrized_weights_are_hidden_matrices(name):
    wrap, expected = PARAMETRIZED[name]
    found = roles(with_head(wrap(nn.Linear(6, 6))))
    assert found.pop("2.weight") == OUTPUT
    assert {name.rpartition(".")[2]: role for name, role in found.items()} == expected


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (nn.Bilinear(6, 6, 6), (X, X)),
        (nn.Conv1d(7, 6, 3), SEQUENCE),
        (nn.Conv3d(2, 6, 3), torch.randn(2, 2, 4, 4, 4)),
        (nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 5, 5)),
        (nn.GRUCell(6, 6), X),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_of_torch_are_hidden_matrices(layer, batch):
    model = Model(
        lambda m, *inputs: m.head(m.layer(*inputs).reshape(len(inputs[0]), 6, -1).mean(2)),
        layer=layer,
        head=nn.Linear(6, 3),
    )
    found = roles(model, batch)
    assert found.pop("head.weight") == OUTPUT
    assert set(found.values()) == {""}


def test_activation_checkpointing_does_not_change_the_roles():
    model = Model(
        lambda m, x: m.head(checkpoint(m.hidden, x, use_reentrant=False).tanh()),
        hidden=nn.Linear(6, 6),
        head=nn.Linear(6, 3),
    )
    assert roles(model) == {"hidden.weight": "", "head.weight": OUTPUT}


# Roles that are unknown


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.mT @ x


UNDECIDED = {
    "not used": (
        lambda m, x: m.head(m.hidden(x).tanh()),
        {"a": (6, 6), "other": nn.Linear(6, 4)},
        {"a", "other.weight"},
    ),
    "by an own function": (lambda m, x: m.head(Product.apply(m.hidden(x), m.a)), {"a": (6, 6)}, {"a"}),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_weights_of_unknown_role_are_named(name, caplog):
    function, parts, expected = UNDECIDED[name]
    model = Model(function, hidden=nn.Linear(6, 6), head=nn.Linear(6, 3), **copy.deepcopy(parts))
    groups = Muon.form_groups(model, X)
    assert {name for name, rule in groups.rules.items() if rule.reason == UNKNOWN} == expected
    assert {groups.rules[name].name for name in expected} == {"adamw"}
    assert f"The role of {', '.join(sorted(expected))} is unknown" in caplog.text
    caplog.clear()
    Muon.form_groups(model, X, rules=dict.fromkeys(expected, "muon"))  # as the message says
    assert not caplog.text


def test_a_model_that_cannot_be_called_gets_weight_decay_on_what_is_unknown(caplog):
    model = nn.ModuleDict({"raw": Model(None, a=(6, 6)), "layer": nn.Linear(6, 6)})
    (decaying, _) = parameter_groups(model)
    assert [name for name, _ in decaying["params"]] == ["raw.a", "layer.weight"]
    assert "The role of raw.a is unknown" in caplog.text
    caplog.clear()
    parameter_groups(nn.ModuleDict({"layer": nn.Linear(6, 6), "norm": nn.LayerNorm([2, 3])}))  # their owners are known
    assert not caplog.text


def test_a_parameter_that_is_marked_as_in_mamba_does_not_decay():
    layer = nn.Linear(6, 6)
    layer.weight._no_weight_decay = True
    assert roles(with_head(layer))["0.weight"] == "in no_weight_decay() of the model"
