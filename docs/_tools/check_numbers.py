"""Check that the measured numbers in the text of pages are those of tables that the report writes, or of its files.

    python docs/_tools/check_numbers.py [pages]

A measured number has a point and is in percent, points, times or milliseconds, in an interval `(a to b)`, after a `±`,
or in the row of a table that the report does not write, with two digits after the point. It must stand, or round to the
same, in a table of the report on its page or on a page that this links to, or in a file of `benchmarks/results` that a
comment `<!-- numbers: file, file -->` of the paragraph names. Numbers that are no measurements, such as goals, are in
the comment themselves, and a comment with words is the reason of a paragraph whose numbers have no file.
"""

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
DECIMAL = re.compile(r"\d[\d,]*\.\d+|\.\d+")
MEASURED = re.compile(
    r"(?<![\w.,])(\d[\d,]*\.\d+)(?=(?:(?:,| to| and| or| against| instead of) [-+]?\d[\d.]*)* "
    r"?(?:%|points?\b|times\b|ms\b)| to [-+]?\d+\.\d)|(?<= to )[-+]?(\d+\.\d+)(?=\))|(?<=± )(\d+\.\d+)"
)
CELL = re.compile(r"(?<![\w.,])(\d*\.\d{2,})(?![\w.])")


def unknown_numbers(page: Path) -> Iterator[str]:
    """Yield a line per measured number of a page that is in no table and no file."""
    text = page.read_text("utf-8")
    pages = {page, *((page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+\.md)", text))}
    for paragraph in re.split(r"\n\s*\n", CODE.sub("", TABLE.sub("", text))):
        named = [
            name.strip() for found in re.findall("<!-- numbers: (.*?) -->", paragraph) for name in found.split(",")
        ]
        if any(" " in name for name in named):
            continue
        files = [name for name in named if not re.fullmatch(r"[\d.]+", name)]
        known = [float(name) for name in named if name not in files]
        known += [value for path in pages for value in values_of_page(path)]
        known += [value for name in files for value in values_of_file(name)]
        pattern = CELL if paragraph.startswith("|") else MEASURED
        numbers = [next(filter(None, found.groups())).replace(",", "") for found in pattern.finditer(paragraph)]
        for number in numbers:
            digits = len(number.partition(".")[2])
            if not any(float(number) in (round(value, digits), round(100 * value, digits)) for value in known):
                yield f"{page.relative_to(ROOT)}: {number} in {' '.join(paragraph.split())[:70]!r}"


@functools.cache
def values_of_page(page: Path) -> list[float]:
    """Return the numbers in the tables that the report writes on a page."""
    tables = TABLE.findall(page.read_text("utf-8"))
    return [float(found.replace(",", "")) for table in tables for found in DECIMAL.findall(table)]


@functools.cache
def values_of_file(name: str) -> list[float]:
    """Return the values of a file of `benchmarks/results`."""
    return [*_values(json.loads((FILES / f"{name}.json").read_text("utf-8")))]


def _values(content: Any) -> Iterator[float]:
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _values(part)
    elif isinstance(content, int | float):
        yield abs(float(content))


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] for line in unknown_numbers(Path(name).resolve())]
    sys.exit("\n".join(lines) or 0)
