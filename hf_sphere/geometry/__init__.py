"""Mathematics of the hypersphere: tensors in, tensors out."""

from hf_sphere.geometry.angular import OPERATORS, angular_response
from hf_sphere.geometry.bessel import (
    concentration_from_mean_resultant_length,
    log_vmf_normalizer,
    mean_resultant_length,
)
from hf_sphere.geometry.codes import separation, separation_bound
from hf_sphere.geometry.coordinates import angles_to_cartesian, cartesian_to_angles, spherize

__all__ = [
    "OPERATORS",
    "angles_to_cartesian",
    "angular_response",
    "cartesian_to_angles",
    "concentration_from_mean_resultant_length",
    "log_vmf_normalizer",
    "mean_resultant_length",
    "separation",
    "separation_bound",
    "spherize",
]
