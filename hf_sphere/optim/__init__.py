"""Optimisers for scale-invariant weights, and the search for those weights."""

from hf_sphere.optim.adam import AdamG, AdamS, AdamSRT
from hf_sphere.optim.invariance import RadialWeights, find_radial_weights, parameter_groups, radial_parameter_groups
from hf_sphere.optim.sgd import SGDMRT

__all__ = [
    "SGDMRT",
    "AdamG",
    "AdamS",
    "AdamSRT",
    "RadialWeights",
    "find_radial_weights",
    "parameter_groups",
    "radial_parameter_groups",
]
