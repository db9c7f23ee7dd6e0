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
        if name.endswith(".py") or not is_module_name(name):
            raise ValueError(f"--import requires the name of a module, such as my_package.my_module; got {name!r}.")
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            # The deepest line of a module itself, not that of a function which it calls.
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
            file, line = (frames[-1].filename, frames[-1].lineno) if frames else (name, None)
            text = error_text(error).rstrip(".")
            if isinstance(error, SyntaxError):
                file, line, text = error.filename or file, error.lineno, error.msg
            where = f"{file}, line {line}" if line else f"started in {os.getcwd()}"
            raise ValueError(f"--import {name}: {where}: {type(error).__name__}: {text}. Correct it.") from error
        imported[name] = None
    return words + [f"--import={name}" for name in names]


def is_module_name(name: Any) -> bool:
    """Whether a value, which may come from a file of others, is the name of a module, of at most 100 characters."""
    return isinstance(name, str) and len(name) <= 100 and all(part.isidentifier() for part in name.split("."))


def check_unique(kind: str, name: str, module: str, before: str | None) -> None:
    """Raise a ValueError if a module registers a name that another module has registered, unless that is a script."""
    if before not in (None, module, "__main__"):
        raise ValueError(f"{module} cannot define the {kind} {name!r}: {before} has this name; choose another.")
