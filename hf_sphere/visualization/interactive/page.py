"""The HTML page: input validation, packed content, and the template with the script that draws it."""

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.utils.files import write_text
from hf_sphere.visualization.interactive.colors import class_colors
from hf_sphere.visualization.interactive.thumbnails import make_sheets
from hf_sphere.visualization.scene import Panel, Scene

_STEPS = 32767  # coordinates are written as int16, in steps of less than 0.002 degrees


def write_interactive_sphere(
    path: str | Path,
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    images: Tensor | None = None,
    directions: Tensor | None = None,
    texts: Sequence[str] | None = None,
    title: str = "",
) -> Path:
    """Write a page with a rotatable sphere that shows details of the point under the mouse.

    The page is one file that opens without a network, from disk or from a server. A click on a class in the legend
    hides it; a double click hides all others. The colors follow the light or dark theme of the system, or the button.
    Points of more than three coordinates are projected by `project_to_sphere`, and the page reports it; points of two
    lie on the equator. With 10,000 points and their images the file stays below 6 MB: many images are downscaled, and
    compressed with the best quality that this size allows.

    Args:
        path: Where to write the page; its folder is created if necessary.
        points: (N, d) with d >= 2; only their directions are shown.
        labels: (N,) class indices.
        class_names: Name of each class, K of them.
        images: uint8 (N, C, H, W), gray or RGB: the image of each point, shown under the mouse.
        directions: (K, d), a direction per class to draw as a line through the surface, for instance class weights.
        texts: Text of each point, shown under the mouse.
        title: Title of the page.

    Returns:
        `path`.

    Raises:
        ImportError: If plotly is missing.
        ValueError: If there are no points, points or directions are not (N, d) and (K, d) with d at least 2, one of
            them is zero or not finite, a label has no class name, or the number of labels, images or texts differs from
            the number of points.
    """
    plotly_js = _read_plotly()
    flat = torch.as_tensor(points).shape[-1] < 3
    scene = Scene(Panel(points, labels, directions), class_names, 2 if flat else 3)
    for what, given in (("images", images), ("texts", texts)):
        if given is not None and len(given) != len(points):
            raise ValueError(f"there are {len(given)} {what} for {len(points)} points; pass one per point.")
    if images is not None and (images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] not in (1, 3)):
        raise ValueError(
            f"images have shape {tuple(images.shape)} and type {images.dtype}; pass uint8 (N, C, H, W), C of 1 or 3."
        )
    content = {
        "note": "2 coordinates, shown on the equator" if flat else scene.note,
        "names": list(map(str, class_names)),
        "colors": class_colors(len(class_names)),
        "points": _pack_vectors(scene.points),
        "labels": _encode(scene.labels.numpy().astype("<i4").tobytes()),
        "directions": None if scene.directions is None else _pack_vectors(scene.directions),
        "texts": None if texts is None else list(map(str, texts)),
        "thumbnails": None if images is None else make_sheets(images.cpu()),
    }
    # Names and texts are in the page only in compressed form, so they cannot be parsed as markup.
    parts = {
        "title": html.escape(title or "Embeddings on the sphere"),
        "style": _read_asset("style.css"),
        "script": _read_asset("page.js"),
        "plotly": _compress(plotly_js),
        "content": _compress(json.dumps(content)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _read_asset("page.html"))
    write_text(path, page)
    return Path(path)


def check_plotly() -> None:
    """Check that plotly is installed.

    Raises:
        ImportError: If it is missing; the message names the extra to install.
    """
    try:
        import plotly.offline  # noqa: F401  (import check only)
    except ImportError as error:
        raise ImportError("the interactive sphere requires plotly: pip install 'hf_sphere[plotly]'.") from error


def _read_plotly() -> str:
    check_plotly()
    from plotly.offline import get_plotlyjs

    # The bundle passes one function to another. Browsers compile a parenthesized function at once; otherwise they
    # first scan it for its end, which takes a tenth of the time until the sphere is drawn.
    return re.sub(r"\bthis, (\(\) => \{.*\})\)\);\s*\Z", r"this, (\1)));\n", get_plotlyjs(), count=1, flags=re.DOTALL)


def _read_asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _pack_vectors(vectors: Tensor) -> str:
    """Pack unit vectors (n, 2) or (n, 3) as int16 (n, 3)."""
    vectors = F.pad(vectors, (0, 3 - vectors.shape[1]))
    return _encode((vectors * _STEPS).round().numpy().astype("<i2").tobytes())


def _compress(text: str) -> str:
    return _encode(gzip.compress(text.encode(), mtime=0))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
