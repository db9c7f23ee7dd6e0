from .class_names import embed_class_names as embed_class_names
from .methods import METHODS as METHODS
from .ordering import OrderPreservation as OrderPreservation, measure_order as measure_order
from .placement import Placement as Placement, place_prototypes as place_prototypes
