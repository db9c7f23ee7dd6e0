"""Tuning: the same search for every arm, by successive halving and then by steps to neighboring values."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
"""Grid of the learning rate."""

Grids = dict[str, tuple[float, ...]]

_SMOOTHING: Grids = {"head_kwargs.label_smoothing": (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)}
_SCALE: Grids = {"head_kwargs.scale": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)}
_ANGLE: Grids = {"head_kwargs.margin": (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)}
_COSINE: Grids = {"head_kwargs.margin": (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)}
_LEARNED_SCALE: Grids = {"head_kwargs.log_temperature": (-4.85, -4.16, -3.47, -2.77, -2.08, -1.39, -0.69, 0.0)}
_RADII = (1.0, 2.0, 5.0, 10.0, 20.0)

OWN_NUMBERS: dict[str, Grids] = {
    **dict.fromkeys(("softmax", "angular"), _SMOOTHING),
    "hyperbolic": {"head_kwargs.curvature": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)},
    "spherized": {"head_kwargs.scaling": _RADII, "head_kwargs.radius": _RADII},
    "cosine": _LEARNED_SCALE,
    **dict.fromkeys(("arcface", "subcenter_arcface"), _SCALE | _ANGLE),
    **dict.fromkeys(("adaface", "cosface", "proxy_anchor"), _SCALE | _COSINE),
    "vmf": {"head_kwargs.kappa_confidence": (0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98), **_LEARNED_SCALE},
}
"""Grids of the one or two numbers of each head that matter most; other heads have `WEIGHT_DECAYS`."""

WEIGHT_DECAYS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)
Setting = Mapping[str, float]
"""Values by option; `head_kwargs.margin` is the margin of the head."""


@dataclass(frozen=True)
class Tuned:
    """The best setting, and its score."""

    setting: Setting
    score: float
    count: int  # of the settings that were tried
    at_end: tuple[str, ...]  # options whose best value is the last one of its grid, or the first one if that is not 0


def describe_setting(setting: Setting) -> str:
    """Describe a setting in a few words."""
    shown = {name.rpartition(".")[2]: value for name, value in setting.items()}
    if "log_temperature" in shown:
        shown["initial scale"] = math.exp(-shown.pop("log_temperature"))
    return ", ".join(f"{name} {value:.3g}" for name, value in shown.items())


def tune(
    grid: Mapping[str, tuple[Sequence[float], float]],
    evaluate: Callable[[Setting, int], float | None],
    *,
    count: int,
    epochs: int,
) -> Tuned | None:
    """Search the best setting; None if all settings diverge.

    Settings are drawn from a window of the grid around its start, and trained for a ninth of the epochs, the best third
    of them for a third, and the best third of those in full. From the best, the search moves to a neighbor, which
    differs by one step in one option, if it is better, until no neighbor is: so a grid is extended where its best value
    is at the edge of the window. At most as many settings are tried again, so that no arm is tuned much more than
    another.

    `grid` has the values of each option, in order, and the value around which the window lies. `evaluate` returns the
    score of a setting after a number of epochs, higher is better; None if it diverged. The first round has `count`
    settings, and a full training takes `epochs`.
    """
    grids = [tuple(values) for values, _ in grid.values()]
    reach, windows = 2 if len(grid) < 3 else 1, []
    for values, start in grid.values():
        nearest = min(range(len(values)), key=lambda index: abs(values[index] - start))
        windows.append(range(max(0, nearest - reach), min(len(values), nearest + reach + 1)))
    places = [*itertools.product(*windows)]
    drawn = random.Random(0).sample(places, min(count, len(places)))
    tried = {*drawn}

    def setting(place: Sequence[int]) -> dict[str, float]:
        return {name: values[index] for name, values, index in zip(grid, grids, place, strict=True)}

    def score(place: Sequence[int], epochs: int) -> float:
        found = evaluate(setting(place), epochs)
        return -math.inf if found is None else found

    for fraction in (9, 3):
        ranked = sorted(drawn, key=lambda place: -score(place, math.ceil(epochs / fraction)))
        drawn = ranked[: math.ceil(len(ranked) / 3)]
    full = {place: score(place, epochs) for place in drawn}
    best, before = max(full, key=full.__getitem__), None
    while best != before:
        before = best
        for axis, step in itertools.product(range(len(best)), (-1, 1)):
            place = (*best[:axis], best[axis] + step, *best[axis + 1 :])
            while 0 <= place[axis] < len(grids[axis]) and len(tried | {*full, place}) <= 2 * count:
                full[place] = full[place] if place in full else score(place, epochs)
                if full[place] <= full[best]:
                    break
                best, place = place, (*place[:axis], place[axis] + step, *place[axis + 1 :])
    if full[best] == -math.inf:
        return None
    at_end = []
    for name, values, index in zip(grid, grids, best, strict=True):
        is_first = index == 0 and values[0] != 0  # nothing lies below zero
        if len(values) > 1 and (is_first or index == len(values) - 1):
            at_end.append(name)
    return Tuned(setting(best), full[best], len(tried | {*full}), tuple(at_end))
