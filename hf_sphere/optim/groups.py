"""Parameter groups: rules of single tensors, weight decay, per-parameter options; optimizers by name with groups."""

import inspect
import logging
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from hf_sphere.optim.invariance import find_scale_invariant_weights
from hf_sphere.optim.layout import ChannelDims
from hf_sphere.optim.optimizers import add_optimizer, optimizer_class, optimizer_names
from hf_sphere.optim.roles import Role, collect_parameter_options, find_roles
from hf_sphere.utils.checks import check_choice, check_names, check_number
from hf_sphere.utils.modules import unwrap

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """Name of the update rule of a tensor, why the tensor has it, and the options of its parameter group."""

    name: str
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    role: Role | None = None  # if the tensor has the rule because of it


class ParameterGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printed, they are a table of the tensors with their rules and the reasons."""

    rules: dict[str, Rule]

    def __str__(self) -> str:
        """Return a line per tensor, and one for those that differ only in a number of their name, such as a layer's."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, tensor in (pair for group in self for pair in group["params"]):
            shape, rule = " x ".join(map(str, tensor.shape)), self.rules[name]
            alike.setdefault((re.sub(r"\d+", "*", name), shape, rule.name, rule.reason), []).append(name)
        rows = [(n[0] if len(n) == 1 else f"{key[0]} ({len(n)})", *key[1:]) for key, n in alike.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}" for a, b, c, d in rows)


def scale_invariant_groups(model: nn.Module, batch: Any = None) -> ParameterGroups:
    """Split a model's trainable parameters into groups for the optimizers of this library.

    Scale-invariant weights get the `channel_dims` of their groups; other weights are ordinary. Norms, biases,
    scales, positions, tokens and parameters in the `no_weight_decay()` of the model or a part (as in timm) are ordinary
    and do not decay; `find_roles` describes how they are found. The groups contain named parameters.
    Each parameter in the `parameter_options() -> {name: options}` of the model or a part, if it has this method, gets a
    separate group with these options.

    Args:
        model: See `find_scale_invariant_weights`.
        batch: A batch of real data, if the generated input is not representative.

    Returns:
        Parameter groups; the scale-invariant ones first.

    Raises:
        ValueError: See `find_scale_invariant_weights`.

    Warns:
        UserWarning: If no weight is scale-invariant.

    Example:
        >>> optimizer = AdamSRT(scale_invariant_groups(network, images), lr=1e-3)
    """
    model = unwrap(model)
    invariant = find_scale_invariant_weights(model, batch)
    logger.info(invariant.summary())
    if not invariant.channel_dims:
        what = "has no scale-invariant weight, so the optimizer will be the ordinary one of torch"
        how = "Print find_scale_invariant_weights(model) for the reasons"
        warnings.warn(f"{type(model).__name__} {what}. {how}.", stacklevel=2)
    groups = parameter_groups(model, invariant.channel_dims, batch)
    for name, reason in invariant.rejected.items():
        rule = groups.rules.get(name)
        if rule and rule.role and rule.role.decays and rule.role is not Role.UNKNOWN:
            groups.rules[name] = Rule(rule.name, f"not scale-invariant: {reason}")
    return groups


def parameter_groups(
    model: nn.Module, channel_dims: Mapping[str, ChannelDims] | None = None, batch: Any = None
) -> ParameterGroups:
    """Split trainable parameters: scale-invariant and other weights, those without decay, and those with own options.

    Args:
        model: Any module; the method `parameter_options` of it or a part, if any, returns per-parameter options.
        channel_dims: Scale-invariant weights.
        batch: Input of the model, for parameters whose modules do not determine their roles; generated if None.

    Raises:
        ValueError: If `parameter_options` names a parameter that the model lacks.

    Example:
        >>> optimizer = torch.optim.AdamW(parameter_groups(network), lr=1e-3)
    """
    roles = find_roles(model, batch, required=False)
    rules = {
        name: Rule("on the sphere", "scale-invariant", {"channel_dims": dims})
        for name, dims in (channel_dims or {}).items()
        if name not in roles or roles[name].decays
    }
    return form_groups(model, rules, Rule("ordinary"), roles)


def form_groups(
    model: nn.Module, rules: Mapping[str, Rule], ordinary: Rule, roles: Mapping[str, Role]
) -> ParameterGroups:
    """Form the groups of the rules, then ordinary weights, those without decay, and those with separate options.

    Parameters without a rule, and those with separate options, are `ordinary`.
    """
    separate = collect_parameter_options(model)
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    used = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role, rule = roles.get(name, Role.NORM), rules.get(name)
        options, key = ordinary.options, (1, "") if role.decays else (2, "")
        if name in separate:
            rule = Rule(ordinary.name, "options of the model")
            options, key = {**options, "weight_decay": 0.0, **separate[name]}, (3, name)
        elif rule and rule.options != options:
            options, key = rule.options, (0, repr(rule.options))
        elif not role.decays:
            options = {**options, "weight_decay": 0.0}
        reason = "weight" if role.decays and role is not Role.UNKNOWN else role.value
        used[name] = rule or Rule(ordinary.name, reason, role=role)
        groups.setdefault(key, {"params": [], **options})["params"].append((name, parameter))
    by_dims = sorted(groups, key=lambda key: groups[key].get("channel_dims", ()), reverse=True)
    formed = ParameterGroups(map(groups.__getitem__, sorted(by_dims, key=itemgetter(0))))
    formed.rules = used
    if unknown := [name for name, rule in used.items() if rule.role is Role.UNKNOWN]:
        text = "The role of %s is unknown: no operation of torch uses it in a forward pass. It gets weight decay and "
        text += "the rule %s. Pass a batch that uses it, or choose by no_weight_decay() of its module or, for Muon, by "
        text += "rules."
        logger.warning(text, ", ".join(unknown), ordinary.name)
    return formed


class NamedOptimizer(Optimizer):
    """An optimizer that forms its parameter groups itself, with the optimizer of torch or timm that it extends."""

    name: ClassVar[str] = ""  # to register a class under that is defined outside of this library
    group_key: ClassVar[str]  # option of the groups whose tensors have the update rule of the optimizer
    own_defaults: ClassVar[dict[str, Any]] = {}  # of options that the optimizer of torch or timm lacks
    group_options: ClassVar[dict[str, Any]] = {}  # defaults of options of `form_groups`, also in `optim_args`
    unsupported: ClassVar[tuple[str, ...]] = ()  # options of the optimizer of torch or timm

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("name"):
            add_optimizer(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Loss scaling is left to GradScaler: it unscales the gradients and skips the step if they overflow.
        self._step_supports_amp_scaling = False
        groups = self.param_groups  # those with names come from form_groups, which issues its own warning
        if not any(g.get("param_names") or g.get(self.group_key) not in (None, False) for g in groups):
            text = "%s was given parameters without its groups, so every step is an ordinary step of torch. Pass it "
            text += "%s.form_groups(model), or use build_optimizer."
            logger.warning(text, *[type(self).__name__] * 2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: `params`, and options that differ from the defaults, such as `channel_dims`."""
        # torch's __init__ creates `defaults` and then calls this method for the first group.
        self.defaults.update(self.__dict__.pop("_own", {}))
        super().add_param_group(dict(param_group))  # torch changes it, and the caller may use it again
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def check_group(self, options: dict[str, Any]) -> None:
        """Raise a `ValueError` if an option of a group, with the defaults, is out of range or not supported."""
        for name in self.unsupported:
            if options.get(name):
                raise ValueError(f"{type(self).__name__} does not support {name}; omit it.")
        for name in {"lr", "weight_decay", "eps", "dampening", "momentum"} & options.keys():  # torch checks no groups
            check_number(name, float(options[name]), "[0, 1)" if name == "momentum" else "[0, inf)")
        for beta in options.get("betas", ()):
            check_number("betas", beta, "[0, 1)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer with the same groups, else raise a `ValueError`."""
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            for key in ("channel_dims", "muon", "hyperball", "matrices", "param_names"):
                before, now = (list(v) if isinstance(v := of.get(key), (list, tuple)) else v for of in (saved, group))
                if (key != "param_names" or (before and now)) and before != now:
                    what = f"{key} of parameter group {index} is {before} in the state and {now} in the optimizer"
                    raise ValueError(f"{what}. Build the optimizer with the groups that the state was saved with.")
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step without changing the gradients; return the loss of the closure, which evaluates the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """Take the step of the optimizer of torch or timm, without the hooks, which `step` calls."""
        inspect.unwrap(super(NamedOptimizer, type(self)).step)(self)

    @staticmethod
    def _names(group: dict[str, Any]) -> list[str]:
        return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]

    @classmethod
    def option_defaults(cls) -> dict[str, Any]:
        """Return the options of the constructor with their defaults, including those of torch's optimizer."""
        defaults: dict[str, Any] = dict(cls.own_defaults)
        for parent in reversed(cls.__mro__):
            if issubclass(parent, Optimizer) and not (parent is Adam and issubclass(cls, AdamW)):
                for option in inspect.signature(parent).parameters.values():
                    if option.default is not option.empty:
                        # torch has `weight_decay: float = 0`.
                        is_float = type(option.default) is int and option.annotation not in (int, "int")
                        defaults[option.name] = float(option.default) if is_float else option.default
        return {name: default for name, default in defaults.items() if name not in cls.unsupported}

    @classmethod
    def take_group_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Remove the options of `form_groups` from those of the optimizer, and return them."""
        taken = {name: options.pop(name) for name in cls.group_options if name in options}
        if "adamw_lr_scale" in cls.group_options:
            taken["lr"] = cls.option_defaults()["lr"] if options.get("lr") is None else options["lr"]
        return taken

    @classmethod
    @abstractmethod
    def form_groups(cls, *args: Any, **options: Any) -> ParameterGroups:
        """Split the trainable parameters of a model into groups with `group_options`; see `build_optimizer`."""


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
        for option in ("lr", "weight_decay"):  # torch does not check those of groups, and would train uphill
            check_number(f"{option} of {group['params'][0][0]}", float(group.get(option, 0.0)), "[0, inf)")
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
    from accelerate.utils import str_to_bool

    name = context.args.optim.value
    kind = optimizer_class(name)
    supported = kind.option_defaults()
    options = {**context.optimizer_kwargs, "weight_decay": context.args.weight_decay}
    options |= {key: value for key, value in context.adam_kwargs.items() if key in supported}
    # `optim_args` are texts, parsed by the types of the defaults; the default None marks a boolean option.
    known = {k: v for k, v in option_defaults(name).items() if k not in ("channel_dims", "rules")}
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
