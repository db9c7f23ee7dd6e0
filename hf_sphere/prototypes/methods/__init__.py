"""Placement methods. To add one, write a function like those of this folder, and add it to `METHODS`."""

from hf_sphere.prototypes.methods.auto import auto, catalogue, closed_form
from hf_sphere.prototypes.methods.placement_task import Candidate, Method, PlacementTask
from hf_sphere.prototypes.methods.searches import lbfgs, sgd, sgd_as_published, slsqp

__all__ = ["METHODS", "WITHOUT_CLASS_VECTORS", "Candidate", "Method", "PlacementTask"]

_FUNCTIONS = (auto, catalogue, closed_form, lbfgs, sgd, sgd_as_published, slsqp)
METHODS: dict[str, Method] = {function.__name__: function for function in _FUNCTIONS}
"""Placement methods by name."""

WITHOUT_CLASS_VECTORS = {"catalogue", "closed_form", "slsqp"}
"""Names of the methods that do not take class vectors into account during the search."""
