"""What all pictures share: matplotlib only where it is needed, colours, and writing to a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def start_figure(width: float, height: float) -> tuple["Figure", Any]:
    """Make an empty figure of a size in inches; the ten colours can be told apart with any colour vision."""
    import matplotlib
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained"), matplotlib.color_sequences["petroff10"]


def save_figure(figure: "Figure", path: str | Path | None) -> None:
    """Write a figure, its folder as well; nothing if `path` is None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
