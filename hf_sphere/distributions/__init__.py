"""Distributions on the unit sphere, with the interface of `torch.distributions`."""

from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, unit_vector
from hf_sphere.distributions.power_spherical import PowerSpherical
from hf_sphere.distributions.von_mises_fisher import VonMisesFisher

__all__ = ["HypersphericalUniform", "PowerSpherical", "VonMisesFisher", "unit_vector"]
