import math

import pytest
import torch
from torch import nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT
from hf_sphere.training import RecipeArguments
from hf_sphere.training.optimization import build_scheduler, check_optimizer_arguments, optimizer_from_arguments

PLATEAU = "reduce_lr_on_plateau"


def arguments(**options) -> RecipeArguments:
    return RecipeArguments(output_dir="out", **options)


ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
MULTISTEP = {"lr_scheduler_type": "multistep", "lr_milestones": [2, 4]}
STEP = {"lr_scheduler_type": "step", "lr_step_epochs": 3, "lr_gamma": 0.5}


WARM = {"warmup_epochs": 2.0}
FACTORS = [
    ({"lr_scheduler_type": "constant"}, {0.0: 1.0, 9.9: 1.0}),
    ({"lr_scheduler_type": "linear"}, {0.0: 1.0, 2.5: 0.75, 10.0: 0.0, 11.0: 0.0}),
    ({"lr_scheduler_type": "linear", **WARM}, {6.0: 0.5}),
    ({"lr_scheduler_type": "cosine"}, {0.0: 1.0, 2.5: 0.8535533905932737, 5.0: 0.5, 10.0: 0.0}),
    ({"lr_scheduler_type": "cosine", **WARM}, {2.0: 1.0, 6.0: 0.5}),
    (STEP, {2.99: 1.0, 3.0: 0.5, 6.5: 0.25}),
    (MULTISTEP, {1.99: 1.0, 2.0: 0.1, 3.99: 0.1, 4.0: 0.01}),
    (WARM, {0.0: 0.0, 0.5: 0.25, 2.0: 1.0}),
    ({**STEP, "warmup_epochs": 4.0}, {3.0: 0.75}),
]


def test_factor_matches_hand_computed_values():
    for options, factors in FACTORS:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
        (factor,) = build_scheduler(optimizer, arguments(num_train_epochs=10, **options), 100).lr_lambdas
        assert {e: factor(100 * e) for e in factors} == pytest.approx(factors, abs=1e-12), options


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    """Learning rate of each group at each of the next steps."""
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_schedule_counts_optimizer_steps():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    args = arguments(lr_scheduler_type="linear", num_train_epochs=2, warmup_epochs=0.5)
    seen = rates(build_scheduler(optimizer, args, steps_per_epoch=4), 9)
    expected = [0.0, 1.0, 2.0, 2 * 5 / 6, 2 * 4 / 6, 2 * 3 / 6, 2 * 2 / 6, 2 * 1 / 6, 0.0]
    assert [rate for (rate,) in seen] == pytest.approx(expected)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    seen = rates(build_scheduler(optimizer, arguments(lr_scheduler_type="cosine", num_train_epochs=1), 10), 10)
    assert seen[-1][0] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.9)))  # not zero


def test_plateau_decays_only_after_the_patience_without_improvement():
    for higher_is_better, patience, values, decays in (
        (True, 2, [0.5, 0.4, 0.4, 0.4], [0, 0, 0, 1]),
        (False, 2, [0.5, 0.6, 0.6, 0.6], [0, 0, 0, 1]),
        (True, 0, [0.1, 0.2, 0.3], [0, 0, 0]),
        (False, 0, [0.3, 0.2, 0.1], [0, 0, 0]),
    ):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        args = arguments(lr_scheduler_type=PLATEAU, lr_patience=patience, lr_gamma=0.1)
        scheduler = build_scheduler(optimizer, args, steps_per_epoch=4, higher_is_better=higher_is_better)
        for value, decay in zip(values, decays, strict=True):
            scheduler.step(value)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1**decay)


# Heads with a temperature


def with_head(head: str, **options) -> SphereVisionForImageClassification:
    options |= {"log_temperature": -2.773} if head == "arcface" else {}  # a learned one
    config = SphereVisionConfig(
        backbone="lenet5_bn", num_channels=1, image_size=8, embedding_dim=3, num_labels=4, head=head,
        head_kwargs=options,
    )  # fmt: skip
    return SphereVisionForImageClassification(config)


def test_the_temperature_follows_the_schedule_with_a_rate_of_its_own_and_has_no_nesterov_momentum():
    options = {"optim": "sgd", "learning_rate": 0.5, "momentum": 0.8, "nesterov": True}
    args = arguments(lr_scheduler_type=PLATEAU, lr_patience=0, lr_gamma=0.5, **options)
    optimizer = optimizer_from_arguments(with_head("vmf", temperature_lr=1e-3), args)
    scheduler = build_scheduler(optimizer, args, steps_per_epoch=4)
    for value in (0.5, 0.4):
        scheduler.step(value)
    found = {(*group["param_names"][-1:], group["lr"], group["nesterov"]) for group in optimizer.param_groups}
    assert ("head.log_temperature", 5e-4, False) in found
    assert {(rate, nesterov) for name, rate, nesterov in found if name != "head.log_temperature"} == {(0.25, True)}
    args = arguments(lr_scheduler_type="cosine", num_train_epochs=3, **options)
    optimizer = optimizer_from_arguments(with_head("vmf", temperature_lr=1e-3), args)
    for seen in rates(build_scheduler(optimizer, args, steps_per_epoch=2), 6):
        assert [min(seen) / max(seen), len({*seen})] == pytest.approx([2e-3, 2])
    optimizer = optimizer_from_arguments(with_head("vmf"), args)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    optimizer = optimizer_from_arguments(nn.Linear(2, 2), arguments(optim="sgd", momentum=0.0, nesterov=True))
    assert not any(group["nesterov"] for group in optimizer.param_groups)


@pytest.mark.parametrize("head", ["vmf", "cosine", "arcface", "hyperbolic"])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adam_srt", "sgd_mrt"])
def test_every_optimizer_updates_the_head_without_weight_decay_and_its_temperature_with_its_own_rate(head, name):
    own = {} if head == "hyperbolic" else {"temperature_lr": 1e-3}
    model = with_head(head, **own)
    before = {n: value.clone() for n, value in model.head.state_dict().items()}
    given = {"momentum": 0.8} if name.startswith("sgd") else {}
    optimizer = optimizer_from_arguments(model, arguments(optim=name, weight_decay=0.1, learning_rate=0.5, **given))
    groups = {n: group for group in optimizer.param_groups for n in group["param_names"]}
    assert set(groups) == {n for n, _ in model.named_parameters()}
    for parameter, group in groups.items():
        kept = parameter.startswith("head.") or model.get_parameter(parameter).ndim == 1
        assert group["weight_decay"] == (0.0 if kept else 0.1), parameter
        is_temperature = parameter == "head.log_temperature"
        assert group["lr"] == (1e-3 if is_temperature else 0.5)
        if given:
            assert group["momentum"] == (0.0 if is_temperature else 0.8)
        assert bool(given) == ("momentum" in group)
    for _ in range(2):
        model(torch.randn(8, 1, 8, 8), labels=torch.arange(8) % 4).loss.backward()
        optimizer.step()
    assert all(not torch.equal(value, before[n]) for n, value in model.head.named_parameters())


SPHERE = {"adam_s": AdamS, "adam_srt": AdamSRT, "adam_g": AdamG, "sgd_mrt": SGDMRT}


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize("name", SPHERE)
def test_sphere_optimizers_find_the_scale_invariant_weights_and_use_the_arguments_of_their_kind(name):
    of_kind = {"momentum": 0.7} if name == "sgd_mrt" else ADAM
    optimizer = optimizer_from_arguments(normalized(), arguments(optim=name, weight_decay=0.1, **of_kind))
    assert type(optimizer) is SPHERE[name]
    assert [(g["channel_dims"], g["param_names"]) for g in optimizer.param_groups] == [
        ((0,), ["0.weight"]),
        (None, ["3.weight"]),
        (None, ["0.bias", "1.weight", "1.bias", "3.bias"]),
    ]
    for group, decay in zip(optimizer.param_groups, (0.1, 0.1, 0.0), strict=True):
        assert group["weight_decay"] == decay
        assert group["momentum"] == 0.7 if name == "sgd_mrt" else (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)


def test_arguments_that_an_optimizer_does_not_use_are_errors():
    unused = {"sgd_mrt": {"nesterov": True}, "adam": {"momentum": 0.5}}
    unused |= {"adam_srt": {"adamw_lr_scale": 0.1}, "muon": {"hyperball_on": "matrices"}, "sgd": {"adam_beta1": 0.5}}
    for name, given in [*unused.items(), ("muon", {"nesterov": True})]:
        with pytest.raises(ValueError, match=f"{next(iter(given))} .* has no effect with optim {name}; leave it out"):
            check_optimizer_arguments(arguments(optim=name, **given))
    check_optimizer_arguments(arguments(optim="sgd", momentum=0.5, nesterov=True))
    check_optimizer_arguments(arguments(optim="muon_hyperball", momentum=0.95, adamw_lr_scale=0.1, adam_beta2=0.9))


SGD, BETAS = torch.optim.SGD, {"betas": (0.8, 0.95), "eps": 1e-6}
REFERENCES = [
    ({"optim": "sgd", "momentum": 0.0}, SGD, {}),
    ({"optim": "sgd", "momentum": 0.8, "nesterov": True}, SGD, {"momentum": 0.8, "nesterov": True}),
    ({"optim": "adam", **ADAM}, torch.optim.Adam, BETAS),
    ({"optim": "adamw", **ADAM}, torch.optim.AdamW, BETAS),
]


@pytest.mark.parametrize(("options", "kind", "theirs"), REFERENCES, ids=["sgd", "nesterov", "adam", "adamw"])
def test_steps_match_torch_with_the_same_settings(options, kind, theirs):
    models = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight], "weight_decay": 0.3}, {"params": [model.bias], "weight_decay": 0.0}]
        args = arguments(learning_rate=0.1, weight_decay=0.3, **options)
        optimizer = optimizer_from_arguments(model, args) if is_ours else kind(groups, lr=0.1, **theirs)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3) * (step + 1)).square().sum().backward()
            optimizer.step()
        models.append(model)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
