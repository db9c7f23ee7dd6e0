"""Optimizers by name, with the parameter groups that suit them, for the recipes and transformers' Trainer."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import str_to_bool
from torch import nn

from hf_sphere.optim.groups import NamedOptimizer, parameter_groups
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.utils.checks import check_choice, check_names
from hf_sphere.utils.modules import unwrap

TORCH: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def build_optimizer(
    model: nn.Module, name: str, batch: Any = None, *, lr_scales: Mapping[str, float] | None = None, **options: Any
) -> torch.optim.Optimizer:
    """Build an optimizer with its parameter groups.

    Weight decay applies to weights with two or more axes, not to norms, biases and scalars. Parameters with options in
    the `parameter_options() -> {name: options}` of the model or a part, such as a head, form separate groups. The
    optimizers of this library find the scale-invariant weights or the hidden matrices; their `form_groups(model)`
    shows the rule of each tensor and why.

    Args:
        model: Any module, before it is sharded.
        name: `adam`, `adamw` or `sgd` of torch, or an optimizer of this library: `adam_s`, `adam_srt`, `adam_g`,
            `sgd_mrt`, `muon`, `muon_hyperball`, `adamw_hyperball`.
        batch: Input of the model, for finding those weights; generated if None. See `find_scale_invariant_weights`.
        lr_scales: Learning rates of parameters relative to their groups, by name; 1 for others.
        **options: Options of the optimizer, such as `lr` and `weight_decay`, and of its groups. These are, for `muon`
            and the `_hyperball` ones, `adamw_lr_scale`, the learning rate of AdamW relative to `lr`, and `rules`, a
            mapping from patterns of parameter names to rules, such as `{"*.embed*": "adamw"}`; `hyperball_on`,
            whether `scale_invariant` weights or all hidden `matrices` keep their norm; `separate`, whether experts in
            a stack and fused queries, keys and values are separate matrices; and `base_width` and `base_layers` of the
            model on which `lr` was tuned, by which it is scaled for this one. Pass schedules that set learning rates,
            such as `OneCycleLR`, one per group: a single one would replace `adamw_lr_scale` and `lr_scales`.

    Raises:
        ValueError: If the name or an option is unknown, a pattern or a name of `lr_scales` matches no parameter, or no
            input of the model could be generated.

    Example:
        >>> optimizer = build_optimizer(network, "muon", images, lr=2e-3, weight_decay=0.01)
    """
    check_choice("the optimizer", name, [*TORCH, *optimizer_names()])
    model = unwrap(model)
    kind: Any = TORCH.get(name) or optimizer_class(name)
    valid = option_defaults(name)
    check_names(f"optimizer {name}", options, valid)
    if name in TORCH:
        groups: list[dict[str, Any]] = parameter_groups(model, batch=batch)
    else:
        groups = kind.form_groups(model, batch, **kind.take_group_options(options))
    if lr_scales is not None:
        if unknown := sorted(set(lr_scales) - {name for name, _ in model.named_parameters()}):
            raise ValueError(f"lr_scales names parameters that the model lacks: {', '.join(unknown)}.")
        lr, divided = options.get("lr", valid["lr"]), dict[tuple[int, float], dict[str, Any]]()
        for index, group in enumerate(groups):
            for param_name, parameter in group["params"]:
                scale = lr_scales.get(param_name, 1.0)
                scaled = {**group, "lr": group.get("lr", lr) * scale, "params": []}
                divided.setdefault((index, scale), scaled)["params"].append((param_name, parameter))
        # Those with the rate `lr` come first, since the first group's rate is shown.
        groups = sorted(divided.values(), key=lambda group: group["lr"] != lr)
    has_kernel = options.get("foreach") is not None or options.get("differentiable")
    if "fused" in valid and not has_kernel:  # a fused kernel per step where torch supports it, with the same rule
        kinds = ("cpu", "cuda")
        fits = all(p.device.type in kinds and p.is_floating_point() for group in groups for _, p in group["params"])
        options.setdefault("fused", fits)
    nesterov = options.pop("nesterov", False) if name == "sgd" else False
    for group in groups:
        if "momentum" not in valid:
            group.pop("momentum", None)
        elif name == "sgd":  # torch does not accept Nesterov momentum of 0
            group.setdefault("nesterov", nesterov and group.get("momentum", options.get("momentum", 0.0)) > 0)
    return kind(groups, **options)


def option_defaults(name: str) -> dict[str, Any]:
    """Return the options of an optimizer and of its groups with their defaults."""
    if name in TORCH:
        parameters = inspect.signature(TORCH[name]).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}
    kind = optimizer_class(name)
    return {**kind.option_defaults(), **kind.group_options}


def optimizer_for_trainer(context: Any) -> tuple[type[NamedOptimizer], dict[str, Any]]:
    """Return class and arguments of an optimizer, with groups, from transformers' `OptimizerContext`."""
    name = context.args.optim.value
    kind = optimizer_class(name)
    supported = kind.option_defaults()
    options = {**context.optimizer_kwargs, "weight_decay": context.args.weight_decay}
    options |= {key: value for key, value in context.adam_kwargs.items() if key in supported}
    # `optim_args` are texts, parsed by the types of the defaults; the default None marks a boolean option.
    known = {k: v for k, v in {**supported, **kind.group_options}.items() if k not in ("channel_dims", "rules")}
    if "betas" in known:
        known["beta1"], known["beta2"] = known.pop("betas")
    check_names(f"optim_args of {name}", context.optim_args, sorted(known))
    for key, text in context.optim_args.items():
        parse = type(known[key])
        options[key] = parse(text) if parse in (float, int, str) else bool(str_to_bool(text))
    of_groups = kind.take_group_options(options)
    if "betas" in supported:
        betas = options.pop("betas", supported["betas"])
        options["betas"] = (options.pop("beta1", betas[0]), options.pop("beta2", betas[1]))
    if context.model is not None:
        context.model.train()  # as the Trainer does later; a part from `from_pretrained` is in evaluation mode
        options["params"] = kind.form_groups(context.model, **of_groups)
    return kind, options
