"""Weights that a normalized GPT keeps at unit norm, normalized again after each step."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_sphere.optim.layout import check_axes
from hf_sphere.utils.checks import check_choice
from hf_sphere.utils.modules import unwrap

_ROWS = ("*embed_tokens", "*lm_head", "*.[qkv]_proj", "*.gate_proj", "*.up_proj")
_COLUMNS = ("*.o_proj", "*.down_proj")
UNIT_NORM = {"dory": {f"{name}.weight": axis for axis, names in ((1, _ROWS), (0, _COLUMNS)) for name in names}}
"""Axis of norm 1 by `model_type` and pattern: rows read the hidden state, columns write to it."""


@torch.no_grad()
def renormalize(model: nn.Module, weights: Mapping[str, int] | None = None) -> dict[str, int]:
    """Normalize the weights that a normalized GPT keeps at unit norm; to be called after each optimizer step.

    Each row (axis 1) or column (axis 0) gets norm 1, computed in at least float32; one that is 0 stays so. Return the
    axis by name of the weight.

    Args:
        model: Any module, also with sharded weights.
        weights: The axis along which weights have norm 1, by pattern of their names; None for the scheme of the model's
            `model_type`.

    Raises:
        ValueError: If there is no scheme, a pattern matches no weight, or adapters of PEFT change weights of a scheme.
        RuntimeError: If a weight was flattened.

    Reference:
        Loshchilov et al., "nGPT: normalized transformer with representation learning on the hypersphere", ICLR 2025.

    Example:
        >>> renormalize(torch.nn.Sequential(torch.nn.Linear(4, 3)), {"0.weight": 1})
        {'0.weight': 1}
    """
    model, patterns = unwrap(model), weights
    if patterns is None:
        scheme = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        patterns = UNIT_NORM[check_choice("the scheme of unit norms", scheme, UNIT_NORM)]
    parameters = {name.replace("_orig_mod.", ""): weight for name, weight in model.named_parameters()}  # compiled parts
    if patterns is not weights and (adapted := fnmatch.filter(parameters, "*.base_layer.*")):
        raise ValueError(f"{adapted[0]} has an adapter, so it is not the weight that the model uses. Merge it first.")
    axes: dict[str, int] = {}
    for pattern, axis in patterns.items():
        matching = fnmatch.filter(parameters, pattern)
        # A model without head, or with a tied one, lacks some of a scheme.
        if not matching and (patterns is weights or "_proj" in pattern):
            raise ValueError(f"pattern {pattern!r} matches no weight; names are like {', '.join([*parameters][:3])}.")
        axes |= dict.fromkeys(matching, axis)
    for name, axis in axes.items():
        check_axes(name, weight := parameters[name])
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=axis, keepdim=True)
        weight.copy_(wide / torch.where(norm > 0, norm, 1.0))
    return axes


class RenormalizeCallback(TrainerCallback):
    """Normalizes weights before training and after each step of the Trainer; see `renormalize`.

    Example:
        >>> Trainer(model, args, train_dataset=blocks, callbacks=[RenormalizeCallback()])  # doctest: +SKIP
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self.weights = weights

    def on_optimizer_step(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        """Normalize the weights."""
        renormalize(model, self.weights)

    on_train_begin = on_optimizer_step
