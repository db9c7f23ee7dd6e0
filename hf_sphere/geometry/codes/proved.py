"""Optimal largest cosines of spherical codes, proved by methods other than linear programming."""

import math
from typing import NamedTuple


class ProvedOptimum(NamedTuple):
    """No `num_points` points in R^`dim` have a largest cosine below `cosine` (rounded down if not in closed form)."""

    num_points: int
    dim: int
    cosine: float
    source: str


_SCHUETTE = (
    "Schütte and van der Waerden, Auf welcher Kugel haben 5, 6, 7, 8 oder 9 Punkte mit Mindestabstand Eins Platz?, 1951"
)
_DANZER = "Danzer, Finite point-sets on S^2 with minimum distance as large as possible, 1963 (printed 1986)"

_COHN = "Cohn, de Laat and Leijenhorst, Optimality of spherical codes via exact semidefinite programming bounds, 2024"

PROVED_OPTIMA = (
    ProvedOptimum(7, 3, 0.210138312730, _SCHUETTE),
    ProvedOptimum(8, 3, 0.261203874963, _SCHUETTE),
    ProvedOptimum(9, 3, 1 / 3, _SCHUETTE),
    ProvedOptimum(10, 3, 0.404394325216, _DANZER),
    ProvedOptimum(11, 3, 1 / math.sqrt(5), _DANZER),
    ProvedOptimum(13, 3, 0.542636486829, "Musin and Tarasov, The strong thirteen spheres problem, 2012"),
    ProvedOptimum(14, 3, 0.563950300360, "Musin and Tarasov, The Tammes problem for N = 14, 2015"),
    ProvedOptimum(24, 3, 0.723078468333, "Robinson, Arrangement of 24 points on a sphere, 1961"),
    ProvedOptimum(1024**2 + 2048, 1024, 1 / 32, _COHN),
)
"""Optima increase with the number of points and decrease with the dimension, so each bounds many other cases."""
