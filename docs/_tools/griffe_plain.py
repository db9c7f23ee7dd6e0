"""Extension of griffe for docstrings that are plain text with code in backticks."""

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Read `Example:` as `Examples:`, which is code, and keep `<x, y>` from being read as a tag of HTML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring:
            lines = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE).splitlines()
            obj.docstring.value = "\n".join(map(escape, lines))


def escape(line: str) -> str:
    """Escape `<` in a line, but not in code."""
    if re.match(r"\s*(>>>|\.\.\.)", line):
        return line
    parts = line.split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))
