"""Spherical codes: points on the sphere far apart, from formulas and a catalogue, and bounds on what is possible."""

from hf_sphere.geometry.codes.bounds import separation_bound
from hf_sphere.geometry.codes.catalogue import CATALOGUE, find_code, fit_code
from hf_sphere.geometry.codes.closed_forms import cross_polytope, polygon, simplex
from hf_sphere.geometry.codes.separation import nearest_cosines, separation
from hf_sphere.geometry.codes.spherical_code import SphericalCode

__all__ = [
    "CATALOGUE",
    "SphericalCode",
    "cross_polytope",
    "find_code",
    "fit_code",
    "nearest_cosines",
    "polygon",
    "separation",
    "separation_bound",
    "simplex",
]
