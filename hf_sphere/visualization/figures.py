"""Helpers for all figures: the optional dependency, fonts, colors, the style of axes, and saving."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere.utils.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional

COLORS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"]
"""Ten colors that are distinguishable for all types of color vision; `petroff10` of matplotlib.

M. A. Petroff, "Accessible color sequences for data visualization", arXiv 2107.02270, 2021.
"""

LINE_STYLES = ("-", "--", "-.", ":")
"""Lines differ in style as well as in color, so that they are distinguishable in grayscale."""

FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei"),
    *("Malgun Gothic", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS"),
    *("Noto Emoji", "Segoe UI Emoji", "Symbola"),
)
"""Fonts with the Chinese, Japanese, Korean and emoji glyphs that matplotlib's default font lacks."""


def check_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ImportError: If it is missing; the message names the extra to install.
    """
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401  (import check only)
    except ImportError as error:
        raise ImportError("plotting requires matplotlib: pip install 'hf_sphere[plots]'.") from error


@contextlib.contextmanager
def plain_text() -> Iterator[None]:
    """Draw text literally; decorates every function that creates or draws a figure.

    A `$` in a class name is a character, not the start of a formula, which matplotlib might fail to parse. Glyphs that
    the font lacks come from the installed `FALLBACK_FONTS`; glyphs that no font has are drawn as boxes, without
    warnings.

    Raises:
        ImportError: If matplotlib is missing.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    fonts = [*matplotlib.rcParams["font.family"], *(font for font in FALLBACK_FONTS if font in installed)]
    formulas = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
    options: Any = formulas | {"font.family": fonts}
    with matplotlib.rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        yield


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Create an empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title is not None:
        figure.suptitle(title, fontsize=12, wrap=True)
    return figure


def add_caption(figure: Figure, *lines: str) -> None:
    """Add a caption below the axes, if there is any."""
    if any(lines):
        figure.supxlabel("\n".join(lines), fontsize=9, color="0.35")


def style_line(number: int) -> dict[str, Any]:
    """Return the color and the line style of one of several lines."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}


def style_axes(axes: Any, grid: Literal["both", "x", "y"] | None = "both") -> None:
    """Remove the frame's top and right, and draw a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color="0.9")
        axes.set_axisbelow(True)


def save_figure(figure: Figure, path: str | Path | None, *, dpi: int = 150) -> Figure:
    """Save a figure atomically, unless `path` is None, and return it."""
    if path is not None:
        with atomic_file(path) as unfinished:
            figure.savefig(unfinished, dpi=dpi, format=Path(path).suffix.removeprefix(".") or None)
    return figure
