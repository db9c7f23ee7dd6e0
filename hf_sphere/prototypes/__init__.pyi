from .methods import METHODS as METHODS
from .ordering import OrderPreservation as OrderPreservation, measure_order as measure_order
from .placement import (
    Placement as Placement,
    embed_class_names as embed_class_names,
    place_prototypes as place_prototypes,
)
