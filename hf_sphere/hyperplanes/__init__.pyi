from .distances import (
    Distances as Distances,
    LayerDistance as LayerDistance,
    distance_from_initialization as distance_from_initialization,
)
from .projections import (
    LayerProjections as LayerProjections,
    Projections as Projections,
    ProjectionStatistics as ProjectionStatistics,
    projection_statistics as projection_statistics,
)
from .reinitialization import reinitialization_robustness as reinitialization_robustness
from .results import LayerRobustness as LayerRobustness, ReinitializationRobustness as ReinitializationRobustness
from .weight_files import LayerWeight as LayerWeight, iterate_layers as iterate_layers
