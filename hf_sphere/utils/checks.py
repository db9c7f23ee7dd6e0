"""Checks of numbers, paths, texts, names, options and optional packages, and the texts of errors."""

import importlib.util
import inspect
import numbers
import operator
import os
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin


def error_text(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_extra(extra: str, purpose: str, *packages: str) -> None:
    """Raise an `ImportError` that names the extra to install, if one of its packages is missing."""
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise ImportError(f"{purpose} requires {' and '.join(packages)}: pip install 'hf_sphere[{extra}]'.")


def check_not_text(what: str, values: Any) -> None:
    """Raise an error for a single text instead of a list, whose letters would be taken for its items."""
    if isinstance(values, str | bytes):
        raise ValueError(f"{what} must be a list of texts; got a single one: pass [{values!r:.80}].")


def text_list(what: str, texts: Iterable[str]) -> list[str]:
    """Return texts as a list; a single text, no texts, and what is no text are errors."""
    check_not_text(what, texts)
    listed = list(texts)
    if not listed or not all(isinstance(text, str) for text in listed):
        other = next((repr(text) for text in listed if not isinstance(text, str)), "none")
        raise ValueError(f"{what} must be a list of texts, at least one; got {other:.80}.")
    return listed


def check_regular(path: str | os.PathLike) -> None:
    """Raise an error if there is a pipe, socket or device instead of a file, since reading might not end."""
    if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is not a regular file but a pipe, socket or device; remove it, or name a file.")


def check_color(color: Sequence[int]) -> None:
    """Raise a ValueError unless a color is three integers from 0 to 255."""
    if len(color) != 3 or not all(value in range(256) for value in color):
        raise ValueError(f"background_color must be red, green and blue, integers from 0 to 255; got {color!r}.")


def check_exclusive(purpose: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if several of the options, by name, are set: they do the same thing."""
    if len(stated := [*filter(options.get, options)]) > 1:
        raise ValueError(f"{' and '.join(stated)} are two ways to {purpose}; use only one of them.")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return an integer in a range as `int` (numpy integers included), or raise a ValueError."""
    try:
        is_bool = type(value).__name__ in ("bool", "bool_")  # of numpy, too, which has two names for it
        integer = None if is_bool else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or integer < minimum or (maximum is not None and integer > maximum):
        limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} must be an integer {limits}; got {value!r}.")
    return integer


def check_seed(seed: Any) -> int:
    """Return a seed as `int`, or raise a ValueError."""
    return check_integer("seed", seed, 0, 2**63 - 1)


def check_number(name: str, value: Any, interval: str) -> Any:
    """Return a number of an interval, such as `[0, 1)` or `(0, inf)`, or raise a ValueError."""
    low, high = map(float, interval[1:-1].split(","))
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    excluded = [*[low] * (interval[0] == "("), *[high] * (interval[-1] == ")")]
    if not is_number or not low <= value <= high or value in excluded:
        raise ValueError(f"{name} must be a number in {interval}; got {value!r}.")
    return value


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """Return a value that is one of the choices, or raise a ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")
    return value


def is_module_name(name: Any) -> bool:
    """Whether a value, which may come from a file of others, is the name of a module, of at most 100 characters."""
    return isinstance(name, str) and len(name) <= 100 and all(part.isidentifier() for part in name.split("."))


def check_unique(kind: str, name: str, module: str, before: str | None) -> None:
    """Raise a ValueError if a module registers a name that another module has registered, unless that is a script."""
    if before not in (None, module, "__main__"):
        raise ValueError(f"{module} cannot define the {kind} {name!r}: {before} has this name; choose another.")


def keyword_options(cls: type) -> dict[str, inspect.Parameter]:
    """Return the keyword-only arguments of a constructor by name, including those of the base classes it passes on."""
    options: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            passes_on = False
            for parameter in inspect.signature(base.__init__).parameters.values():  # type: ignore[misc]
                passes_on |= parameter.kind is parameter.VAR_KEYWORD
                if parameter.kind is parameter.KEYWORD_ONLY:
                    options.setdefault(parameter.name, parameter)
            if not passes_on:
                break
    return options


def check_names(owner: str, options: Collection[str], valid: Collection[str]) -> None:
    """Raise a `ValueError` if an option of the owner, such as `head 'vmf'`, is not valid."""
    if unknown := sorted(set(options) - set(valid)):
        listed = ", ".join(valid) or "none"
        raise ValueError(f"{owner} has no option {', '.join(unknown)}; its options are: {listed}.")


def check_types(owner: str, options: Mapping[str, Any], valid: Mapping[str, inspect.Parameter]) -> None:
    """Raise a `ValueError` if an option of the owner does not have the type of its annotation."""
    for name, value in options.items():
        if not _has_type(value, valid[name].annotation):
            expected = inspect.formatannotation(valid[name].annotation).replace("typing.", "")
            raise ValueError(f"option {name} of {owner} must be of type {expected}; got {value!r}.")


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation; integers are also real numbers, and booleans are not."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(_has_type(value, alternative) for alternative in get_args(hint))
    if get_origin(hint) is Literal:
        return type(value) in map(type, get_args(hint))  # the class says which values it has
    if not isinstance(hint, type) or hint is inspect.Parameter.empty:
        return True  # not a type that can be checked
    if isinstance(value, bool) and hint in (int, float):
        return False
    return isinstance(value, (int, float) if hint is float else hint)
