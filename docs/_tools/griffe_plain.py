"""Extension of griffe for docstrings that are plain text with code in backticks."""

import importlib
import re
import subprocess
import sys
from typing import Any

import griffe

LINE = 88
"""Longest line of an example, with its prompt; longer ones are wrapped."""
STATEMENT = re.compile(r"^( *)>>> (.*(?:\n\1\.\.\..*)*)", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Read `Example:` as `Examples:`, which is code, and keep `<x, y>` from being read as a tag of HTML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring:
            text = STATEMENT.sub(wrap, obj.docstring.value)
            lines = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE).splitlines()
            obj.docstring.value = "\n".join(map(escape, lines))

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """List the options of a class with their help; its signature has their defaults alone."""
        options = {
            name: attribute
            for name, attribute in cls.attributes.items()
            if isinstance(attribute.value, griffe.ExprCall) and str(attribute.value.function) == "argument"
        }
        if options and cls.docstring:
            fields = getattr(importlib.import_module(cls.module.path), cls.name).__dataclass_fields__
            lines = [f"    {name}: {fields[name].metadata['help'].replace('%%', '%')}" for name in options]
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])
        for attribute in options.values():
            default = attribute.value.arguments[0]
            attribute.value = None if isinstance(default, griffe.ExprKeyword) else default


def wrap(found: re.Match[str]) -> str:
    """Wrap a statement of an example if a line of it is too long; a comment behind it goes above."""
    indent, code = found[1], re.sub(r"^ *\.\.\. ?", "", found[2], flags=re.MULTILINE)
    if max(map(len, code.splitlines())) <= LINE - 4:
        return found[0]
    before = re.sub(r"^( *)(\S.*)  (# (?!doctest).*)$", r"\1\3\n\1\2", code, flags=re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(LINE - 4), "-"]
    lines = subprocess.run(command, input=before, capture_output=True, text=True, check=True).stdout.splitlines()
    starts = [number == 0 or lines[number - 1].startswith("#") for number in range(len(lines))]
    return "\n".join(f"{indent}{'>>>' if first else '...'} {line}" for first, line in zip(starts, lines, strict=True))


def escape(line: str) -> str:
    """Escape `<` in a line, but not in code."""
    if re.match(r"\s*(>>>|\.\.\.)", line):
        return line
    parts = line.split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))
