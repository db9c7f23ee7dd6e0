"""Modules of the user's own: `--import` of the command line, and the note of a saved model on those that it needs."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_sphere.utils.checks import error_text

VARIABLE = "HF_SPHERE_IMPORT"
"""Environment variable with the names of modules, separated by commas."""

REQUIRES_IMPORT = "requires_import"
"""Key of a saved configuration: names of the modules that define its head and backbone."""


def import_modules(argv: Sequence[str]) -> list[str]:
    """Import the modules of `--import` and of the environment variable.

    The current folder is added to `sys.path`, which a console script does not have there.

    Returns:
        The other words of the command line, and `--import=NAME` of each module.

    Raises:
        ValueError: If a module cannot be imported, with its own error, or a name is not one of a module.
    """
    words, left = list[str](), list(argv)
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    while left:
        option, equals, value = (word := left.pop(0)).partition("=")
        if option == "--import":
            names += (value if equals else left.pop(0) if left else "").split(",")
        else:
            words.append(word)
    names = list(dict.fromkeys(name.strip() for name in names))
    if names and not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    for name in names:
        _import(name)
    return words + [f"--import={name}" for name in names]


def _import(name: str) -> None:
    if name.endswith(".py") or not is_module_name(name):
        parts = os.path.relpath(name or ".").removesuffix(".py").replace(os.sep, ".")
        hint = f"; did you mean {parts}?" if name.endswith(".py") and is_module_name(parts) else "."
        raise ValueError(f"--import requires the name of a module, such as my_package.my_module; got {name!r}{hint}")
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"--import {name}: there is no module {error.name} in {os.getcwd()} or the Python environment. Start "
                "the command in the folder that contains it, or install it."
            ) from error
        # The deepest line of a module's own code, not that of a function it has called.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
        file, line = (frames[-1].filename, frames[-1].lineno) if frames else (name, None)
        text = "it calls sys.exit" if isinstance(error, SystemExit) else error_text(error)
        if isinstance(error, SyntaxError) and error.filename:
            file, line, text = error.filename, error.lineno, error.msg
        raise ValueError(
            f"--import {name}: {file}, line {line}: {type(error).__name__}: {text.rstrip('.')}. Correct the module, or "
            "leave out --import."
        ) from error


def is_module_name(name: Any) -> bool:
    """Whether a value, which may come from a file of others, is the dotted name of a module, of at most 200 letters."""
    return isinstance(name, str) and len(name) <= 200 and all(part.isidentifier() for part in name.split("."))


def defining_modules(objects: Iterable[Any]) -> list[str]:
    """Return the modules that define objects, without those of this library, transformers, timm and scripts."""
    modules = [value.__module__ for value in objects]
    known = ("hf_sphere", "transformers", "timm", "__main__", "builtins")
    return [name for name in dict.fromkeys(modules) if name.partition(".")[0] not in known]


def explain_requirement(settings: Mapping[str, Any]) -> str:
    """Return the sentence on the modules that a configuration names, or "" if it names none; nothing is imported."""
    names = settings.get(REQUIRES_IMPORT)
    names = [name for name in names if is_module_name(name)][:2] if isinstance(names, list) else []
    if not names:
        return ""
    code, options = "; ".join(f"import {name}" for name in names), " ".join(f"--import {name}" for name in names)
    return (
        f"It requires a module of its author, which is never imported by itself: if you trust it, call `{code}` before "
        f"loading, or pass `{options}` to hf-sphere."
    )


def check_unique(kind: str, name: str, module: str, before: str | None) -> None:
    """Raise a ValueError if a name that a module registers is that of a part of the module `before`, or of a package.

    A part of a script can be replaced.
    """
    if before not in (None, module, "__main__"):
        raise ValueError(f"the name {name!r} of a {kind} of {module} is taken by {before}; choose another one.")
