"""Distributions on the unit sphere, with the interface of `torch.distributions`."""

from hf_sphere.distributions.directional import PowerSpherical, VonMisesFisher
from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, unit_vector

__all__ = ["HypersphericalUniform", "PowerSpherical", "VonMisesFisher", "unit_vector"]
