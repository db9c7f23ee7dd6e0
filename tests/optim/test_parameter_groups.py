import math

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.losses import ArcFaceLoss
from hf_sphere.optim import build_optimizer, parameter_groups


class Mixed(nn.Module):
    """A module with one parameter of every kind."""

    def __init__(self, own: dict | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.layer_norm = nn.LayerNorm(2)
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.prototypes = nn.Parameter(torch.ones(3, 2))
        self.own = own or {}

    def parameter_options(self) -> dict:
        return self.own


def names_in(group: dict) -> set[str]:
    return {name for name, _ in group["params"]}


def test_only_weights_have_weight_decay():
    weights, others = parameter_groups(Mixed())
    assert names_in(weights) == {"conv.weight", "linear.weight", "prototypes"}
    assert "weight_decay" not in weights
    norms = {"norm.weight", "norm.bias", "layer_norm.weight", "layer_norm.bias"}
    assert names_in(others) == norms | {"conv.bias", "linear.bias", "scale"}
    assert others["weight_decay"] == 0.0


def test_scale_invariant_weights_come_first_and_parameters_with_options_have_groups_of_their_own():
    groups = parameter_groups(Mixed({"prototypes": {"lr": 1e-2}}), {"conv.weight": (0,), "linear.weight": ()})
    assert [(names_in(group), group["channel_dims"]) for group in groups[:2]] == [
        ({"conv.weight"}, (0,)),
        ({"linear.weight"}, ()),
    ]
    (own,) = (group for group in groups if "prototypes" in names_in(group))
    assert (names_in(own), own["lr"], own["weight_decay"]) == ({"prototypes"}, 1e-2, 0.0)


def test_options_of_an_unknown_parameter_are_an_error_that_names_it():
    with pytest.raises(ValueError, match="parameters that the model lacks: temperature"):
        parameter_groups(Mixed({"temperature": {"lr": 1.0}}))
    with pytest.raises(ValueError, match="lr_scales names parameters that the model lacks: typo"):
        build_optimizer(nn.Linear(2, 3), "adamw", lr_scales={"typo": 0.1, "weight": 0.5})


@pytest.mark.parametrize(("option", "value"), [("lr", -1e-3), ("lr", math.nan), ("weight_decay", -0.1)])
def test_options_of_a_parameter_that_are_below_zero_or_no_number_are_refused(option, value):
    with pytest.raises(ValueError, match=rf"{option} of prototypes must be a number in \[0, inf\); got {value}"):
        build_optimizer(Mixed({"prototypes": {option: value}}), "adamw")
    if option == "lr":
        with pytest.raises(ValueError, match="lr of weight must be a number in"):
            build_optimizer(nn.Linear(2, 3), "adamw", lr_scales={"weight": value})


def test_options_of_a_part_of_the_model_are_used():
    model = nn.Sequential(nn.Linear(4, 8), ArcFaceLoss(8, 3, scale="learned"))
    groups = {name: group for group in parameter_groups(model) for name in names_in(group)}
    assert groups["1.head.weight"]["weight_decay"] == 0.0
    assert groups["1.head.log_temperature"]["momentum"] == 0.0
    assert "weight_decay" not in groups["0.weight"]


@pytest.mark.parametrize("saved", [None, ["head"]], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("trainer", [Trainer, SphereTrainer])
@pytest.mark.parametrize("optim", ["adam_srt", "muon", "adamw_torch"])
@pytest.mark.filterwarnings("ignore:PeftModel has no scale-invariant weight")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT reads it
def test_an_image_model_with_adapters_is_trained_in_a_trainer(trainer, optim, saved, tmp_path):
    peft = pytest.importorskip("peft")
    options = {"head_kwargs": {"scale": "learned", "temperature_lr": 0.1}, "image_size": 160, "num_labels": 3}
    config = SphereVisionConfig(backbone="test_vit", head="arcface", **options)
    adapters = peft.LoraConfig(target_modules="all-linear", modules_to_save=saved)
    model = peft.get_peft_model(SphereVisionForImageClassification(config), adapters)
    args = TrainingArguments(
        tmp_path, optim=optim, max_steps=1, per_device_train_batch_size=4, report_to="none", save_strategy="no"
    )
    images = [{"pixel_values": torch.randn(3, 160, 160), "labels": i % 3} for i in range(4)]
    training = trainer(model, args, train_dataset=images)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    training.train()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert any("lora_B" in name for name in changed)
    assert any("head.modules_to_save" in name for name in changed) == (saved is not None)
    groups = training.optimizer.param_groups
    rates = [g["initial_lr"] for g in groups if any("log_temperature" in name for name in g.get("param_names", []))]
    has_options = saved and (trainer is SphereTrainer or optim != "adamw_torch")
    assert rates == ([0.1] if has_options else [])


@pytest.mark.parametrize("own", [{}, {"conv.weight": {"lr": 1.0}}], ids=["plain", "with options"])
def test_frozen_parameters_are_omitted(own):
    model = Mixed(own)
    model.conv.requires_grad_(False)
    trained = set().union(*(names_in(group) for group in parameter_groups(model)))
    assert trained == {name for name, _ in model.named_parameters()} - {"conv.weight", "conv.bias"}


@pytest.mark.parametrize("name", ["adam", "sgd", "adam_srt", "muon"])
def test_another_implementation_than_the_fused_one_can_be_chosen(name):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = build_optimizer(model, name, foreach=True)
    assert {(group["foreach"], bool(group["fused"])) for group in optimizer.param_groups} == {(True, False)}
    assert build_optimizer(model, "adamw", differentiable=True).defaults["differentiable"]
