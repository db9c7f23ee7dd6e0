"""`timm.optim.create_optimizer_v2(model, "adamsrt")`: makes the optimisers known to timm.

timm looks up the last part of a name that is split at underscores, so `adam_srt` is `adamsrt` there.
"""

import functools
from types import ModuleType
from typing import Any

from hf_sphere.optim.names import OPTIMIZERS


def register_optimizers(factory: ModuleType) -> None:
    """Register with `timm.optim._optim_factory`; calling it again changes nothing."""
    registry = factory.default_registry
    names = {name.replace("_", "") for name in OPTIMIZERS}
    if names <= set(registry._optimizers):
        return
    for name, kind in OPTIMIZERS.items():
        registry.register(
            factory.OptimInfo(
                name=name.replace("_", ""),
                opt_class=f"hf_sphere.optim.{kind.class_name}",
                description=kind.description,
                has_eps=kind.is_adam,
                has_betas=kind.is_adam,
                has_momentum=not kind.is_adam,
            )
        )
    registry.create_optimizer = _with_radial_groups(registry.create_optimizer, names)


def _with_radial_groups(create: Any, names: set[str]) -> Any:
    """Let timm group a model's parameters for these optimisers, as its own grouping knows nothing of their weights."""

    @functools.wraps(create)
    def create_optimizer(model_or_params: Any, opt: str, *args: Any, **options: Any) -> Any:
        from torch import nn

        if opt.lower().split("_")[-1] in names and isinstance(model_or_params, nn.Module):
            from hf_sphere.optim.groups import radial_parameter_groups

            if options.get("layer_decay") is not None:
                raise ValueError(
                    f"{opt} takes no layer_decay: its parameter groups follow the scale-invariant weights. Set lr in "
                    "the groups of radial_parameter_groups(model) instead."
                )
            if options.get("param_group_fn") is None:
                decays = options.get("weight_decay_exclude_1d", True) is False
                options["param_group_fn"] = functools.partial(_groups, radial_parameter_groups, decays)
        return create(model_or_params, opt, *args, **options)

    return create_optimizer


def _groups(find: Any, norms_and_biases_decay: bool, model: Any) -> Any:
    """Parameter groups of a model; timm's `filter_bias_and_bn=False` lets norms and biases decay too."""
    groups = find(model)
    if norms_and_biases_decay:
        norms = {"params", "weight_decay"}  # and no settings of the model's own
        groups = [{"params": group["params"]} if set(group) == norms else group for group in groups]
    return groups
