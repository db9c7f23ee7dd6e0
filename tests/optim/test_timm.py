import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import described
from fresh_python import run_fresh
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import nn

from hf_sphere.optim import AdamSRT, parameter_groups
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.optim.sphere_optimizer import SphereOptimizer

KINDS = {name.replace("_", ""): optimizer_class(name) for name in optimizer_names() if name != "muon"}
ON_THE_SPHERE = [name for name, kind in KINDS.items() if issubclass(kind, SphereOptimizer)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


INVARIANT = [
    ((0,), 0.1, ["conv.weight"]),
    (None, 0.1, ["head.weight"]),
    (None, 0.0, ["conv.bias", "norm.weight", "norm.bias", "head.bias"]),
]


@pytest.mark.parametrize("name", ON_THE_SPHERE)
def test_the_name_creates_the_class_with_scale_invariant_groups_and_the_settings_that_it_has(name):
    options = {"momentum": 0.8, "betas": (0.5, 0.6), "eps": 1e-3}
    optimizer = create_optimizer_v2(Net(), name, lr=0.5, weight_decay=0.1, foreach=True, **options)
    assert type(optimizer) is KINDS[name]
    assert described(optimizer) == INVARIANT
    group = optimizer.param_groups[0]
    own = ["momentum"] if name == "sgdmrt" else ["betas", "eps"]
    assert {key: group[key] for key in options if key in group} == {key: options[key] for key in own}
    assert (group["lr"], group["foreach"]) == (0.5, True)
    assert create_optimizer_v2(Net(), "adamsrt").param_groups[0]["lr"] == 1e-3


def test_lookahead_wraps_the_optimizer():
    optimizer = create_optimizer_v2(Net(), "lookahead_adamsrt", weight_decay=0.1)
    assert type(optimizer._base_optimizer) is AdamSRT
    assert described(optimizer) == INVARIANT


@pytest.mark.parametrize("name", KINDS)
def test_timm_lists_the_optimizer_with_a_description(name):
    described = dict(list_optimizers(with_description=True))
    assert described[name]
    assert get_optimizer_class(name) is KINDS[name]
    assert len({described[each] for each in KINDS}) == len(KINDS)
    assert get_optimizer_class("muon").__module__ == "timm.optim.muon"


# Arguments of the caller


def test_groups_of_the_caller_or_of_param_group_fn_are_kept():
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [model.conv.weight], "channel_dims": [0], "lr": 0.25}, {"params": [model.head.weight]}]

    model = Net()
    optimizer = create_optimizer_v2(model, "adamsrt", lr=0.5, weight_decay=0.1, param_group_fn=groups)
    assert [(g["channel_dims"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ((0,), 0.25, 0.1),
        (None, 0.5, 0.1),
    ]
    assert optimizer.param_groups[1]["params"] == [model.head.weight]
    optimizer = create_optimizer_v2(parameter_groups(Net(), {"conv.weight": (0,)}), "adamsrt", weight_decay=0.1)
    assert described(optimizer) == INVARIANT


PASSED: dict[str, Callable[[Net], Any]] = {
    "parameters": lambda model: model.parameters(),
    "named parameters": lambda model: model.named_parameters(),
    "groups": lambda model: [{"params": list(model.parameters())}],
}


@pytest.mark.parametrize("kind", PASSED)
def test_parameters_instead_of_a_model_pass_through(kind):
    model = Net()
    (group,) = create_optimizer_v2(PASSED[kind](model), "adamsrt", weight_decay=0.1).param_groups
    assert (group["channel_dims"], group["weight_decay"]) == (None, 0.1)
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:no weight of Net")
def test_options_of_the_groups_are_passed_on():
    optimizer = create_optimizer_v2(Net(), "muonhyperball", lr=0.1, adamw_lr_scale=0.5, rules={"*": "adamw"})
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


@pytest.mark.parametrize("name", [*KINDS, "lookahead_adamsrt"])
def test_the_error_for_layer_decay_suggests_an_alternative(name):
    message = f"{name} does not support layer_decay; use build_optimizer with lr_scales"
    with pytest.raises(ValueError, match=message):
        create_optimizer_v2(Net(), name, layer_decay=0.5)


# Optimizers of others

DESCRIBE = """
import timm, torch
from timm.optim import create_optimizer_v2, list_optimizers
torch.manual_seed(0)
model = timm.create_model("resnet18", num_classes=2)
for name in ("adamw", "sgd", "adam", "lookahead_adamw"):
    for options in ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "layer_decay": 0.5}):
        optimizer = create_optimizer_v2(model, name, lr=0.1, **options)
        for group in optimizer.param_groups:
            print(name, [tuple(p.shape) for p in group.pop("params")], sorted(map(str, group.items())))
from transformers.training_args import OptimizerNames
names = [name.value for name in OptimizerNames]
print(names[: names.index("adam_g")] if "adam_g" in names else names)
ours = ("adams", "adamsrt", "adamg", "sgdmrt", "adamwhyperball", "muonhyperball")
print([name for name in list_optimizers() if name not in ours])
"""


def test_optimizers_of_timm_and_their_names_in_transformers_are_unchanged(capsys):
    """Compared with a process that has not imported this library."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DESCRIBE]
    plain = run_fresh(command, capture_output=True, text=True, check=True, env=environment).stdout
    exec(DESCRIBE, {})
    assert plain.count("\n") > 12
    assert capsys.readouterr().out == plain
