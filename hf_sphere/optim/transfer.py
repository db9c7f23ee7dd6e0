"""Learning rates of a wide and deep model, from those of a narrow and shallow one with the same proportions."""

import re
from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from hf_sphere.optim.roles import Role
from hf_sphere.utils.checks import check_integer

WIDTH_POWERS = {"adamw": 1.0, "muon": 0.5, "adamw_hyperball": 0.5, "muon_hyperball": 0.0}
"""Power of base width / width in the learning rate of a hidden matrix, by its rule.

It keeps the change of a layer's output per step, relative to the output. For n inputs, a step of AdamW is aligned with
them, so it changes the output by lr n; one of Muon has root mean square 0.2 lr and equal singular values, so by lr
sqrt(n). A step of relative length lr is a fraction lr of the output with equal singular values, and lr sqrt(n) if
aligned. Inputs of first layers, embeddings, biases and norms do not become more with the width.
"""


def rate_factors(
    model: nn.Module, roles: Mapping[str, Role], rules: Mapping[str, str], base_width: int, base_layers: int
) -> dict[str, float]:
    """Return the learning rates of trainable parameters relative to those of the base model, by name.

    `rules` are those of `WIDTH_POWERS`, by name of the parameter, and `adamw` for others. `base_width` and
    `base_layers` are those of the base model, or 0 for those of the model. Outputs of L layers are summed: they begin
    uncorrelated, so that the sum grows like sqrt(L), but their changes are correlated, and their sum grows like L.

    Reference:
        Yang et al., "Tensor Programs V", arXiv:2203.03466, and "VI", arXiv:2310.02244; Ren et al., "Rethinking language
        model scaling under transferable hypersphere optimization", arXiv:2603.28743, for Muon with constant norms.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if unknown := [name for name in names if roles.get(name) is Role.UNKNOWN]:
        raise ValueError(
            f"the learning rates of {', '.join(unknown)} cannot be scaled: their role is unknown; pass a batch that "
            "uses them, or freeze them."
        )
    count, layers = _layers(roles) if base_layers else (0, ())
    size = _width(model, roles) if base_width else 0
    for option, base, limit in (("base_width", base_width, size), ("base_layers", base_layers, count)):
        if check_integer(option, base, 0) > limit:
            raise ValueError(f"{option} must be at most that of the model, {limit}; got {base}. Tune a smaller model.")
    factors = {}
    for name in names:
        role = roles.get(name, Role.NORM)
        power = WIDTH_POWERS[rules.get(name, "adamw")] if role in (Role.HIDDEN, Role.STACK) else 0.0
        power = 1.0 if role in (Role.OUTPUT, Role.TIED) else power
        depth = (base_layers / count) ** 0.5 if base_layers and name.startswith(layers) else 1.0
        factors[name] = (base_width / size if base_width else 1.0) ** power * depth
    return factors


def _width(model: nn.Module, roles: Mapping[str, Role]) -> int:
    """Return the width of the configuration, or the number of inputs of the output layers."""
    if isinstance(width := getattr(getattr(model, "config", None), "hidden_size", None), int):
        return width
    outputs = [name for name, role in roles.items() if role in (Role.OUTPUT, Role.TIED)]
    if len(widths := {model.get_parameter(name).shape[1] for name in outputs}) != 1:
        raise ValueError(
            "base_width needs the width of the model, but its config has no hidden_size, and its output layers have "
            f"{sorted(widths) or 'no'} inputs; use lr_scales instead."
        )
    return widths.pop()


def _layers(roles: Mapping[str, Role]) -> tuple[int, tuple[str, ...]]:
    """Return the length of the lists of modules with hidden matrices, and the prefixes of names in them."""
    lists: dict[str, set[str]] = defaultdict(set)
    for name, role in roles.items():
        match = re.match(r"((?:.*?\.)??)\d+\.", name)  # the first list: of layers, not one of experts in each
        if match and role in (Role.HIDDEN, Role.STACK):
            lists[match[1]].add(match[0])
    lists = {name: entries for name, entries in lists.items() if len(entries) > 1} or lists  # a head may be in one, too
    lengths = {len(entries) for entries in lists.values()}
    if len(lengths) > 1:
        found = ", ".join(f"{name.removesuffix('.')} has {len(entries)}" for name, entries in lists.items())
        raise ValueError(f"base_layers needs lists of equally many layers, but {found}; use lr_scales instead.")
    return max(lengths, default=0), tuple(entry for entries in lists.values() for entry in entries)
