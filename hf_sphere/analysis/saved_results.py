"""Results that are saved as JSON and loaded without loss."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Self

from hf_sphere.utils.files import read_json, write_json, write_text


class SavedResult:
    """Base class of result dataclasses; subclasses define `_from_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Create a result from the output of `to_dict`.

        Raises:
            ValueError: If a field is missing.
        """
        try:
            return cls._from_dict(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the content is not the output of {cls.__name__}.to_dict: {error!r}.") from error

    @classmethod
    def _from_dict(cls, content: Mapping[str, Any]) -> Self:
        raise NotImplementedError

    def save(self, path: str | PathLike) -> None:
        """Write a JSON file."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | PathLike) -> Self:
        """Read a file written by `save`.

        Raises:
            ValueError: If the file has other content.
        """
        return cls.from_dict(read_json(path))


class SavedAccuracies(dict[str, float]):
    """Accuracies by name, appended to a file one by one, so that an interrupted run can resume.

    Args:
        path: A file of JSON lines.
        prepare: Called once, before the first line is written.
        read: Whether to read the existing lines and append to them.
    """

    def __init__(self, path: Path, prepare: Callable[[], None], *, read: bool) -> None:
        super().__init__()
        self._path = path
        self._prepare: Callable[[], None] | None = prepare
        if read and path.is_file():
            text = path.read_text(encoding="utf-8")
            complete = text[: text.rfind("\n") + 1]  # the last line may be incomplete after a kill
            try:
                for line in complete.splitlines():
                    self.update({name: float(value) for name, value in json.loads(line).items()})
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is damaged: {error}. Remove it to measure again.") from error
            if complete != text:
                write_text(path, complete)

    def __setitem__(self, name: str, value: float) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        super().__setitem__(name, value)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value}) + "\n")
