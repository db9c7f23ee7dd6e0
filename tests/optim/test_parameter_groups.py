import pytest
import torch
from torch import nn

from hf_sphere.optim import parameter_groups


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


def test_weights_have_weight_decay():
    model = Mixed()
    (decayed,) = [group for group in parameter_groups(model) if "weight_decay" not in group]
    assert names_in(decayed) == {"conv.weight", "linear.weight", "prototypes"}


def test_norms_biases_and_scalars_have_no_weight_decay():
    model = Mixed()
    (plain,) = [group for group in parameter_groups(model) if group.get("weight_decay") == 0.0]
    norms = {"norm.weight", "norm.bias", "layer_norm.weight", "layer_norm.bias"}
    assert names_in(plain) == norms | {"conv.bias", "linear.bias", "scale"}


def test_a_parameter_with_options_is_in_no_other_group():
    model = Mixed({"prototypes": {"lr": 1e-2}})
    groups = [names_in(group) for group in parameter_groups(model)]
    assert [group for group in groups if "prototypes" in group] == [{"prototypes"}]


def test_a_parameter_with_options_has_no_weight_decay_by_default():
    groups = parameter_groups(Mixed({"prototypes": {"lr": 1e-2}}))
    assert [group["weight_decay"] for group in groups if group.get("lr") == 1e-2] == [0.0]


def test_the_error_for_options_of_an_unknown_parameter_names_it():
    with pytest.raises(ValueError, match="parameters that the model lacks: temperature"):
        parameter_groups(Mixed({"temperature": {"lr": 1.0}}))


@pytest.mark.parametrize("own", [{}, {"conv.weight": {"lr": 1.0}}], ids=["plain", "with options"])
def test_frozen_parameters_are_omitted(own):
    model = Mixed(own)
    model.conv.requires_grad_(False)
    trained = set().union(*(names_in(group) for group in parameter_groups(model)))
    assert trained == {name for name, _ in model.named_parameters()} - {"conv.weight", "conv.bias"}


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(3, 1, 1))
        self.pos_embed = nn.Parameter(torch.ones(1, 4, 2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3, bias=False))
        self.thin = nn.Linear(2, 1, bias=False)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}


def test_temperatures_gains_and_excluded_parameters_have_no_weight_decay():
    decaying = {name for group in parameter_groups(Gains()) if "weight_decay" not in group for name in names_in(group)}
    assert decaying == {"normed.parametrizations.weight.original1", "thin.weight"}


def test_radial_weights_come_first_with_their_channel_dims():
    groups = parameter_groups(Mixed(), {"conv.weight": (0,), "linear.weight": ()})
    assert [(names_in(group), group.get("channel_dims")) for group in groups][:3] == [
        ({"conv.weight"}, (0,)),
        ({"linear.weight"}, ()),
        ({"prototypes"}, None),
    ]


def test_a_model_without_parameter_options_is_split_by_shape_only():
    groups = parameter_groups(nn.Linear(2, 3))
    assert [(names_in(group), group.get("weight_decay")) for group in groups] == [({"weight"}, None), ({"bias"}, 0.0)]
