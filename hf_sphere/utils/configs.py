"""Configurations of runs: YAML files, and the tables of `hf_sphere/configs`, whose rows are read by name."""

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_sphere.utils.checks import check_regular, error_text

TABLES = Path(__file__).parent.parent / "configs"
"""Folder of the tables; its README describes their format."""

ABOUT = ("base", "recipe", "import")
"""Keys of a configuration that are no arguments."""


class YamlLoader(yaml.SafeLoader):
    """YAML loader that parses 1e-3 as a number, as YAML 1.2 and JSON do; PyYAML requires 1.0e-3.

    Aliases, with which a short text describes billions of values, are refused, and keys that are not unique texts.
    """

    has_aliases = False

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: D102
        event, problem, names = self.peek_event(), "", set[str]()
        node: Any = super().compose_node(parent, index)
        mark, is_number = event.start_mark, node.tag.endswith((":int", ":float"))
        if not self.has_aliases and getattr(event, "anchor", None):
            problem = "anchors and aliases are not supported; repeat the value"
        elif is_number and re.match(r"[-+]?(0\d+$|\d+:)", str(node.value).replace("_", "")):
            problem = f"{node.value} would be a number of base 8 or 60; write it without leading zeros, or quote it"
        for key, _ in node.value if isinstance(node, yaml.MappingNode) and not problem else ():
            is_text = key.tag.endswith((":str", ":merge") if self.has_aliases else ":str")
            if not is_text or key.value in names:
                problem = f"the key {key.value!r} occurs twice" if is_text else "a key is not a text; quote it"
                mark = key.start_mark
                break
            names.add(key.value)
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$|^-?Infinity$|^NaN$"),  # the last two are Python's
    list("-+.0123456789IN"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration, merged from layers, by their place: the first base to the configuration itself.

    Later layers take precedence, and None removes a value.
    """

    settings: dict[str, Any]  # values by argument
    recipe: str | None  # name of the script that trains the run, if it is stated
    layers: Mapping[str, Mapping[str, Any]]


def config_names(text: str = "") -> list[str]:
    """Return the names of all runs, such as `vmf/mnist-vmf`, of the tables that contain a text."""
    tables = [path for path in sorted(TABLES.glob("*.yaml")) if text in path.read_text(encoding="utf-8")]
    rows = ((path.stem, row, place) for path in tables for row, (place, _) in _read_table(path).items())
    return [f"{stem}/{row}" for stem, row, place in rows if place[:4] == "run "]


def load_config(name: str) -> Config:
    """Return the configuration of a run by its name, with or without the table, or that of a YAML file.

    An ambiguous name, and a base that leads back to itself, are errors.
    """
    path, row = _locate(name)
    stands_for = f"{path.stem}/{row}" if row else path.stem
    layers: dict[str, Mapping[str, Any]] = {}
    while True:
        place, layer = _read_table(path)[row] if row else _read_file(path)
        if place in layers:
            raise ValueError(f"{place}: its base leads back to itself.")
        layers = {place: layer, **layers}
        base = layer.get("base")
        if base is None:
            break
        if not isinstance(base, str):
            raise ValueError(f"{place}: base must be the name of a configuration; got {base!r}.")
        path, row = _locate(base, path, row, f"{place}, base: ")
    alone = len(layers) == 1 and not row  # a file without a base
    merged: dict[str, Any] = {} if alone else {"output_dir": f"outputs/{stands_for}"}
    for layer in layers.values():
        merged |= layer
    settings = {key: value for key, value in merged.items() if value is not None and key not in ABOUT}
    return Config(settings, merged.get("recipe"), layers)


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = YamlLoader) -> Any:
    """Return the contents of a YAML file; the error of one that cannot be read includes its path."""
    try:
        check_regular(path)  # pipes cannot be read twice
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except Exception as error:  # of the constructors of PyYAML, of many classes
        problem = error_text(error).replace(' in "<unicode string>",', " at")
        raise ValueError(f"cannot read the configuration {path}: {problem}") from error


def _locate(name: str, path: Path = Path(), row: str = "", prefix: str = "") -> tuple[Path, str]:
    """Return the path of a YAML file and "", or that of a table and the name of its group or run.

    A file is named relative to the one at `path`. If that is a table, its groups may be named in a `row`, and no files.
    """
    if row and name in _read_table(path):
        return path, name
    file = os.path.normpath(path.parent / name)  # equal for equal paths, to detect circles
    if not row and os.path.exists(file) and not os.path.isdir(file):
        return Path(file), ""
    names = [full for full in config_names(name.rpartition("/")[2]) if f"/{full}".endswith(f"/{name}")]
    if len(names) == 1:
        stem, _, run = names[0].partition("/")
        return TABLES / f"{stem}.yaml", run
    if names:
        raise ValueError(f"{prefix}{name!r} is ambiguous: {' or '.join(names)}.")
    nearest = difflib.get_close_matches(name, config_names(), n=3, cutoff=0)
    raise ValueError(f"{prefix}there is no configuration or file {name!r}; the nearest are {', '.join(nearest)}.")


def _read_file(path: Path) -> tuple[str, Mapping[str, Any]]:
    values = read_yaml(path)
    return str(path), _as_mapping({} if values is None else values, f"the configuration {path}")


@functools.cache
def _read_table(path: Path) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return the groups and runs of a table: a description of the place, and the settings with the base."""
    file, table = f"hf_sphere/configs/{path.name}", dict[str, tuple[str, Mapping[str, Any]]]()
    for group, settings in _as_mapping(read_yaml(path), f"the table {file}").items():
        place = f"group {group} of {file}"
        layer = {**({"base": "base"} if group != "base" else {}), **_as_mapping(settings, place)}
        runs = _as_mapping(layer.pop("runs", {}), f"the runs of {place}")
        table[group] = place, layer
        for run, row in runs.items():
            place = f"run {run} of {file}"
            table[run] = place, {"base": group, **_as_mapping(row, place)}
    return table


def _as_mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a mapping of arguments to values; got {value!r}.")
    return value
