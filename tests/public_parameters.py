"""The parameters of public functions, methods and classes."""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass


def public_parameters(packages: Iterable[str], *, records: bool) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield parameters by `package.function.name` or `package.Class.method.name`, those of records only on request."""
    for package in packages:
        module = importlib.import_module(f"hf_sphere.{package}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            is_record = is_dataclass(value) or hasattr(value, "_fields")
            functions = {} if is_record and not records else {name: value}
            if inspect.isclass(value):
                functions |= {f"{name}.{member}": getattr(value, member) for member in dir(value) if member[0] != "_"}
            for label, function in functions.items():
                if callable(function) and str(getattr(function, "__module__", "")).startswith("hf_sphere"):
                    with suppress(ValueError):  # a dictionary of transformers has no signature
                        for parameter in inspect.signature(function).parameters.values():
                            yield f"{package}.{label}.{parameter.name}", parameter
