"""Muon and the optimizers whose steps are a fixed share of the norm of a weight."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from architectures import TOKENS, Net, net, train
from steps import give_gradients
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from hf_sphere.optim import AdamWHyperball, Muon, MuonHyperball, build_optimizer
from hf_sphere.optim.optimizers.adamw_hyperball import hyperball
from hf_sphere.optim.roles import Role, find_roles

HYPERBALL = ["muon_hyperball", "adamw_hyperball"]
NAMES = ["muon", *HYPERBALL]


def rules(model: nn.Module, kind: type, **options: object) -> dict[str, str]:
    groups = kind.form_groups(model, TOKENS, **options)
    return {name: rule.name for name, rule in groups.rules.items()}


def test_parameters_that_the_model_does_not_decay_are_no_hidden_matrices():
    class Biased(Net):
        def no_weight_decay(self) -> set[str]:
            return {"hidden.weight"}

    model = Biased()
    assert find_roles(model, TOKENS)["hidden.weight"] is Role.LISTED
    assert rules(model, Muon)["hidden.weight"] == "adamw"
    (group,) = (g for g in Muon.form_groups(model, TOKENS) if "hidden.weight" in dict(g["params"]))
    assert group["weight_decay"] == 0


def test_every_tensor_has_the_rule_that_suits_it():
    found = rules(net(), Muon)
    assert list(found) == [name for name, _ in net().named_parameters()]
    assert {name for name, rule in found.items() if rule == "muon"} == {"conv.weight", "hidden.weight"}
    found |= rules(net(), Muon, rules={"*.weight": "adamw", "hidden.*": "muon"})
    assert {name for name, rule in found.items() if rule == "muon"} == {"hidden.weight"}
    assert set(found.values()) == {"muon", "adamw"}
    found = rules(net(), MuonHyperball)
    assert (found["conv.weight"], found["hidden.weight"]) == ("muon_hyperball", "muon")
    assert found["embedding.weight"] == found["output.weight"] == "adamw"
    found = rules(net(), AdamWHyperball, hyperball_on="matrices")
    assert {name for name, rule in found.items() if rule == "adamw_hyperball"} == {"conv.weight", "hidden.weight"}


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "both": lambda model: nn.DataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [Muon, MuonHyperball, AdamWHyperball])
def test_the_groups_of_a_wrapped_model_are_those_of_the_model(kind, wrapper):
    assert rules(WRAPPERS[wrapper](net()), kind) == rules(net(), kind)


def test_the_printed_groups_name_rule_and_reason_of_every_tensor():
    lines = str(MuonHyperball.form_groups(net(), TOKENS)).splitlines()
    by_name = {line.split()[0]: line for line in lines}
    assert len(lines) == len(list(net().parameters()))
    assert by_name["conv.weight"].endswith("8 x 6 x 3  muon_hyperball  hidden matrix; scale-invariant")
    assert "muon            hidden matrix; not scale-invariant: <w, dL/dw> is" in by_name["hidden.weight"]
    assert by_name["norm.bias"].endswith("adamw           bias, norm or scalar: no weight decay")


def test_the_printed_groups_have_one_line_for_equal_layers():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    lines = str(MuonHyperball.form_groups(model, torch.randn(2, 4), hyperball_on="matrices")).splitlines()
    assert [line.split("  ")[0] for line in lines][:2] == ["0.weight", "*.weight (2)"]
    assert lines[1].endswith("4 x 4  muon_hyperball  hidden matrix; by hyperball_on")
    assert [line.split("  ")[0] for line in lines][-2:] == ["*.bias (3)", "3.bias"]


def test_muon_equals_the_muon_and_adamw_of_torch():
    ours, theirs = nn.Linear(6, 9), nn.Linear(6, 9)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([{"params": [ours.weight], "muon": True}, {"params": [ours.bias]}], **options)
    references = [
        torch.optim.Muon([theirs.weight], adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW([theirs.bias], **options),
    ]
    for step in range(20):
        give_gradients(ours.parameters(), step)
        give_gradients(theirs.parameters(), step)
        for optimizer in (muon, *references):
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-6)


KERNELS = [nn.Conv1d(6, 1, 5), nn.Conv2d(5, 8, 3), nn.Conv2d(5, 8, 3).to(memory_format=torch.channels_last)]


@pytest.mark.parametrize("layer", [*KERNELS, nn.Conv3d(2, 4, 3)])
def test_muon_updates_kernels_of_any_layout_and_number_of_axes_as_matrices(layer):
    kernel = copy.deepcopy(layer).weight
    rows, options = nn.Parameter(kernel.detach().flatten(1).clone()), {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([{"params": [kernel], "muon": True}], **options)
    reference = torch.optim.Muon([rows], adjust_lr_fn="match_rms_adamw", **options)
    for step in range(10):
        give_gradients([kernel], step)
        rows.grad = kernel.grad.flatten(1)
        muon.step()
        reference.step()
    torch.testing.assert_close(kernel.flatten(1), rows, rtol=0, atol=1e-6)


def test_the_fast_step_follows_the_rule():
    weight = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, weight.grad = weight.detach().clone(), gradient
    AdamWHyperball([{"params": [weight], "hyperball": True}], lr=0.3).step()
    update = -gradient / (gradient.abs() + 1e-8)  # the first step of Adam
    torch.testing.assert_close(weight.detach(), hyperball(before, update, before.norm(), lr=0.3), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("kind", "group"), [(AdamWHyperball, {}), (MuonHyperball, {"muon": True, "ns_steps": 2})])
def test_norms_are_constant_and_no_small_step_is_lost(kind, group, dtype, tolerance):
    torch.manual_seed(0)
    weight, gradient = nn.Parameter(torch.randn(32, 64).to(dtype)), torch.randn(32, 64).to(dtype)
    optimizer = kind([{"params": [weight], "hyperball": True, **group}], lr=5e-4, weight_decay=0.1)
    first, norms = weight.detach().double(), []
    for _ in range(200):
        weight.grad = gradient.clone()
        optimizer.step()
        norms.append(weight.detach().double().norm())
    assert (torch.stack(norms) / first.norm() - 1).abs().max() < tolerance
    angle = torch.cosine_similarity(weight.detach().double().flatten(), first.flatten(), dim=0).arccos()
    assert angle == pytest.approx(200 * 5e-4, rel=0.2)  # round to nearest would lose every step of bfloat16


def test_a_state_that_torch_has_flattened_is_continued():
    before, after = net(), net()
    optimizers = [build_optimizer(model, "muon_hyperball", TOKENS, lr=0.1) for model in (before, after)]
    for model, optimizer in zip((before, after), optimizers, strict=True):
        train(model, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(after, optimizers[1], options=options)
    assert isinstance(state["state.conv.weight.radius"], float)
    set_optimizer_state_dict(after, optimizers[1], state, options=options)
    for model, optimizer in zip((before, after), optimizers, strict=True):
        train(model, optimizer, 2)
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_other_parameters_have_the_scaled_learning_rate(name):
    optimizer = build_optimizer(net(), name, TOKENS, lr=0.01, adamw_lr_scale=0.1)
    rates = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert rates["output.weight"] == rates["norm.bias"] == pytest.approx(0.001)
    assert rates["conv.weight"] == 0.01


MOMENTA = {"base_momentum": 0.5, "max_momentum": 0.8}
SCHEDULES = {
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=8, **MOMENTA),
    "CyclicLR": partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.01, step_size_up=3, **MOMENTA),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_a_scheduler_cycles_the_rate_and_the_momentum_of_hidden_matrices_unless_it_cycles_none(name, schedule):
    model, other = net(), net()
    optimizer, by_hand = (build_optimizer(each, name, TOKENS, lr=0.01) for each in (model, other))
    scheduler = SCHEDULES[schedule](optimizer)
    for _ in range(5):
        for group, theirs in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
            group |= {"lr": theirs["lr"], "betas": theirs["betas"], "momentum": theirs["betas"][0]}
        train(model, optimizer, 1)
        train(other, by_hand, 1)
        scheduler.step()
    torch.testing.assert_close([*model.parameters()], [*other.parameters()], rtol=0, atol=0)
    assert {group["momentum"] for group in optimizer.param_groups if group.get("muon")} != {0.95}
    optimizer = build_optimizer(model := net(), "muon", TOKENS, lr=0.01)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8, cycle_momentum=False)
    train(model, optimizer, 1)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.95}


def test_a_failing_step_leaves_the_weights(monkeypatch):
    model = net()
    optimizer = build_optimizer(model, "adamw_hyperball", TOKENS)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(torch.optim.AdamW, "step", _fail)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    assert torch.equal(model.conv.weight, before["conv.weight"])


def _fail(*_: object) -> None:
    raise KeyboardInterrupt


ALONE = r"^no weight of Sequential has the rule .*_hyperball, so the optimizer is .* for the reasons\.$"
DEEP = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    [
        ("muon_hyperball", DEEP, {}, ALONE),
        ("adamw_hyperball", DEEP, {}, ALONE),
        ("muon", DEEP[4], {}, "no weight of Linear has the rule muon, so the optimizer is adamw"),
        ("muon_hyperball", DEEP[4], {"hyperball_on": "matrices"}, r"is adamw\. Print \S+ for the reasons\.$"),
    ],
)
def test_a_model_without_matrices_for_the_rule_is_warned_about_with_the_rules_in_use(name, model, options, message):
    with pytest.warns(UserWarning, match=message):
        build_optimizer(model, name, **options)


def test_a_weight_of_norm_zero_does_not_keep_it():
    model = net()
    nn.init.zeros_(model.conv.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = MuonHyperball.form_groups(model, TOKENS)
    assert groups.rules["conv.weight"].name == "muon"
    assert groups.rules["conv.weight"].reason.endswith("its norm is 0")


def step_of(kind: type, weight: Tensor, **options: object) -> None:
    weight = nn.Parameter(weight)
    weight.grad = torch.ones_like(weight)
    kind([{"params": [("w", weight)], **options}]).step()


@pytest.mark.parametrize(("kind", "rule"), [(Muon, "muon"), (AdamWHyperball, "hyperball")])
def test_a_flattened_weight_is_an_error(kind, rule):
    with pytest.raises(RuntimeError, match=r"w of shape \[6\] is no matrix or kernel; FSDP1 and DeepSpeed flatten"):
        step_of(kind, torch.ones(6), **{rule: True})


def by_pattern(patterns: dict[str, str]) -> torch.optim.Optimizer:
    return build_optimizer(net(), "muon", TOKENS, rules=patterns)


def load(other: torch.optim.Optimizer) -> None:
    build_optimizer(net(), "muon_hyperball", TOKENS).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_optimizer(net(), "adam", rules={"*": "adamw"}), "optimizer adam has no option rules"),
        (lambda: Muon(net().parameters(), maximize=True), "Muon does not support maximize; omit it"),
        (lambda: AdamWHyperball(net().parameters(), amsgrad=True), "AdamWHyperball does not support amsgrad"),
        (lambda: build_optimizer(net(), "shampoo"), "the optimizer must be one of adam, .*muon.*; got 'shampoo'"),
        (lambda: build_optimizer(net(), "muon", TOKENS, beta=1), "muon has no option beta; its options are: .*lr"),
        (lambda: build_optimizer(net(), "muon", TOKENS, decoupled_weight_decay=True), "no option decoupled"),
        (
            lambda: build_optimizer(net(), "muon_hyperball", TOKENS, hyperball_on="all"),
            "hyperball_on must be one of scale_invariant, matrices; got 'all'",
        ),
        (lambda: by_pattern({"attention.*": "adamw"}), r"'attention\.\*' of rules matches no parameter"),
        (lambda: by_pattern({"*.bias": "muon"}), r"'\*\.bias' of rules matches no parameter with two or more axes"),
        (
            lambda: by_pattern({"conv.*": "sgd"}),
            r"the rule of pattern 'conv\.\*' must be one of muon, adamw; got 'sgd'",
        ),
        (lambda: build_optimizer(net(), "muon", TOKENS, momentum=1.0), r"momentum must be a number in \[0, 1\)"),
        (lambda: build_optimizer(net(), "muon", TOKENS, adamw_lr_scale=-1.0), "adamw_lr_scale must be a number"),
        (lambda: load(build_optimizer(net(), "muon", TOKENS)), "hyperball of parameter group 0 is None in the"),
        (lambda: step_of(AdamWHyperball, torch.zeros(2, 3), hyperball=True), r"w has the norm 0\.0, which cannot"),
    ],
)
def test_wrong_names_and_options_are_errors(call: Callable, message):
    with pytest.raises(ValueError, match=message):
        call()
