"""What all pictures share: matplotlib only where it is needed, colours, and writing to a file."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere.utils.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei"),
    *("Malgun Gothic", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS"),
    *("Noto Emoji", "Segoe UI Emoji", "Symbola"),
)
"""Have the glyphs of Chinese, Japanese and Korean and the emoji that matplotlib's own font lacks."""


def check_matplotlib() -> None:
    """Name the extra to install where matplotlib is missing.

    Raises:
        ImportError: If it is.
    """
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401  (tried, not used)
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf_sphere[plots]'.") from error


@contextlib.contextmanager
def plain_text() -> Iterator[None]:
    """Write what others have named, classes for instance, as it is; around all that makes and draws a figure.

    A `$` is a character and no formula, which matplotlib would refuse to draw if it is none. Glyphs that the font lacks
    come from one of `FALLBACK_FONTS` that is installed; those that none has are boxes, without a warning for each.

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


def start_figure(width: float, height: float) -> tuple["Figure", Any]:
    """Make an empty figure of a size in inches; the ten colours can be told apart with any colour vision."""
    import matplotlib
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained"), matplotlib.color_sequences["petroff10"]


def save_figure(figure: "Figure", path: str | Path | None) -> None:
    """Write a figure, its folder as well; nothing if `path` is None."""
    if path is not None:
        with atomic_file(path) as unfinished:
            figure.savefig(unfinished, dpi=150, format=Path(path).suffix.removeprefix(".") or None)
