"""Modules with parts of the user's own, which `--import` and the variable `HF_SPHERE_IMPORT` name."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from hf_sphere.utils.checks import error_text

imported: dict[str, None] = {}
"""Names of the modules, for further processes."""


def import_modules(argv: Sequence[str]) -> list[str]:
    """Import the modules that a command line and the environment name, as if Python were started in this folder.

    Returned are the other words of the command line, and `--import=NAME` of each module. A module that cannot be
    imported is a ValueError with its own error.
    """
    words, left, text = list[str](), list(argv), os.environ.get("HF_SPHERE_IMPORT", "")
    names = text.split(",") if text else []
    while left:
        option, equals, value = (word := left.pop(0)).partition("=")
        if option == "--import":
            names += (value if equals else left.pop(0) if left else "").split(",")
        else:
            words.append(word)
    names = list(dict.fromkeys(name.strip() for name in names))
    if names and not {"", os.getcwd()} & {*sys.path}:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    for name in names:
        _import(name)
        imported[name] = None
    return words + [f"--import={name}" for name in names]


def _import(name: str) -> None:
    if name.endswith(".py") or not is_module_name(name):
        module = os.path.relpath(name or ".").removesuffix(".py").replace(os.sep, ".")
        hint = f"; did you mean {module}?" if name.endswith(".py") and is_module_name(module) else "."
        raise ValueError(f"--import requires the name of a module, such as my_package.my_module; got {name!r}{hint}")
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = f"neither the folder {os.getcwd()} nor the Python environment has it"
            where += ", so start in its folder, or install it"
            raise ValueError(f"--import {name}: there is no module {error.name}; {where}.") from error
        # The deepest line of a module itself, not that of a function which it calls.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
        file, line = (frames[-1].filename, frames[-1].lineno) if frames else (name, None)
        text = "it calls sys.exit" if isinstance(error, SystemExit) else error_text(error).rstrip(".")
        if isinstance(error, SyntaxError) and error.filename:
            file, line, text = error.filename, error.lineno, error.msg
        advice = "Correct the module, or leave out --import."
        raise ValueError(f"--import {name}: {file}, line {line}: {type(error).__name__}: {text}. {advice}") from error


def is_module_name(name: Any) -> bool:
    """Whether a value, which may come from a file of others, is the name of a module, of at most 100 characters."""
    return isinstance(name, str) and len(name) <= 100 and all(part.isidentifier() for part in name.split("."))


def check_unique(kind: str, name: str, module: str, before: str | None) -> None:
    """Raise a ValueError if a module registers a name that another module has registered, unless that is a script."""
    if before not in (None, module, "__main__"):
        raise ValueError(f"{module} cannot define the {kind} {name!r}: {before} has this name; choose another.")
