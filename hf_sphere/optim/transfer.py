"""Learning rates of a wide and deep model, from those of a narrow and shallow one with the same proportions."""

import re
from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from hf_sphere.optim.roles import Role
from hf_sphere.utils.checks import check_integer

WIDTH_POWERS = {"adamw": 1.0, "muon": 0.5, "adamw_hyperball": 0.5, "muon_hyperball": 0.0}
"""Power of base width / width in the learning rate of a hidden matrix, by its rule; see `width_power`."""


def width_power(rule: str, role: Role) -> float:
    """Return the power of base width / width in the learning rate of a parameter.

    It keeps the change of a layer's output per step, relative to the output. For n inputs, a step of AdamW is aligned
    with them, so it changes the output by lr n; one of Muon has root mean square 0.2 lr and equal singular values, so
    by lr sqrt(n). A step of relative length lr is a fraction lr of the output with equal singular values, and
    lr sqrt(n) if aligned. Inputs of first layers, embeddings, biases and norms do not become more with the width.

    Reference:
        Yang et al., "Tensor Programs V", arXiv:2203.03466, for AdamW; Ren et al., "Rethinking language model scaling
        under transferable hypersphere optimization", arXiv:2603.28743, for Muon with constant norms.
    """
    if role in (Role.HIDDEN, Role.STACK):
        return WIDTH_POWERS[rule]
    return 1.0 if role in (Role.OUTPUT, Role.TIED) else 0.0


def depth_power(is_in_layers: bool) -> float:
    """Return the power of base layers / layers in the learning rate of a parameter.

    The outputs of L layers are summed. They begin uncorrelated, so that the sum grows like sqrt(L), but their changes
    are correlated, and their sum grows like L; a norm divides one by the other. Parameters outside the layers have 0.

    Reference:
        Yang et al., "Tensor Programs VI", arXiv:2310.02244.
    """
    return 0.5 if is_in_layers else 0.0


def rate_factors(
    model: nn.Module, roles: Mapping[str, Role], rules: Mapping[str, str], base_width: int, base_layers: int
) -> dict[str, float]:
    """Return the learning rates of trainable parameters relative to those of the base model, by name.

    Args:
        model: The model.
        roles: Roles by name, of `find_roles`.
        rules: Names of the rules by name of the parameter; `adamw` for others.
        base_width: Width of the base model, or 0 for the width of the model.
        base_layers: Number of its layers, or 0 for the number of the model.

    Raises:
        ValueError: If the base model is wider or deeper than the model, or width, layers or a role are unknown.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if unknown := [name for name in names if roles.get(name) is Role.UNKNOWN]:
        advice = "pass a batch that uses them, or freeze them"
        raise ValueError(
            f"the learning rates of {', '.join(unknown)} cannot be scaled: their role is unknown; {advice}."
        )
    count, layers = _layers(roles) if base_layers else (0, ())
    width = _ratio("base_width", base_width, _width(model, roles), "width") if base_width else 1.0
    depth = _ratio("base_layers", base_layers, count, "number of layers") if base_layers else 1.0
    return {
        name: width ** width_power(rules.get(name, "adamw"), roles.get(name, Role.NORM))
        * depth ** depth_power(name.startswith(layers))
        for name in names
    }


def _ratio(option: str, base: int, size: int, what: str) -> float:
    if check_integer(option, base, 0) > size:
        raise ValueError(f"{option} must be at most the {what} of the model, {size}; got {base}. Tune a smaller model.")
    return base / size


def _width(model: nn.Module, roles: Mapping[str, Role]) -> int:
    """Return the width of the configuration, or the number of inputs of the output layers."""
    if isinstance(width := getattr(getattr(model, "config", None), "hidden_size", None), int):
        return width
    outputs = [name for name, role in roles.items() if role in (Role.OUTPUT, Role.TIED)]
    if len(widths := {model.get_parameter(name).shape[1] for name in outputs}) != 1:
        found = f"has no hidden_size, and its output layers have {sorted(widths) or 'no'} inputs"
        raise ValueError(f"base_width needs the width of the model, but its config {found}; use lr_scales instead.")
    return widths.pop()


def _layers(roles: Mapping[str, Role]) -> tuple[int, tuple[str, ...]]:
    """Return the length of the lists of modules with hidden matrices, and the prefixes of names in them.

    The list is the first one in a name: that of the layers, not one of experts in each.
    """
    lists: dict[str, set[str]] = defaultdict(set)
    for name, role in roles.items():
        match = re.match(r"((?:.*?\.)??)\d+\.", name)
        if match and role in (Role.HIDDEN, Role.STACK):
            lists[match[1]].add(match[0])
    lists = {name: entries for name, entries in lists.items() if len(entries) > 1} or lists  # a head may be in one, too
    lengths = {len(entries) for entries in lists.values()}
    if len(lengths) > 1:
        found = ", ".join(f"{name.removesuffix('.')} has {len(entries)}" for name, entries in lists.items())
        raise ValueError(f"base_layers needs lists of equally many layers, but {found}; use lr_scales instead.")
    return max(lengths, default=0), tuple(entry for entries in lists.values() for entry in entries)
