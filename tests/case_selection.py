"""Choose the cases of each test function that run by default; `--all-cases` runs the rest.

A function runs with the fewest cases in which every value of each of its *settings* occurs: a dtype, a truth value, a
class or function, and the name of a task, backbone, head, optimizer, search engine or precision. The other values of a
parameter, such as sizes, seeds and names of runs, are not settings: one case of them is enough. Parameters that are
given together, such as an input and its result, are a table: every row without a setting of its own runs. A function
that expects errors, or the message of each case, is a table of bad input, which stays whole.

`pytest.mark.settings(run=function)` says which settings the values of a parameter stand for: the function returns them
by name; of a table with such a parameter, not every row runs.
"""

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from importlib import import_module
from typing import Any

import pytest

PRECISIONS = ("no", "fp16", "bf16", "fp32")
ENGINES = frozenset(["exact", "torch", "flat", "ivf", "hnsw", "faiss", "lance", "inductor", "aot_eager", "eager"])
BAD_INPUT = re.compile(r"\b(raises|warns|error|refus|reject)\w*\(")
EXPECTED = {"message", "messages", "problem", "said", "reason", "warning"}

OPTIMIZER_FAMILIES = pytest.mark.settings(kind=lambda name: {"family": name.partition("_")[0]})
"""For what the optimizers of a family share, such as how their steps are compiled."""
HEAD_FILES = pytest.mark.settings(name=lambda name: {"file": import_module("hf_sphere.nn").HEADS[name].__module__})
"""For what the heads of a file share."""


def each(name: str) -> pytest.MarkDecorator:
    """Return a mark of a parameter all of whose values run by default, such as the rows of a table."""
    return pytest.mark.settings(**{name: lambda value: {"value": value}})


def some_rows(name: str) -> pytest.MarkDecorator:
    """Return a mark of a table with this parameter that takes too long for every row to run by default."""
    return pytest.mark.settings(**{name: lambda value: {}})


@functools.cache
def setting_names() -> frozenset[str]:
    """Return the names that are settings wherever they are the value of a parameter."""
    # Not imported by the process that only starts the workers.
    from hf_sphere.commands.train import TASKS
    from hf_sphere.models.backbones import BACKBONES
    from hf_sphere.nn.heads import HEADS
    from hf_sphere.optim.optimizers import optimizer_names

    return ENGINES | {*TASKS, *BACKBONES, *HEADS, *optimizer_names(), "adam", "adamw", "sgd", *PRECISIONS}


def is_setting(value: Any) -> bool:
    """Whether a value of a parameter is a setting by itself."""
    import torch

    if isinstance(value, str):
        return value in setting_names()
    return isinstance(value, (torch.dtype, type, bool)) or callable(value)


def settings_of(item: pytest.Function) -> set[tuple[str, Hashable]]:
    """Return the settings of a case, each with the name of its parameter."""
    described = {name: function for mark in item.iter_markers("settings") for name, function in mark.kwargs.items()}
    found: set[tuple[str, Hashable]] = set()
    for name, value in item.callspec.params.items():
        if name in described:
            found |= {(f"{name}.{setting}", str(own)) for setting, own in described[name](value).items()}
        elif is_setting(value):
            found.add((name, value if isinstance(value, Hashable) else str(value)))
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        row = [item.callspec.params[name] for name in names]
        if len(row) > 1 and described.keys().isdisjoint(names) and not any(map(is_setting, row)):
            found.add((" ".join(names), tuple(map(id, row))))
    return found


def is_bad_input(item: pytest.Function) -> bool:
    """Whether a function is a table of bad input."""
    return bool(EXPECTED & item.callspec.params.keys() or BAD_INPUT.search(inspect.getsource(item.function)))


def covering(cases: Sequence[set[tuple[str, Hashable]]]) -> list[int]:
    """Return the indices of a few cases in which every setting of all cases occurs, at least the first."""
    missing = set().union(*cases)
    chosen: list[int] = []
    while missing or not chosen:
        best = max(range(len(cases)), key=lambda index: (len(cases[index] & missing), -index))
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen)


def choose(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items that run by default, and the others."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept: list[pytest.Item] = []
    for cases in functions.values():
        plain = not all(hasattr(item, "callspec") for item in cases)
        if plain or len(cases) == 1 or is_bad_input(cases[0]):
            kept += cases
        else:
            kept += [cases[index] for index in covering([settings_of(item) for item in cases])]
    chosen = set(map(id, kept))
    return kept, [item for item in items if id(item) not in chosen]
