"""Modules with parts of the user's own, which `--import` and the variable `HF_SPHERE_IMPORT` name."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

imported: dict[str, None] = {}
"""Names of the modules, for further processes."""


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
    names = list(dict.fromkeys(name.strip() for name in names))
    if names and not {"", os.getcwd()} & {*sys.path}:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    for name in names:
        importlib.import_module(name)
        imported[name] = None
    return words + [f"--import={name}" for name in names]


def is_module_name(name: Any) -> bool:
    """Whether a value, which may come from a file of others, is the name of a module, of at most 100 characters."""
    return isinstance(name, str) and len(name) <= 100 and all(part.isidentifier() for part in name.split("."))


def check_unique(kind: str, name: str, module: str, before: str | None) -> None:
    """Raise a ValueError if a module registers a name that another module has registered, unless that is a script."""
    if before not in (None, module, "__main__"):
        raise ValueError(f"{module} cannot define the {kind} {name!r}: {before} has this name; choose another.")
