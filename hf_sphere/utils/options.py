"""Options by name, as configurations give them: the keyword-only arguments of a class."""

import inspect
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin


def keyword_options(cls: type) -> dict[str, inspect.Parameter]:
    """Return the keyword-only arguments of a constructor by name, including those of the base classes it passes on."""
    options: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            options |= {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in options}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
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
