"""Helpers for all figures: the optional dependency, fonts, colors, the style of axes, layer names, and saving."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hf_sphere.utils.checks import check_extra
from hf_sphere.utils.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional

COLORS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"]
"""Ten colors that are distinguishable for all types of color vision; `petroff10` of matplotlib.

M. A. Petroff, "Accessible color sequences for data visualization", arXiv 2107.02270, 2021.
"""

LINE_COLORS = ("#006cd8", "#a86000", "#0c8460", "#6c186c", "#1a1a1a", "#840000")
"""Colors of lines, dark enough for their names in the same color, and distinguishable for all types of color vision."""

LINE_STYLES = ("-", "--", "-.", ":")  # beside the colors, so that lines are distinguishable in grayscale
SMALL = 9.0  # points: ticks, legends, captions and notes, the smallest text of a figure
LONGEST_NAME = 24  # characters; longer names are shortened

STYLE: dict[str, Any] = {
    **{"font.size": SMALL, "axes.labelsize": 10, "axes.titlesize": 11, "figure.titlesize": 12, "figure.labelsize": 9},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "0.9"},
    **{"legend.frameon": False, "text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False},
}
"""Settings of matplotlib for all figures."""

FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei"),
    *("Malgun Gothic", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS"),
    *("Noto Emoji", "Segoe UI Emoji", "Symbola"),
)
"""Fonts with the Chinese, Japanese, Korean and emoji glyphs that matplotlib's default font lacks."""

Item = TypeVar("Item")

check_matplotlib = partial(check_extra, "plots", "plotting", "matplotlib")


@contextlib.contextmanager
def plain_text() -> Iterator[None]:
    """Draw in the style of all figures, and text literally: a `$` is no formula, and every glyph has a font."""
    check_matplotlib()
    import matplotlib
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    fonts = [*matplotlib.rcParams["font.family"], *(font for font in FALLBACK_FONTS if font in installed)]
    with matplotlib.rc_context(STYLE | {"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        yield


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Create an empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title is not None:
        figure.suptitle(title, wrap=True)
    return figure


def add_caption(figure: Figure, *lines: str) -> None:
    """Add a caption below the axes, if there is any."""
    if any(lines):
        figure.supxlabel("\n".join(lines), color="0.35", wrap=True)


def add_legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], **style: Any) -> None:
    """Add a legend below the axes, in as many columns as fit."""
    columns = int(figure.get_figwidth() / (0.08 * max(map(len, labels)) + 0.5))  # inches of a character, and of a line
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(columns, len(labels))), **style)


def shorten(name: str) -> str:
    """Return a name on one line, with an ellipsis after `LONGEST_NAME` characters."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME].rstrip() + "…"


def style_line(index: int) -> dict[str, Any]:
    """Return the color and the line style of one of several lines."""
    return {"color": LINE_COLORS[index % len(LINE_COLORS)], "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}


def save_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Save a figure atomically, unless `path` is None, and return it."""
    if path is not None:
        with atomic_file(path) as unfinished:
            figure.savefig(unfinished, dpi=150, format=Path(path).suffix.removeprefix(".") or None)
    return figure


def shorten_layer_names(names: Sequence[str], longest: int = 26) -> list[str]:
    """Return short, unique names for module paths: without what all have in common, or numbered and with their ends."""
    if max(map(len, names), default=0) <= longest:
        return list(names)
    paths = [name.split(".") for name in names]
    shared = len(list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
    names = [".".join(path[max(0, min(shared, *map(len, paths)) - 1) :]) for path in paths]
    starts = [f"{index}…" if len(name) > longest else "" for index, name in enumerate(names, start=1)]
    return [start + name[-(longest - len(start)) :] for start, name in zip(starts, names, strict=True)]


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Choose at most `most` (at least two) evenly spaced items, including the first and the last."""
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, min(len(items), most))]
