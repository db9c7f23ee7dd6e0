"""The plan of a comparison: its arms, and the parts of the data that they are tuned, trained and tested on."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Make an arm; `grid` of the options replaces the usual one.

    The numbers of the head that the options fix are not tuned.

    Raises:
        ValueError: If a value of the grid is not a list of increasing numbers.
    """
    options = dict(options)
    if not isinstance(options.get("head_kwargs", {}), Mapping):
        raise ValueError(f"head_kwargs of {name} must be a mapping; got {options['head_kwargs']!r}.")
    fixed = {f"head_kwargs.{key}" for key in options.get("head_kwargs", {})} | {*options}
    usual = {"learning_rate": RATES, **OWN_NUMBERS.get(str(options.get("head")), {"weight_decay": WEIGHT_DECAYS})}
    grid, stated = {}, options.get("grid", usual)
    if not isinstance(stated, Mapping):
        raise ValueError(f"the grid of {name} must be a mapping of options to lists of values; got {stated!r}.")
    if "grid" in options and (both := fixed & {*stated}):
        raise ValueError(f"{name} fixes {both.pop()}, which its grid has too; leave out one of them.")
    for key, values in stated.items():
        is_numeric = isinstance(values, Sequence) and all(isinstance(value, int | float) for value in values)
        if not is_numeric or not values or [*values] != sorted({*values}):
            raise ValueError(f"the grid of {name} must have a list of increasing numbers for {key}; got {values!r}.")
        start = learning_rate if key == "learning_rate" else values[len(values) // 2]
        if key not in fixed:
            grid[key] = (tuple(values), start)
    options.pop("grid", None)
    return Arm(name, options, grid)


def apply_setting(options: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the options with the values of a setting; `head_kwargs.margin` is an item of `head_kwargs`."""
    merged = {**options, "head_kwargs": dict(options.get("head_kwargs", {}))}
    for name, value in setting.items():
        outer, _, inner = name.partition(".")
        if inner:
            merged[outer][inner] = value
        else:
            merged[outer] = value
    return merged


def read_arms(args: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of each arm by name; `args` are `ArmArguments` of the job."""
    if args.settings is not None:
        return read_table(args.settings)
    heads = args.heads or (["softmax"] if args.backbones else ["softmax", "cosine", "arcface", "vmf"])
    if not args.backbones:
        return {head: {"head": head} for head in heads}
    short = {name: os.path.basename(name.partition("=")[0].rstrip("/")) for name in args.backbones}
    names = {name: label if list(short.values()).count(label) == 1 else name for name, label in short.items()}
    arms = {}
    for backbone, head in itertools.product(args.backbones, heads):
        label = head if len(names) == 1 else names[backbone] if len(heads) == 1 else f"{head} on {names[backbone]}"
        arms[label] = {"head": head, "backbone": backbone}
    return arms


def read_table(path: str) -> Mapping[str, Mapping[str, Any]]:
    """Read a table of arms, a YAML file."""
    table = read_yaml(Path(path))
    if not isinstance(table, dict) or not all(isinstance(options, dict) for options in table.values()):
        raise ValueError(f"{path} (--settings) must be a mapping of names to options, such as 'a: {{head: arcface}}'.")
    return table


@dataclass(frozen=True)
class Parts:
    """Names of parts of the data, see `hf_sphere.data.sources.read_split`."""

    train: str
    test: str
    unseen: str | None = None  # test images of classes that are left out of training


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
        kept, held_out = held_out_names(self.train, self.test_fraction, TUNING_SEED, self.group)
        train = kept if self.test is not None else held_out_names(kept, self.test_fraction, TUNING_SEED, self.group)[0]
        return self._without_classes(train, held_out, TUNING_SEED)

    def of_seed(self, seed: int) -> Parts:
        """Return the parts of the runs with a seed."""
        kept, _ = held_out_names(self.train, self.test_fraction, TUNING_SEED, self.group)
        if self.test is not None:
            return self._without_classes(kept, self.test, seed + 1)
        train, test = held_out_names(kept, self.test_fraction, seed, self.group)
        return self._without_classes(train, test, seed + 1)

    def _without_classes(self, train: str, test: str, seed: int) -> Parts:
        if not self.left_out:
            return Parts(train, test)
        kept, _ = held_out_names(train, self.left_out, seed, self.label)
        return Parts(kept, *held_out_names(test, self.left_out, seed, self.label))
