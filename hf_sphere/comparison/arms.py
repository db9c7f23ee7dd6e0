"""The arms of a comparison, and the parts of the data that they are tuned, trained and tested on."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_sphere.comparison.plan import Plan
from hf_sphere.comparison.tuning import OWN_NUMBERS, RATES, WEIGHT_DECAYS, Setting
from hf_sphere.data.sources import held_out_names
from hf_sphere.utils.configs import read_yaml

Axis = tuple[tuple[float, ...], float]
"""Values of an option that is tuned, see `tune`, and the value to start from."""

TUNING_SEED = 1000
"""Seed of the images and of the runs for tuning; those of the planned runs are smaller."""


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
    fixed = {*options, *(f"head_kwargs.{key}" for key in options.get("head_kwargs") or ())}
    lists = stated.values() if isinstance(stated, dict) else () if stated is None else [stated]
    if not all(isinstance(v, list) and v and v == sorted({*v}) for v in lists) or isinstance(stated, list):
        raise ValueError(f"the grid of {name} must map options to lists of increasing numbers; got {stated!r}.")
    if both := fixed & {*(stated or ())}:
        raise ValueError(f"{name} fixes {both.pop()}, which its grid has too; leave out one of them.")
    usual = {"learning_rate": RATES, **OWN_NUMBERS.get(str(options.get("head")), {"weight_decay": WEIGHT_DECAYS})}
    grid: dict[str, Axis] = {}
    for key, values in (usual if stated is None else stated).items():
        if key not in fixed:
            grid[key] = (tuple(values), learning_rate if key == "learning_rate" else values[len(values) // 2])
    return Arm(name, options, grid)


def apply_setting(options: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the options with the values of a setting; `head_kwargs.margin` is an item of `head_kwargs`."""
    merged = {**options, "head_kwargs": dict(options.get("head_kwargs") or {})}
    for name, value in setting.items():
        outer, _, inner = name.partition(".")
        (merged[outer] if inner else merged)[inner or outer] = value
    return merged


def make_arms(plan: Plan) -> list[Arm]:
    """Make the arms of a plan."""
    heads = plan.heads or (["softmax"] if plan.backbones else ["softmax", "cosine", "arcface", "vmf"])
    if plan.settings is not None:
        table = read_yaml(Path(plan.settings))
        if not isinstance(table, dict) or not all(isinstance(options, dict) for options in table.values()):
            raise ValueError(f"{plan.settings} (--settings) must map names to options, such as a: {{head: arcface}}.")
    elif not plan.backbones:
        table = {head: {"head": head} for head in heads}
    else:
        short = [os.path.basename(name.partition("=")[0].rstrip("/")) for name in plan.backbones]
        labels = [label if short.count(label) == 1 else name for name, label in zip(plan.backbones, short, strict=True)]
        table = {}
        for (name, label), head in itertools.product(zip(plan.backbones, labels, strict=True), heads):
            both = head if len(labels) == 1 else label if len(heads) == 1 else f"{head} on {label}"
            table[both] = {"head": head, "backbone": name}
    dim = {} if plan.embedding_dim is None else {"embedding_dim": plan.embedding_dim}
    return [make_arm(name, dim | options, plan.learning_rate or 0.0) for name, options in table.items()]


@dataclass(frozen=True)
class Parts:
    """Names of parts of the data, see `hf_sphere.data.sources.read_split`."""

    train: str
    test: str
    unseen: str | None = None  # test images of classes that are left out of training

    @property
    def names(self) -> list[str]:
        """All names."""
        return [name for name in (self.train, self.test, self.unseen) if name is not None]


@dataclass(frozen=True)
class Division:
    """How the data is divided.

    Without a test split of its own, the data is divided again for each seed. The images on which settings are scored
    are never tested; those on which models are trained in tuning then are, by other models.
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
