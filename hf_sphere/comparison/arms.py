"""The arms of a comparison, their tuning, and the parts of the data on which they are tuned, trained and tested."""

import itertools
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_sphere.comparison.plan import Plan
from hf_sphere.data.sources import held_out_names
from hf_sphere.utils.configs import read_yaml

Axis = tuple[Sequence[float], float]
"""Values of an option that is tuned, in order, and the value around which the search starts."""

Grids = dict[str, tuple[float, ...]]

Setting = Mapping[str, float]
"""Values by option; `head_kwargs.margin` is the margin of the head."""

TUNING_SEED = 1000
"""Seed of the images and of the runs for tuning; those of the planned runs are smaller."""

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
WEIGHT_DECAYS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)

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


@dataclass(frozen=True)
class Arm:
    """One of the things that are compared."""

    name: str
    options: Mapping[str, Any]  # of `hf-sphere train classification` that are its own, such as `head`
    grid: Mapping[str, Axis] = field(default_factory=dict)  # by option

    @property
    def backbone(self) -> str:
        """Its backbone."""
        return str(self.options.get("backbone", ""))


def make_arm(name: str, options: Mapping[str, Any], learning_rate: float) -> Arm:
    """Make an arm; `grid` of the options replaces the usual one. Numbers that the options fix are not tuned."""
    options = dict(options)
    stated = options.pop("grid", None)
    is_grid = isinstance(stated, dict) and all(isinstance(v, list) and v and v == sorted({*v}) for v in stated.values())
    if stated is not None and not is_grid:
        raise ValueError(f"the grid of {name} must map options to lists of increasing numbers; got {stated!r}.")
    fixed = {*options, *(f"head_kwargs.{key}" for key in options.get("head_kwargs") or ())}
    if both := fixed & {*(stated or ())}:
        raise ValueError(f"{name} fixes {both.pop()}, which its grid has too; leave out one of them.")
    usual = {"learning_rate": RATES, **OWN_NUMBERS.get(str(options.get("head")), {"weight_decay": WEIGHT_DECAYS})}
    grid: dict[str, Axis] = {}
    for key, values in (usual if stated is None else stated).items():
        if key not in fixed:
            grid[key] = (tuple(values), learning_rate if key == "learning_rate" else values[len(values) // 2])
    return Arm(name, options, grid)


def make_arms(plan: Plan) -> list[Arm]:
    """Make the arms of a plan."""
    heads = plan.heads or (["softmax"] if plan.backbones else ["softmax", "cosine", "arcface", "vmf"])
    if plan.settings is not None:
        table = read_yaml(Path(plan.settings))
        if not isinstance(table, dict) or not all(isinstance(options, dict) for options in table.values()):
            raise ValueError(f"{plan.settings} (--settings) must map names to options, such as a: {{head: arcface}}.")
    else:
        backbones, table = plan.backbones or [""], {}
        short = [os.path.basename(name.partition("=")[0].rstrip("/")) for name in backbones]
        for (name, label), head in itertools.product(zip(backbones, short, strict=True), heads):
            label = label if short.count(label) == 1 else name
            both = head if len(short) == 1 else label if len(heads) == 1 else f"{head} on {label}"
            table[both] = {"head": head, **({"backbone": name} if name else {})}
    dim = {} if plan.embedding_dim is None else {"embedding_dim": plan.embedding_dim}
    return [make_arm(name, dim | options, plan.learning_rate or 0.0) for name, options in table.items()]


def apply_setting(options: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the options with the values of a setting; `head_kwargs.margin` is an item of `head_kwargs`."""
    merged = {**options, "head_kwargs": dict(options.get("head_kwargs") or {})}
    for name, value in setting.items():
        outer, _, inner = name.partition(".")
        (merged[outer] if inner else merged)[inner or outer] = value
    return merged


def describe_setting(setting: Setting) -> str:
    """Describe a setting in a few words."""
    return ", ".join(f"{name.rpartition('.')[2]} {value:.3g}" for name, value in setting.items())


def draw_places(grid: Mapping[str, Axis], count: int) -> list[tuple[int, ...]]:
    """Return the settings with which `tune` starts, as indices of the values; it evaluates the first one first."""
    reach, windows = 2 if len(grid) < 3 else 1, []
    for values, start in grid.values():
        nearest = min(range(len(values)), key=lambda index: abs(values[index] - start))
        windows.append(range(max(0, nearest - reach), min(len(values), nearest + reach + 1)))
    places = [*itertools.product(*windows)]
    return random.Random(0).sample(places, min(count, len(places)))


def setting_at(grid: Mapping[str, Axis], place: Sequence[int]) -> dict[str, float]:
    """Return the setting with these indices of the values."""
    return {name: values[index] for (name, (values, _)), index in zip(grid.items(), place, strict=True)}


def tuning_epochs(grid: Mapping[str, Axis], count: int, epochs: int) -> tuple[int, int]:
    """Return the fewest and the most epochs that `tune` can take."""
    drawn, most = len(draw_places(grid, count)), min(2 * count, math.prod(len(values) for values, _ in grid.values()))
    halving = drawn * math.ceil(epochs / 9) + math.ceil(drawn / 3) * math.ceil(epochs / 3)
    return halving + math.ceil(math.ceil(drawn / 3) / 3) * epochs, halving + most * epochs


def tune(
    grid: Mapping[str, Axis], evaluate: Callable[[Setting, int], float | None], *, count: int, epochs: int
) -> dict[str, Any] | None:
    """Search the best `setting`; None if all settings diverge.

    Also returns its `score`, the `count` of the settings that were tried, and the options whose best value is `at_end`,
    the last one of the grid, or the first one if that is not 0.

    `count` settings are drawn from a window of the grid around its start, and trained for a ninth of the epochs, the
    best third of them for a third, and the best third of those in full. From the best, the search moves to a neighbor,
    which differs by one step in one option, if it is better, until no neighbor is: so a grid is extended where its best
    value is at the edge of the window. At most as many settings are tried again, so that no arm is tuned much more than
    another. `evaluate` returns the score of a setting after a number of epochs; None if it diverged.
    """
    grids, drawn = [values for values, _ in grid.values()], draw_places(grid, count)
    tried = {*drawn}

    def score(place: Sequence[int], epochs: int) -> float:
        found = evaluate(setting_at(grid, place), epochs)
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
    ends = [{0, len(v) - 1} - ({0} if v[0] == 0 else set()) if len(v) > 1 else set() for v in grids]
    at_end = [name for name, index, end in zip(grid, best, ends, strict=True) if index in end]
    return {"setting": setting_at(grid, best), "score": full[best], "count": len(tried | {*full}), "at_end": at_end}


class Parts(NamedTuple):
    """Names of parts of the data, see `hf_sphere.data.sources.read_split`."""

    train: str
    test: str
    unseen: str | None = None  # test images of classes that are left out of training


@dataclass(frozen=True)
class Division:
    """How the data is divided; without a test split of its own, again for each seed.

    The images on which settings are scored are never tested; those on which models are trained in tuning then are, by
    other models.
    """

    train: str  # split or part for training, tuning and, without a test split, for testing
    test: str | None  # test split; None to hold one out for each seed
    test_fraction: float = 0.2  # of the images to test on, and of the others to tune on
    group: str | None = None  # column of groups that are not divided
    left_out: float = 0.0  # fraction of the classes that are left out of training
    label: str | None = None  # column of the labels, for these classes

    @property
    def is_redrawn(self) -> bool:
        """Whether each seed has other training and test images."""
        return self.test is None or bool(self.left_out)

    def tuning(self) -> Parts:
        """Return the parts for tuning."""
        kept, held_out = self._divide(self.train, TUNING_SEED)
        train = kept if self.test is not None else self._divide(kept, TUNING_SEED)[0]
        return self._without_classes(train, held_out, TUNING_SEED)

    def of_seed(self, seed: int) -> Parts:
        """Return the parts of the runs with a seed."""
        kept, _ = self._divide(self.train, TUNING_SEED)
        train, test = (kept, self.test) if self.test is not None else self._divide(kept, seed)
        return self._without_classes(train, test, seed + 1)

    def _divide(self, part: str, seed: int) -> tuple[str, str]:
        return held_out_names(part, self.test_fraction, seed, self.group)

    def _without_classes(self, train: str, test: str, seed: int) -> Parts:
        if not self.left_out:
            return Parts(train, test)
        kept, _ = held_out_names(train, self.left_out, seed, self.label)
        return Parts(kept, *held_out_names(test, self.left_out, seed, self.label))
