"""Command-line arguments from dataclasses: declared once, set in YAML files, on the command line, or both.

Nothing heavy is imported here, so that `--help` and a mistyped argument return at once.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from hf_sphere.utils.renamed import rename_options


class _YamlLoader(yaml.SafeLoader):
    """YAML loader that parses 1e-3 as a number, as YAML 1.2 and JSON do; PyYAML requires 1.0e-3.

    Aliases, with which a short text describes billions of values, are refused, and keys that are not unique texts.
    """

    has_aliases = False

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if not self.has_aliases and getattr(event, "anchor", None):
            problem = "anchors and aliases are not supported; repeat the value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, names = super().compose_mapping_node(anchor), set[str]()
        for key, _ in node.value:
            is_text = key.tag.endswith((":str", ":merge") if self.has_aliases else ":str")
            if not is_text or key.value in names:
                problem = f"the key {key.value!r} occurs twice" if is_text else "a key is not a text; quote it"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return node


class _AliasLoader(_YamlLoader):
    """Loader of files that are part of this repository."""

    has_aliases = True


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


SEED: dict[str, Any] = {"ge": 0, "le": 2**32 - 1}
"""Bounds of seeds, those of NumPy."""

LARGEST = 2**31 - 1
"""Largest absolute value of integers without another bound; products of two of them fit into 64 bits."""

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Arguments:
    """Base class of argument dataclasses: numbers must be finite and within their bounds, outputs must be named."""

    def __init_subclass__(cls) -> None:
        """Add the help texts of the fields to the docstring, for `help` in Python."""
        own = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        fields = getattr(cls, "__dataclass_fields__", {}) | own
        lines = [
            f"    {name}: {field.metadata['help'].text}" for name, field in fields.items() if "help" in field.metadata
        ]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or "").split("\n\nArgs:\n")[0], "\nArgs:", *lines])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value == "" and field.name in ("output", "output_dir"):
                raise ValueError(f"--{field.name} must not be empty.")
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    _check_number(field.name, number, _about(field).bounds)


class Options(dict[str, Any]):
    """A mapping that can be written as JSON or YAML on the command line: `'{scaling: 5.0}'`."""

    def __init__(self, value: str | Iterable[tuple[str, Any]] = ()) -> None:
        if isinstance(value, str):
            try:
                parsed, problem = yaml.load(value, Loader=_YamlLoader), ""
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                parsed, problem = None, f" ({getattr(error, 'problem', error)})"
            if not isinstance(parsed, dict):
                # The only exception whose message argparse shows.
                raise argparse.ArgumentTypeError(
                    f"expected a mapping such as '{{scaling: 5.0}}', got {value!r}{problem}."
                )
            value = parsed.items()
        super().__init__(value)


class _Help(str):
    """A help text as argparse expects it, with what is no option of argparse, to which HfArgumentParser passes all."""

    def __new__(cls, text: str, *_: Any) -> "_Help":
        return super().__new__(cls, text.replace("%", "%%"))

    def __init__(self, text: str, choices: Any, bounds: Mapping[str, float]) -> None:
        self.text, self.choices, self.bounds = text, choices, bounds


def _about(field: dataclasses.Field) -> _Help:
    return field.metadata.get("help") or _Help("", None, {})


def argument(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None,
    **bounds: float,
) -> Any:
    """Declare a field of an argument dataclass.

    Args:
        default: Default value (a tuple for a list), or a class such as `list` or `Options` to instantiate. Required
            arguments have none.
        help: Shown by `--help`.
        choices: Valid values, or a function that is called for them when the command line is parsed. Not needed for
            fields of type `Literal`.
        **bounds: `ge`, `gt`, `le` or `lt`, for numbers and lists of numbers.
    """
    metadata = {"help": _Help(help, choices, bounds)}
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_arguments(types: Sequence[type], argv: Sequence[str] | None = None, description: str = "") -> tuple[Any, ...]:
    """Read argument dataclasses from `--config file.yaml` and the command line, which takes precedence.

    Args:
        types: Dataclasses; one instance of each is returned.
        argv: Command-line arguments without the program name; `sys.argv[1:]` if None.
        description: Shown by `--help`.

    Raises:
        SystemExit: On an unknown key or a value of the wrong type, with a message that includes it.
    """
    usage = "%(prog)s [--config FILE] [--OPTION VALUE ...]"
    parser = _Parser(description=description, usage=usage, formatter_class=_Formatter, allow_abbrev=False)
    parser.add_argument(
        "--config", action="append", default=[], help="YAML file of arguments; of several, later ones take precedence."
    )
    for cls in types:
        _add_arguments(parser, cls)
    names = [field.name for cls in types for field in dataclasses.fields(cls)]
    words = _with_new_names(sys.argv[1:] if argv is None else argv, names)
    try:
        given, unknown = parser.parse_known_args(
            [w for path in _config_files(words) for w in _argv_of(path, names)] + words
        )
        if unknown:
            name = unknown[0].partition("=")[0]
            parser.error(f"unknown argument {name!r}.{_hint(name.lstrip('-').replace('-', '_'), names)}")
        return tuple(cls(**{f.name: getattr(given, f.name) for f in dataclasses.fields(cls)}) for cls in types)
    except ValueError as error:
        parser.error(str(error))


def given_arguments(argv: Sequence[str] | None = None) -> set[str]:
    """Return the names of the arguments that the command line and its YAML files set, whatever their values."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    for path in _config_files(words):
        names |= set(read_config(path) or {})
    return {name.removeprefix("no_") for name in names}


def read_config(path: str | Path, *, has_aliases: bool = False) -> Any:
    """Return the contents of a YAML file, which may have aliases only if nobody else has written it.

    Raises:
        ValueError: If it cannot be read; the message includes the path.
    """
    try:
        check_regular(path)  # pipes cannot be read twice
        text = Path(path).read_text(encoding="utf-8")
        if len(text) > 100_000:  # PyYAML needs seconds for them
            raise ValueError("it has more than 100,000 characters")
        return yaml.load(text, Loader=_AliasLoader if has_aliases else _YamlLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error_text(error)}") from error


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """Convert values by argument name to command-line arguments; None leaves an argument out.

    Raises:
        ValueError: If an item of a list would be taken for an option.
    """
    words = []
    for key, value in values.items():
        if value is None:
            continue
        if key == "mixed_precision" and value is False:
            value = "no"  # YAML parses a bare `no` as False
        if isinstance(value, list):
            items = [str(item) for item in value]
            for item in items:
                if item.startswith("-") and not re.fullmatch(r"-\d*\.?\d*(e[-+]?\d+)?", item, re.IGNORECASE):
                    raise ValueError(f"the items of {key} must not begin with a dash; got {item!r}.")
            words += [f"--{key}", *items]
        else:
            words.append(f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return words


def error_text(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class _Formatter(argparse.HelpFormatter):
    """Shows an option once, without its variant with dashes."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        action.option_strings = [name for name in names if "-" not in name[2:]]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = names


class _Parser(argparse.ArgumentParser):
    """A parser whose help and errors are not preceded by the usage, which has a hundred lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\nSee {self.prog} --help.\n")


def _check_number(name: str, number: float, bounds: Mapping[str, float]) -> None:
    if isinstance(number, int) and abs(number) > LARGEST:
        bounds = {"ge": -LARGEST, "le": LARGEST, **bounds}
    rules = [f"{_BOUNDS[kind]} {limit:.10g}" for kind, limit in bounds.items()]
    if isinstance(number, float) and math.isinf(number):
        rules.append("finite")
    elif number == number and all(  # not NaN
        getattr(operator, kind)(number, limit) for kind, limit in bounds.items()
    ):
        return
    raise ValueError(f"{name} must be {' and '.join(rules) or 'a number'}; got {number}.")


def _add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add the fields of a dataclass, in a group for each class that declares some; its docstring is the heading."""
    hints, groups = get_type_hints(cls), dict[type, Any]()
    for field in dataclasses.fields(cls):
        declaring = next(base for base in reversed(cls.__mro__) if field.name in inspect.get_annotations(base))
        if declaring not in groups:
            groups[declaring] = parser.add_argument_group((declaring.__doc__ or "").partition("\n")[0].rstrip("."))
        group = groups[declaring]
        about = _about(field)
        options: dict[str, Any] = {"help": str(about)}
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = default
            if default is not None and default != {}:
                options["help"] += f" (default: {str(default).replace('%', '%%')})"
        kind = _without_none(hints[field.name])
        choices = about.choices
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            kind = type(choices[0])
        if choices is not None:
            options["choices"] = list(choices() if callable(choices) else choices)
        if get_origin(kind) is list:
            kind, options["nargs"] = get_args(kind)[0], "+"
        flags = [f"--{field.name}"]
        if "_" in field.name:
            flags.append(f"--{field.name.replace('_', '-')}")
        if kind is bool:
            kind, options["nargs"], options["const"] = _boolean, "?", True
            options["metavar"] = "true|false"
            if default is True:
                negated = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
                group.add_argument(*negated, dest=field.name, action="store_false", help=argparse.SUPPRESS)
        group.add_argument(*flags, type=kind, **options)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint


def _boolean(word: str) -> bool:
    if word.lower() in ("true", "yes", "t", "y", "1"):
        return True
    if word.lower() in ("false", "no", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false; got {word!r}.")


def _config_files(words: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    return parser.parse_known_args(words)[0].config


def _argv_of(path: str, names: list[str]) -> list[str]:
    """Convert a YAML file to command-line arguments, so that both are validated and converted in the same way."""
    values = read_config(path)
    if values is None:
        return []
    if not isinstance(values, dict):
        raise ValueError(f"the configuration {path} must be a mapping of arguments to values.")
    values = dict(_with_new_name(str(key), value, names) for key, value in values.items())
    for key in values:
        if key not in names:
            raise ValueError(f"unknown key {key!r} in {path}.{_hint(str(key), names)}")
    return to_argv(values)


def _with_new_names(words: Sequence[str], names: list[str]) -> list[str]:
    """Return command-line arguments with the new names of options."""
    left, renamed = list(words), list[str]()
    while left:
        word = left.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        is_pair = not equals and bool(left) and not left[0].startswith("--")
        old = name.replace("-", "_"), left[0] if is_pair else value or "true"
        new = _with_new_name(*old, names) if word.startswith("--") else old
        if new == old:
            renamed.append(word)
        else:
            renamed.append(f"--{new[0]}={new[1]}")
            del left[:is_pair]
    return renamed


def _with_new_name(name: str, value: Any, names: list[str]) -> tuple[str, Any]:
    """Return name and value of an option, and print a message if they are new."""
    ((new, new_value),) = rename_options({name: value}).items()
    if new not in names or (name in names and new != name) or (new, new_value) == (name, value):
        return name, value
    shown = str(new_value).lower() if isinstance(new_value, bool) else new_value
    print(f"{name} {value} is now {new} {shown}; the old name will be removed.", file=sys.stderr)
    return new, new_value


def _hint(name: str, names: list[str]) -> str:
    initials = [known for known in names if "".join(word[:1] for word in known.split("_")) == name]  # such as lr
    close = initials or [known for known in names if name in known][:3] or difflib.get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else f" The keys are: {', '.join(sorted(names))}."


def check_extra(extra: str, purpose: str, *packages: str) -> None:
    """Raise an `ImportError` that names the extra to install, if one of its packages is missing."""
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise ImportError(f"{purpose} requires {' and '.join(packages)}: pip install 'hf_sphere[{extra}]'.")


def check_regular(path: str | os.PathLike) -> None:
    """Raise an error if there is a pipe, socket or device, of which reading might not end, instead of a file."""
    if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is not a regular file but a pipe, socket or device; remove it, or name a file.")


def check_color(color: Sequence[int]) -> None:
    """Raise a ValueError unless a color is three integers from 0 to 255."""
    if len(color) != 3 or not all(value in range(256) for value in color):
        raise ValueError(f"background_color must be red, green and blue, integers from 0 to 255; got {color!r}.")
