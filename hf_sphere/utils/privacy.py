"""Removal of access tokens and absolute paths from what is written."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_FOLDERS = re.compile(r"(?<![\w./:~])(?:/[^/\s'\",{}]+)+/(?=[^/\s])")  # not in URLs and relative paths


def hide_tokens(value: Any) -> Any:
    """Replace access tokens of the Hub in a text, or in all texts of a mapping or list."""
    return _map_texts(value, lambda text: _TOKEN.sub("<token>", text))


def hide_private(value: Any) -> Any:
    """Replace access tokens, and also absolute paths.

    A path becomes relative to the working directory if it is below it; otherwise only its last part is kept.
    """
    return _map_texts(hide_tokens(value), _hide_folders)


def _hide_folders(text: str) -> str:
    if here := str(Path.cwd()).rstrip("/"):
        text = re.sub(rf"(?<![\w.~]){re.escape(here)}/", "", text)
    return Path(text).name or text if Path(text).is_absolute() else _FOLDERS.sub("", text)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
