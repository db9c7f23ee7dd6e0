"""Optimisers for scale-invariant weights, and the search for those weights.

Imported at first use: the names are registered with transformers and timm at no cost to those who train otherwise.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.optim.adam import AdamG, AdamS, AdamSRT
    from hf_sphere.optim.diagnostics import (
        EffectiveStep,
        RadialDiagnosticsCallback,
        as_metrics,
        effective_step,
        radial_diagnostics,
    )
    from hf_sphere.optim.groups import parameter_groups, radial_parameter_groups
    from hf_sphere.optim.invariance import RadialWeights, find_radial_weights
    from hf_sphere.optim.sgd import SGDMRT

_MODULES = {
    "adam": ("AdamG", "AdamS", "AdamSRT"),
    "sgd": ("SGDMRT",),
    "groups": ("parameter_groups", "radial_parameter_groups"),
    "invariance": ("RadialWeights", "find_radial_weights"),
    "diagnostics": (
        "EffectiveStep",
        "RadialDiagnosticsCallback",
        "as_metrics",
        "effective_step",
        "radial_diagnostics",
    ),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SGDMRT",
    "AdamG",
    "AdamS",
    "AdamSRT",
    "EffectiveStep",
    "RadialDiagnosticsCallback",
    "RadialWeights",
    "as_metrics",
    "effective_step",
    "find_radial_weights",
    "parameter_groups",
    "radial_diagnostics",
    "radial_parameter_groups",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
