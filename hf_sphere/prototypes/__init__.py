"""Class prototypes on the hypersphere: placed before training, far apart, with a proof of how far."""

from hf_sphere.prototypes.class_names import embed_class_names
from hf_sphere.prototypes.methods import METHODS
from hf_sphere.prototypes.ordering import OrderPreservation, measure_order
from hf_sphere.prototypes.placement import Placement, place_prototypes

__all__ = ["METHODS", "OrderPreservation", "Placement", "embed_class_names", "measure_order", "place_prototypes"]
