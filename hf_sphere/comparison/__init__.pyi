from .runs import Difference as Difference, RunComparison as RunComparison, compare_runs as compare_runs
from .significance import (
    holm as holm,
    power as power,
    pseudo_values as pseudo_values,
    seeds_for_power as seeds_for_power,
)
