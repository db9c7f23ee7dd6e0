"""Values that are appended to a file as they are computed."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_sphere.utils.checks import error_text


class JsonLines(dict[Any, Any]):
    """Values by key, each appended to a file as a line of JSON, so that an interrupted run can continue.

    Lists in keys and values are read as tuples. Several processes can append to a file; each has read the lines that it
    had in the beginning. An incomplete last line is ignored; after a kill, the next value replaces it. `prepare` is
    called once, before the first line is written.
    """

    def __init__(
        self, path: str | os.PathLike, *, read: bool = True, prepare: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.path, self._prepare = Path(path), prepare
        content = self.path.read_bytes() if read and self.path.exists() else b""
        try:
            for line in content[: content.rfind(b"\n") + 1].splitlines():
                key, value = map(_as_tuples, json.loads(line))
                super().__setitem__(key, value)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error_text(error)}. Remove it, or choose another file.") from error

    def __setitem__(self, key: Any, value: Any) -> None:
        self.add({key: value})

    def add(self, values: Mapping[Any, Any]) -> None:
        """Add values, and append them to the file in one call."""
        self._prepare()
        self._prepare = lambda: None
        self.update(values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read()[-1:] not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            # One call, so that the lines of other processes are complete.
            file.write("".join(json.dumps([key, value]) + "\n" for key, value in values.items()).encode())


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
