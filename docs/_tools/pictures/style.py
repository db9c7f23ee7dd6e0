"""The style of the pictures: panels as wide as a phone, direct labels, and SVG files for light and dark pages."""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy.optimize import isotonic_regression

from hf_sphere.visualization.figures import COLORS, LINE_COLORS, SMALL, new_figure, plain_text

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 3.66
"""Inches: 351 pixels, the column of a page on a phone; on larger screens two panels stand side by side."""
PAPER, INK, MUTED = "#ffffff", "#1a1a1a", "#595959"
DARK_PAPER, DARK_INK = "#1e2129", "#e2e4e9"
DARK_LINES = ("#3d9bff", "#f59b20", "#84e8a0", "#c770a8", DARK_INK, "#ec5c47")
"""What replaces `LINE_COLORS` on dark pages."""
RC = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize"), SMALL),
    **dict.fromkeys(("figure.titlesize", "figure.labelsize"), SMALL),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"axes.titlelocation": "left", "axes.titleweight": "bold", "lines.linewidth": 1.6, "lines.markersize": 4},
    **{"svg.hashsalt": "hf_sphere", "hatch.color": MUTED},
}
"""Settings of matplotlib."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FIXED = "fixed"
"""The `gid` of a group whose colors are data, the same on light and dark pages, starts with this."""

Panels = Iterator[tuple[str, Figure]]
PICTURES: dict[str, Callable[[], Panels]] = {}
"""Functions that yield the panels of a picture, each with the name of its file, by name."""


def picture(function: Callable[[], Panels]) -> Callable[[], Panels]:
    """Register a function that draws a picture."""
    PICTURES[function.__name__] = function
    return function


def draw(name: str) -> dict[str, Figure]:
    """Draw the panels of a picture."""
    with plain_text(), mpl.rc_context(RC):
        return dict(PICTURES[name]())


def read(path: str) -> Any:
    """Read a JSON file of the repository."""
    return json.loads((ROOT / path).read_text("utf-8"))


def panel(title: str, height: float = 2.4, **settings: Any) -> tuple[Figure, Axes]:
    """Create a panel with one pair of axes."""
    figure = new_figure(WIDTH, height)
    axes = figure.subplots()
    axes.set(title=title, **settings)
    axes.grid()
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter(lambda value, _: "10" + f"{round(math.log10(value))}".translate(SUPERSCRIPTS))
            axis.set_minor_locator(NullLocator())
    return figure, axes


def grid(title: str, titles: Sequence[str], below: str, height: float = 1.15) -> tuple[Figure, list[Axes]]:
    """Create a panel of small pairs of axes in two columns, each with its title, and with a label below all."""
    rows = -(-len(titles) // 2)
    figure = new_figure(WIDTH, 0.45 + height * rows)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.supxlabel(below)
    cells = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, name in zip(cells, titles, strict=False):
        axes.set_title(name, weight="normal")
        axes.grid()
    for axes in cells[len(titles) :]:
        axes.set_visible(False)
    cells[len(titles) - 2].tick_params(labelbottom=True)  # there may be no axes below
    return figure, list(cells[: len(titles)])


def label(axes: Axes, text: str, at: Sequence[float], color: str = INK, **options: Any) -> None:
    """Write a text beside a point; `options` are those of `Axes.annotate`, with `xytext` in points."""
    options = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "color": color, "zorder": 5} | options
    # A halo would be nicer than a box, but is written as an outline per letter.
    axes.annotate(text, at, bbox={"facecolor": PAPER, "linewidth": 0, "pad": 0.5, "alpha": 0.8}, **options)


def label_ends(figure: Figure, axes: Axes, lines: Iterable[Any] | None = None) -> None:
    """Write the names of lines to the right of the axes, as close to the ends as possible without overlap."""
    lines = [line for line in lines or axes.lines if not line.get_label().startswith("_")]
    ends = [line.get_ydata()[-1] for line in lines]
    names = [
        axes.annotate(
            line.get_label(), (1, end), (5, 0), ("axes fraction", "data"), "offset points", va="center",
            color=line.get_color(), annotation_clip=False,
        )
        for line, end in zip(lines, ends, strict=True)
    ]  # fmt: skip
    figure.draw_without_rendering()
    points = 72 / figure.dpi * axes.transData.transform([(1, end) for end in ends])[:, 1]
    order = np.argsort(points)
    heights = np.array([1.35 * SMALL * (1 + names[index].get_text().count("\n")) for index in order])
    gaps = np.concatenate([[0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    low, high = 72 / figure.dpi * axes.get_window_extent().get_points()[:, 1]
    moved = isotonic_regression(points[order] - gaps).x
    moved = np.clip(moved, low + heights[0] / 2, high - heights[-1] / 2 - gaps[-1]) + gaps
    for index, place in zip(order, moved, strict=True):
        names[index].set_position((5, place - points[index]))


def save(name: str, figure: Figure) -> None:
    """Write a panel as SVG, whose colors follow the scheme of the page."""
    buffer = io.StringIO()
    with plain_text(), mpl.rc_context(RC):
        metadata = {"Date": None, "Creator": None, "Identifier": digest(figure)}
        figure.savefig(buffer, format="svg", metadata=metadata)
    # Hundredths of a point are enough for coordinates of paths, and one line for each file.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), buffer.getvalue())
    svg = svg.replace("</style>", dark_rules(svg) + "</style>", 1)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(" ".join(svg.split()) + "\n", "utf-8")


def digest(figure: Figure) -> str:
    """Return a digest of the data and the texts of a panel, with three digits per number, whatever the layout."""
    content = [figure.get_suptitle(), figure.get_supxlabel()]
    for axes in figure.axes:
        content += [axes.get_title("left") + axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        content += [text.get_text() for text in axes.texts]
        values = [line.get_xydata() for line in axes.lines]
        values += [each for some in axes.collections for each in (some.get_offsets(), some.get_array())]
        content += [f"{number:.3g}" for each in values if each is not None for number in np.ravel(each)]
    return hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()[:16]


def dark_rules(svg: str) -> str:
    """Return the rules that replace the grays and the colors of lines and names on dark pages."""
    rules = []
    outside = f":not([id^={FIXED}] *)"
    for light, dark in dark_colors().items():
        rules += [
            f'[style*="{kind}: {light}"]{outside}{{{kind}:{dark} !important}}'
            for kind in ("fill", "stroke")
            if f"{kind}: {light}" in svg
        ]
    return "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"


def dark_colors() -> dict[str, str]:
    """Return the colors of dark pages by those of light ones."""
    paper, ink = np.array(to_rgb(DARK_PAPER)), np.array(to_rgb(DARK_INK))
    low, high = to_rgb(INK)[0], 1.0
    grays = {value / 255: to_hex([value / 255] * 3) for value in range(round(255 * low), 256)}
    colors = {gray: to_hex(ink + (value - low) / (high - low) * (paper - ink)) for value, gray in grays.items()}
    colors |= dict(zip(LINE_COLORS, DARK_LINES, strict=True))
    # Names of classes are darkened on light pages, see `place_names`, and lightened on dark ones.
    colors |= {
        to_hex([0.6 * v for v in to_rgb(color)]): to_hex([0.5 + 0.5 * v for v in to_rgb(color)]) for color in COLORS
    }
    return colors
