from .distances import (
    Distances as Distances,
    LayerDistance as LayerDistance,
    distance_from_initialization as distance_from_initialization,
)
from .layers import LayerWeight as LayerWeight, iterate_layers as iterate_layers
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
