"""Embeddings on an interactive sphere: one HTML page that works offline (extra `plotly`)."""

import base64
import colorsys
import gzip
import html
import io
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from hf_sphere.geometry.checks import check_embeddings
from hf_sphere.utils.checks import check_extra, check_not_text
from hf_sphere.utils.files import write_text
from hf_sphere.visualization.figures import COLORS
from hf_sphere.visualization.scene import Panel, Scene

check_plotly = partial(check_extra, "plotly", "the interactive sphere", "plotly")

LONGEST_SIDE = 128  # pixels: the size at which the page shows thumbnails
MOST_PIXELS = 10_240_000  # pixels of all thumbnails together: 10,000 of 32 x 32
MOST_BYTES = 2_500_000  # bytes of all sheets together: a page with them, plotly.js and the points stays below 6 MB
SHEET_SIDE = 1024  # pixels: the page decodes a sheet when one of its images is first shown, which must be fast

_STEPS = 32767  # coordinates are written as int16, in steps of less than 0.002 degrees


class SpherePage(type(Path())):  # type: ignore[misc]
    """The path of a page, which a notebook shows in a frame."""

    def _repr_html_(self) -> str | None:
        if not self.is_file():  # such as its parent
            return None
        page = html.escape(self.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'


def class_colors(count: int) -> list[str]:
    """Choose a color "#rrggbb" per class: the ten of the other figures, then hues at golden-ratio distances."""
    hues = (colorsys.hls_to_rgb(0.618034 * index % 1.0, 0.55 + 0.1 * (index % 3 - 1), 0.6) for index in range(count))
    others = ["#{:02x}{:02x}{:02x}".format(*(round(255 * channel) for channel in color)) for color in hues]
    return [*COLORS, *others[len(COLORS) :]][:count]


def make_sheets(images: Tensor) -> dict[str, Any]:
    """Arrange uint8 images (N, C, H, W), gray or RGB, row by row on WebP sheets of at most `MOST_BYTES` together."""
    height, width = images.shape[-2:]
    scale = min(1.0, LONGEST_SIDE / max(height, width), math.sqrt(MOST_PIXELS / (len(images) * height * width)))
    height, width = max(1, math.floor(height * scale)), max(1, math.floor(width * scale))
    columns = min(SHEET_SIDE // width, math.ceil(math.sqrt(len(images))))
    per_sheet = columns * min(SHEET_SIDE // height, math.ceil(len(images) / columns))
    sheets = []
    for chunk in images.split(per_sheet):
        small = F.interpolate(chunk, size=(height, width), mode="bilinear", antialias=True)
        black = small.new_zeros(-len(small) % columns, *small.shape[1:])
        sheet = make_grid(torch.cat([small, black]), columns, padding=0)
        sheets.append(Image.fromarray(sheet.expand(3, -1, -1).permute(1, 2, 0).numpy()))
    for quality in (90, 75, 60, 45, 30, 15, 1):
        encoded = []
        for sheet in sheets:
            sheet.save(buffer := io.BytesIO(), "WEBP", quality=quality, method=2)
            encoded.append(buffer.getvalue())
        if sum(map(len, encoded)) <= MOST_BYTES:
            break
    sizes = {"width": width, "height": height, "columns": columns, "per_sheet": per_sheet}
    return sizes | {"sheets": [_encode(data) for data in encoded]}


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
) -> SpherePage:
    """Write a page with a rotatable sphere that shows details of the point under the mouse.

    The page is one file that opens without a network, from disk or from a server. A click on a class in the legend
    hides it; a double click hides all others. The colors follow the light or dark theme of the system, or the button.
    Points of more than three coordinates are projected by `project_to_great_sphere`, and the page reports it; points of
    two lie on the equator. With 10,000 points and their images the file stays below 6 MB: many images are downscaled,
    and compressed with the best quality that this size allows. A slider adds a von Mises-Fisher sample of a
    concentration, around the mean direction of the visible points.

    Args:
        path: Where to write the page; its folder is created if necessary.
        points: (N, d) with d >= 2; only their directions are shown.
        labels: (N,) class indices.
        class_names: Name of each class, K of them.
        images: uint8 (N, C, H, W), gray or RGB: the image of each point, shown under the mouse.
        directions: (K, d), a direction per class to draw as a line through the surface, for instance class vectors.
        texts: Text of each point, shown under the mouse.
        title: Title of the page.

    Returns:
        `path`; as the last line of a cell, a notebook shows the page.

    Raises:
        ImportError: If plotly is missing.
        ValueError: If there are no points, points or directions are not (N, d) and (K, d) with d at least 2, one of
            them is zero or not finite, a label has no class name, or the number of labels, images or texts differs from
            the number of points.

    Example:
        >>> path = write_interactive_sphere("sphere.html", embeddings, labels, ["cat", "dog", "fox"])
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    flat = check_embeddings(points, what="points").shape[1] < 3
    scene = Scene(Panel(points, labels, directions), class_names, 2 if flat else 3)
    for what, values in (("images", images), ("texts", texts)):
        check_not_text(what, values)
        if values is not None and len(values) != len(points):
            raise ValueError(f"there are {len(values)} {what} for {len(points)} points; pass one per point.")
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
    # Browsers compile a parenthesized function at once; otherwise they first scan it for its end, for .3 seconds.
    bundle = r"\bthis, (\(\) => \{.*\})\)\);\s*\Z"
    library = re.sub(bundle, r"this, (\1)));\n", get_plotlyjs(), count=1, flags=re.DOTALL)
    # Names and texts are in the page only in compressed form, so they cannot be parsed as markup.
    fields = {
        "title": html.escape(title or "Embeddings on the sphere"),
        "style": _read_asset("style.css"),
        "script": _read_asset("page.js"),
        "plotly": _compress(library),
        "content": _compress(json.dumps(content)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], _read_asset("page.html"))
    write_text(path, page)
    return SpherePage(path)


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
