"""Command-line arguments from dataclasses: declared once, set by configurations, on the command line, or both.

Nothing heavy is imported here, so that `--help` and a mistyped argument return at once.
"""

import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from hf_sphere.utils.checks import check_not_text
from hf_sphere.utils.commands import command_of, running
from hf_sphere.utils.configs import YamlLoader, load_config
from hf_sphere.utils.loading import check_source

SEED: dict[str, Any] = {"ge": 0, "le": 2**32 - 1}
"""Bounds of seeds, those of NumPy."""

LARGEST = 2**31 - 1
"""Largest absolute value of integers without another bound; products of two of them fit into 64 bits."""

_SOURCES = {
    "dataset": (
        *("dataset_name", "images", "source", "query", "calibration", "other", "compare_with", "unknown"),
        *("embeddings", "beside", "out_of_distribution", "train_embeddings"),
    ),
    "model": ("model_name_or_path", "initial_weights", "text_model"),
    "": ("index", "settings", "prototypes_file", "class_vectors", "snapshots", "folder"),
}
"""Options that name what is read, by the kind of repository on the Hub that it may be instead of a file or folder."""

_OTHER_NAMES = {"max_steps": "stop_after_steps", "lr": "learning_rate"}
"""Options by the name that they have elsewhere."""

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


imported: dict[str, None] = {}
"""Names of the modules of the user's own that `--import` named, for further processes."""


class Arguments:
    """Base class of argument dataclasses: numbers must be finite and within their bounds, outputs must be named."""

    def __init_subclass__(cls) -> None:
        """Add the help texts of the fields to the docstring, for `help` in Python."""
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        fields = getattr(cls, "__dataclass_fields__", {}) | declared
        helps = {name: field.metadata["help"] for name, field in fields.items() if "help" in field.metadata}
        lines = [f"    {name}: {text.replace('%%', '%')}" for name, text in helps.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or "").split("\n\nArgs:\n")[0], "\nArgs:", *lines])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            name, value = field.name, getattr(self, field.name)
            about: Any = field.metadata.get("help")
            if isinstance(value, str) and value.startswith("~/") and name != "text":  # no shell has expanded it
                setattr(self, name, value := os.path.expanduser(value))
            if str(field.type).startswith("list["):
                check_not_text(name, value)
            if name in ("output", "output_dir", "dataset_name") and value is not None and not value.strip():
                raise ValueError(f"{name} must not be empty; name a file or folder.")
            choices: Any = ()
            for kind in (field.type, *get_args(field.type)):
                choices += get_args(kind) if get_origin(kind) is Literal else ()
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if choices and item is not None and item not in choices:
                    raise ValueError(f"{name} must be {' or '.join(map(str, choices))}; got {item!r}.")
                if isinstance(item, (int, float)) and not isinstance(item, bool):
                    _check_number(name, item, getattr(about, "bounds", {}))
            if not hasattr(about, "only_with") or value == (default := default_of(field)):
                continue
            for other in about.not_with:
                if _is_set(self, other):
                    raise ValueError(f"{name} and {other.replace('=', ' ')} exclude each other; leave one of them out.")
            if about.only_with and not any(_is_set(self, each) for each in about.only_with):
                needed = " or ".join(each.replace("=", " ") for each in about.only_with)
                advice = "" if default is None else f", or set it to {default} if it is in a configuration"
                raise ValueError(f"{name} {value} has no effect without {needed}; leave it out{advice}.")


class Options(dict[str, Any]):
    """A mapping that can be written as JSON or YAML on the command line: `'{scaling: 5.0}'`."""

    def __init__(self, value: str | Iterable[tuple[str, Any]] = ()) -> None:
        try:
            super().__init__(yaml.load(value, Loader=YamlLoader).items() if isinstance(value, str) else value)
        except (yaml.YAMLError, RecursionError, AttributeError) as error:
            raise argparse.ArgumentTypeError(f"expected a mapping such as '{{scaling: 5.0}}'; got {value!r}") from error


class _Help(str):
    """A help text as argparse expects it, with what argparse does not know, to which HfArgumentParser passes all."""


def argument(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None,
    only_with: Sequence[str] = (),
    not_with: Sequence[str] = (),
    **bounds: float,
) -> Any:
    """Declare a field of an argument dataclass.

    Args:
        default: Default value (a tuple for a list), or a class to instantiate; required arguments have none.
        help: Shown by `--help`.
        choices: Valid values, or a function that is called for them when the command line is parsed.
        only_with: Names of other fields, or `NAME=VALUE`, without all of which only the default is valid.
        not_with: Names of other fields, or `NAME=VALUE`, with any of which only the default is valid.
        **bounds: `ge`, `gt`, `le` or `lt`, for numbers and lists of numbers.
    """
    about: Any = _Help(help.replace("%", "%%"))
    about.choices, about.bounds, about.only_with, about.not_with = choices, bounds, only_with, not_with
    make: Any = (lambda: list(default)) if isinstance(default, tuple) else default
    given: Any = {"default_factory": make} if isinstance(default, tuple | type) else {"default": default}
    return dataclasses.field(metadata={"help": about}, **given)


def parse_arguments(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = "",
    recipe: str | None = None,
    usual: Collection[str] = (),
) -> tuple[Any, ...]:
    """Read argument dataclasses from `--config NAME_OR_FILE` and the command line, which takes precedence.

    Mistakes are a `SystemExit` with a message. The command line has no program name; None stands for that of
    `sys.argv`. Only configurations of the script `recipe` are read, or those of all scripts. If some options are
    `usual`, `--help` shows these, and `--help all` all of them. In a command, what the options name must be there.
    """
    argv = import_modules(sys.argv[1:] if argv is None else argv)  # first: it may define choices
    parser = _Parser(
        allow_abbrev=False,
        prog=running.get(),
        description=description,
        usage="%(prog)s [--config NAME_OR_FILE] [--OPTION VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_text = "name of a configuration, or YAML file; of several, later ones take precedence."
    parser.add_argument("--config", action="append", default=[], help=help_text)
    parser.add_argument("--print_config", action="store_true", help="print all arguments as YAML, and exit")
    help_text = "module of heads, optimizers and other parts of your own, imported first; can be repeated."
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE", help=help_text)
    actions, words = _add_arguments(parser, types), _words(argv)
    fields = {field.name: field for cls in types for field in dataclasses.fields(cls)}
    hidden = actions.keys() - {*usual} if usual else set()
    if hidden and "all" not in words[words.index("--help") + 1 if "--help" in words else len(words) :]:
        for name in hidden:
            actions[name].help = argparse.SUPPRESS
        parser.epilog = f"--help all shows the other {len(hidden)} options, too."
    line, unknown = parser.parse_known_args(words)
    given = vars(line)
    config_names, modules, prints = given.pop("config"), given.pop("modules"), given.pop("print_config")
    places: dict[str, tuple[int, str]] = {}  # where configurations state an argument; higher numbers take precedence
    try:
        if unknown:
            word = unknown[0].partition("=")[0]
            raise ValueError(f"unknown argument {word!r}.{_hint(word.lstrip('-'), fields, 'options')}")
        values = _read_configs(config_names, actions, recipe, places)
        values, places = values | given, places | dict.fromkeys(given, (sys.maxsize, ""))
        merged = SimpleNamespace(**{name: values.get(name, default_of(field)) for name, field in fields.items()})
        for name in [*places]:
            # What a configuration sets, and a later one or the command line makes idle, is left out.
            needed = getattr(fields[name].metadata["help"], "only_with", ())
            is_replaced = any(places.get(each.partition("=")[0], (-1, ""))[0] > places[name][0] for each in needed)
            if is_replaced and not any(_is_set(merged, each) for each in needed):
                setattr(merged, name, default_of(fields[name]))
                del values[name]
        if missing := [f"--{name}" for name in fields if getattr(merged, name) is dataclasses.MISSING]:
            raise ValueError(f"the following arguments are required: {', '.join(missing)}")
        parts = make_arguments(types, values, actions)
        stated: dict[str, Any] = {}
        for part in parts:
            stated |= vars(part)
        data = stated.get("dataset_name") or stated.get("images") or ""
        for name in ("output_dir", "output"):
            output = Path(stated.get(name) or os.devnull).resolve()
            if os.path.isdir(data) and output.is_relative_to(Path(data).resolve()):  # the next call would read it
                raise ValueError(f"--{name} {stated[name]} is in the folder of the data, {data}; choose another one.")
    except ValueError as error:
        _, place = places.get(re.findall(r"\w+", str(error))[0], (0, ""))
        parser.error(f"{place}: {error}" if place else str(error))
    if prints:
        if modules:
            print(f"import: {json.dumps(modules)}")
        for name in fields:  # JSON is YAML in which texts such as "1e-3" are quoted
            print(f"{name}: {json.dumps(getattr(merged, name), default=str, ensure_ascii=False)}")
        parser.exit()
    if not running.get():
        return parts
    for kind, options in _SOURCES.items() if not stated.get("remove_from") else ():  # which may be gone
        for option in options:
            value = stated.get(option)  # a number for `query` of few-shot learning
            for name in [value] if isinstance(value, str) else value if isinstance(value, list) else ():
                check_source(option, name, kind)
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        print(f"{running.get()}: loading libraries ...", file=sys.stderr, flush=True)  # which takes seconds
    return parts


def make_arguments(
    types: Sequence[type], values: Mapping[str, Any], actions: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Return an instance of each argument dataclass, from values by name; None leaves an argument out."""
    actions = actions or _add_arguments(argparse.ArgumentParser(), types)
    given, parts = dict[str, Any](), list[Any]()
    for name, value in values.items():
        if name not in actions:
            raise ValueError(f"unknown option {name!r}.{_hint(name, actions)}")
        if value is not None:
            given[name] = _check_value(actions[name], value)
    for cls in types:
        parts.append(cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given}))
    return tuple(parts)


def _check_value(action: Any, value: Any) -> Any:
    """Return the value of an option, a list or a real number where one is expected; one of another type is an error."""
    kind, is_list = bool if action.type is _boolean else action.type, action.nargs == "+"
    items = value if is_list and isinstance(value, list | tuple) else [value]
    types: Any = {float: (int, float), Options: dict}.get(kind, kind)
    is_valid = all(isinstance(item, types) and isinstance(item, bool) == (kind is bool) for item in items)
    if not (is_valid and (items or action.can_be_empty)) or (action.choices and not {*items} <= {*action.choices}):
        choices = f"one of {', '.join(map(str, action.choices))}" if action.choices else f"of type {kind.__name__}"
        raise ValueError(f"{action.dest} must be {choices}; got {value!r}.")
    if kind is float and any(isinstance(item, int) and abs(item) > sys.float_info.max for item in items):
        raise ValueError(f"{action.dest} must be finite; got a number of more than 300 digits.")
    items = [*map(float, items)] if kind is float else [*items]
    return items if is_list else items[0]


def import_modules(argv: Sequence[str]) -> list[str]:
    """Import the modules that a command line and the environment name, as if Python were started in this folder.

    Returned are the other words of the command line, and `--import=NAME` of each module.
    """
    words, left, text = list[str](), list(argv), os.environ.get("HF_SPHERE_IMPORT", "")
    names = text.split(",") if text else []
    while left:
        option, equals, value = (word := left.pop(0)).partition("=")
        if option == "--import":
            names += (value if equals else left.pop(0) if left else "").split(",")
        else:
            words.append(word)
    names = list(dict.fromkeys(map(str.strip, names)))
    if names and not {"", os.getcwd()} & {*sys.path}:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    for name in names:
        importlib.import_module(name.removesuffix(".py"))
        imported[name] = None
    return [*words, *map("--import={}".format, names)]


def named_first(name: str, argv: Sequence[str] | None = None) -> list[str]:
    """Return a command line with the name of its first argument, by default that of `sys.argv`, which may lack one."""
    words = list(sys.argv[1:] if argv is None else argv)
    return [f"--{name}", *words] if words and not words[0].startswith("-") else words


def given_arguments(argv: Sequence[str] | None = None) -> set[str]:
    """Return the names of the arguments that the command line and its configurations set, whatever their values."""
    words = _words(argv)
    names = {word[2:].split("=")[0].removeprefix("no_") for word in words if word.startswith("--")}
    return names.union(*(load_config(config).settings for config in given_configs(words)))


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """Convert values by argument name to command-line arguments, to be shown or run; None leaves an argument out."""
    words = []
    for key, value in values.items():
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            words.append(f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return words


class _Parser(argparse.ArgumentParser):
    """A parser whose help and errors are not preceded by the usage, which has a hundred lines."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"[^\s',]+", found[2]), 1)
            message += f" Did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\nSee {self.prog} --help.\n")


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field of a dataclass; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_set(values: Any, condition: str) -> bool:
    """Whether an attribute has a value, `NAME=VALUE`, or one that counts as true, `NAME`."""
    name, _, wanted = condition.partition("=")
    value = getattr(values, name)
    return bool(value) if not wanted else wanted in value if isinstance(value, list) else value == wanted


def _check_number(name: str, number: float, bounds: Mapping[str, float]) -> None:
    if isinstance(number, int) and abs(number) > LARGEST:
        bounds = {"ge": -LARGEST, "le": LARGEST, **bounds}
    is_finite = abs(number) < math.inf
    if not is_finite or not all(getattr(operator, kind)(number, limit) for kind, limit in bounds.items()):
        rules = [f"{_BOUNDS[kind]} {limit:.10g}" for kind, limit in bounds.items()]
        rules += ["finite"] * (not is_finite)
        raise ValueError(f"{name} must be {' and '.join(rules)}; got {number}.")


def _add_arguments(parser: argparse.ArgumentParser, types: Iterable[type]) -> dict[str, Any]:
    """Add the fields of dataclasses, in a group for each class that declares some; its docstring is the heading."""
    actions, groups = dict[str, Any](), dict[type, Any]()
    for cls in types:
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            declaring = next(base for base in reversed(cls.__mro__) if field.name in inspect.get_annotations(base))
            if declaring not in groups:
                groups[declaring] = parser.add_argument_group((declaring.__doc__ or "").partition("\n")[0].rstrip("."))
            about, default, kind = field.metadata["help"], default_of(field), hints[field.name]
            options: dict[str, Any] = {"help": about, "default": argparse.SUPPRESS}
            if default not in (None, {}, dataclasses.MISSING):
                options["help"] += f" (default: {str(default).replace('%', '%%')})"
            if get_origin(kind) in (Union, UnionType):
                (kind,) = {*get_args(kind)} - {type(None)}
            choices = get_args(kind) if get_origin(kind) is Literal else about.choices
            if get_origin(kind) is Literal:
                kind = type(choices[0])
            if get_origin(kind) is list:
                kind, options["nargs"] = get_args(kind)[0], "+"
            if choices is None:
                options["metavar"] = {int: "N", float: "X", Options: "MAPPING", bool: "true|false"}.get(kind, "NAME")
            else:
                options["choices"] = list(choices() if callable(choices) else choices)
            if kind is bool:
                kind, options["nargs"], options["const"] = _boolean, "?", True
                if default is True:
                    negated = {"dest": field.name, "action": "store_false", "help": argparse.SUPPRESS}
                    groups[declaring].add_argument(f"--no_{field.name}", default=argparse.SUPPRESS, **negated)
            actions[field.name] = groups[declaring].add_argument(f"--{field.name}", type=kind, **options)
            actions[field.name].can_be_empty = default == []
    return actions


def _boolean(word: str) -> bool:
    if word.lower() in ("true", "yes", "t", "y", "1"):
        return True
    if word.lower() in ("false", "no", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false; got {word!r}.")


def _words(argv: Sequence[str] | None) -> list[str]:
    """Return the words of the command line, with underscores instead of dashes in the names of options."""
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, value = word.partition("=")
        is_option = re.fullmatch(r"--[\w-]+", name)  # other words that start with dashes are texts
        words.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if is_option else word)
    return words


def given_configs(words: Sequence[str]) -> list[str]:
    """Return the names or files of `--config` on a command line."""
    parser = _Parser(allow_abbrev=False, prog=running.get(), add_help=False)
    parser.add_argument("--config", action="append", default=[])
    return parser.parse_known_args(words)[0].config


def _read_configs(
    names: Iterable[str], actions: Mapping[str, Any], recipe: str | None, places: dict[str, tuple[int, str]]
) -> dict[str, Any]:
    """Return the values of configurations by argument, and add their places."""
    values: dict[str, Any] = {}
    for config in map(load_config, names):
        other = "" if config.recipe in (None, recipe) else f"is for {command_of(config.recipe)}"
        if other and recipe:
            raise ValueError(f"{[*config.layers][-1]} {other}.")
        # The output directory that the name of a configuration implies does not replace one that is stated.
        values |= {name: v for name, v in config.settings.items() if name in actions and name not in places}
        for place, layer in config.layers.items():
            needed = layer.get("import") or []
            needed = needed if isinstance(needed, list) else [needed]
            if missing := [f"--import {name}" for name in needed if str(name) not in sys.modules]:  # it is data
                raise ValueError(f"{place} does not import its modules by itself; pass {' '.join(missing)}.")
            rank = 1 + max((rank for rank, _ in places.values()), default=0)
            for name in (name for name in layer if name in config.settings):
                if name not in actions:
                    where = f"{place}, which {other}" if other else place
                    raise ValueError(f"unknown key {name!r} in {where}.{_hint(name, actions)}")
                values[name], places[name] = config.settings[name], (rank, place)
    return values


def _hint(name: str, names: Collection[str], kind: str = "keys") -> str:
    close = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in names else [other for other in names if name in other][:3]
    close = close or difflib.get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else f" The {kind} are: {', '.join(sorted(names))}."
