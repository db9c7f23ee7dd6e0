"""Tables and pages as HTML, in which texts of others cannot be markup; a page is one file that needs no network."""

import base64
import html
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere.utils.files import write_text
from hf_sphere.utils.texts import printable

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
else:
    DataFrame = Any  # pandas takes time to import; what makes a table imports it

MOST_ROWS = 20
"""Rows of a table that a notebook shows."""

MOST_BYTES = 15_000_000
"""Size of the cards of a page."""

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 1200px; padding: 16px; font: 16px/1.5 system-ui, sans-serif; }
body { overflow-wrap: anywhere; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin: 1.6em 0 0.4em; }
.scroll { overflow-x: auto; overflow-wrap: normal; } table { border-collapse: collapse; font-size: 0.9em; }
td, th { padding: 3px 12px 3px 0; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); gap: 8px; margin: 8px 0 20px; }
.cards.texts { grid-template-columns: 1fr; }
.card { padding: 6px; border: 1px solid #8885; border-radius: 6px; font-size: 0.8em; line-height: 1.35; }
.card img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; }
img.small { image-rendering: pixelated; }
.figure { max-width: 100%; min-width: 640px; } .flag { color: #bc4c00; font-weight: 600; } code { font-size: 0.9em; }
"""


class Table:
    """A result that a notebook shows as a table: its `repr`, and the first rows of its `to_pandas()`."""

    def to_pandas(self) -> DataFrame:
        """Return the rows."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        frame = self.to_pandas()
        more = f"<p>and {len(frame) - MOST_ROWS:,} more rows: to_pandas()</p>" * (len(frame) > MOST_ROWS)
        return f"<p>{escape(repr(self))}</p>{draw_table(frame.head(MOST_ROWS))}{more}"


def escape(value: Any) -> str:
    """Return a text that is no markup, on one line, without control characters."""
    return html.escape(printable(" ".join(str(value).split())))


def draw_table(frame: DataFrame) -> str:
    """Return a table."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in frame.columns)]
    for row in frame.itertuples(index=False):
        cells = ("" if value is None or value != value else value for value in row)
        texts = (f"{cell:.4g}" if isinstance(cell, float) else escape(cell) for cell in cells)
        lines.append("".join(f"<td>{text}</td>" for text in texts))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def markdown_rows(table: Sequence[Sequence[str]], rule: str = "") -> list[str]:
    """Return the lines of a table in Markdown, whose first row is the heading; `rule` is the line below it."""
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in table]
    return [lines[0], rule or "|" + "---|" * len(table[0]), *lines[1:]]


def draw_markdown(lines: Iterable[str]) -> str:
    """Return lines of headings, tables and paragraphs of Markdown, as this library writes them."""
    parts, rows = list[str](), list[str]()
    for line in (line for text in (*lines, "") for line in text.split("\n")):
        if line.startswith("|"):
            kind, cells = "td" if rows else "th", line.strip("|").split("|")
            is_rule = not line.strip("|-:")
            rows += [] if is_rule else ["".join(f"<{kind}>{_inline(cell)}</{kind}>" for cell in cells)]
            continue
        if rows:
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            parts, rows = [*parts, f'<div class="scroll"><table>{body}</table></div>'], []
        level = len(line) - len(line.lstrip("#"))
        name = f"h{level}" if level else "p"
        parts += [f"<{name}>{_inline(line[level:])}</{name}>"] if line else []
    return "\n".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text.replace("&#124;", "|")))


def draw_image(image: Any, side: int) -> str:
    """Return a copy of an image of PIL, whose longest side is at most this many pixels."""
    image.thumbnail((side, side))
    is_small = max(image.size) <= side // 4  # its pixels are visible
    image.save(buffer := io.BytesIO(), "WEBP", quality=85, lossless=is_small)
    source = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img alt="" class="{"small" * is_small}" src="{source}">'


def draw_figure(path: Path) -> str:
    """Return a picture of a PNG file."""
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return f'<div class="scroll"><img alt="" class="figure" src="{source}"></div>'


def write_page(path: str | os.PathLike, title: str, parts: Sequence[str]) -> None:
    """Write a page of HTML parts."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    write_text(path, f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n')
