from .bounds import separation as separation, separation_bound as separation_bound
from .catalogue import (
    CATALOGUE as CATALOGUE,
    SphericalCode as SphericalCode,
    cross_polytope as cross_polytope,
    find_code as find_code,
    fit_code as fit_code,
    polygon as polygon,
    simplex as simplex,
)
