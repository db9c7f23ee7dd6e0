from .layers import (
    Distances as Distances,
    LayerDistance as LayerDistance,
    LayerWeight as LayerWeight,
    distance_from_initialization as distance_from_initialization,
    iterate_layers as iterate_layers,
)
from .projections import (
    LayerProjections as LayerProjections,
    Projections as Projections,
    ProjectionStatistics as ProjectionStatistics,
    projection_statistics as projection_statistics,
)
from .reinitialization import (
    LayerRobustness as LayerRobustness,
    ReinitializationRobustness as ReinitializationRobustness,
    reinitialization_robustness as reinitialization_robustness,
)
