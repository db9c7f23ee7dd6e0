"""What the weights of a trained network say: where its filters face, how far they went, which layers matter.

No model of ours is known here; any torch module will do, and weights alone where no more is needed.
"""

from hf_sphere.analysis.distances import (
    Distances,
    LayerDistance,
    distance_from_initialization,
    distances_along_training,
)
from hf_sphere.analysis.layers import find_layers
from hf_sphere.analysis.projections import LayerProjections, Projections, ProjectionStatistics, projection_statistics
from hf_sphere.analysis.reinitialization import reinitialization_robustness
from hf_sphere.analysis.robustness import LayerRobustness, ReinitializationRobustness
from hf_sphere.analysis.sources import LayerWeight, iterate_layers

__all__ = [
    "Distances",
    "LayerDistance",
    "LayerProjections",
    "LayerRobustness",
    "LayerWeight",
    "ProjectionStatistics",
    "Projections",
    "ReinitializationRobustness",
    "distance_from_initialization",
    "distances_along_training",
    "find_layers",
    "iterate_layers",
    "projection_statistics",
    "reinitialization_robustness",
]
