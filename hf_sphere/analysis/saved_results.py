"""Results that are written as JSON and read again without loss."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

from hf_sphere.utils.files import write_json


class SavedResult:
    """What all results can; `to_dict` and `from_dict` are their own."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dictionaries, as JSON has them."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make it of what `to_dict` returned.

        Raises:
            ValueError: If something is missing.
        """
        raise NotImplementedError

    def save(self, path: str | PathLike) -> None:
        """Write JSON, without loss."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | PathLike) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: If it is something else.
        """
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
