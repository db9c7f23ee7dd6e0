"""The page: checks what is given, packs it and puts it beside the script that draws it."""

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.utils.files import write_text
from hf_sphere.visualization.interactive.colours import class_colours
from hf_sphere.visualization.interactive.thumbnails import make_sheets
from hf_sphere.visualization.projection import Shown, check_labels, show_on_sphere

_STEPS = 32767
"""Coordinates are written as int16: a step is less than 0.002 degrees."""


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
    """Write a page with a sphere to turn, whose points show what they are under the mouse.

    The page is one file: it opens without a network, from a folder as from a server. A click on a class in the legend
    hides it, a double click shows it alone; the colours follow the light or dark theme of the system, or its button.
    Points of more than three coordinates are projected by `project_to_sphere`, and the page says so; points of two lie
    on the equator. With 10,000 points and their images the file has less than 6 MB: images are shrunk where they are
    many, and their quality is as good as that allows.

    Args:
        path: Where to write the page; its folder is made.
        points: (N, d) with d >= 2; only their directions are shown.
        labels: (N,) class indices.
        class_names: Name of each class, K of them.
        images: uint8 (N, C, H, W), gray or RGB: the image of each point, shown under the mouse.
        directions: (K, d), a direction a class to draw as a line through the surface, for instance class weights.
        texts: Text of each point, shown under the mouse.
        title: Heading of the page and its name in the browser.

    Returns:
        `path`.

    Raises:
        ImportError: If plotly is missing.
        ValueError: If there are no points, points or directions are not (N, d) and (K, d) with d at least 2, one of
            them is zero or not finite, labels are outside of the class names, or labels, images or texts are not as
            many as the points.
    """
    plotly_js = _read_plotly()
    shown = _place(points, directions, len(class_names))
    labels = check_labels(labels, len(points), class_names)
    if images is not None:
        _check_images(images, len(points))
    if texts is not None and len(texts) != len(points):
        raise ValueError(f"there are {len(texts)} texts for {len(points)} points; give one a point.")
    content = {
        "note": shown.note,
        "names": list(map(str, class_names)),
        "colours": class_colours(len(class_names)),
        "points": _packed((shown.points * _STEPS).round().short()),
        "labels": _packed(labels.int()),
        "directions": None if shown.directions is None else _packed((shown.directions * _STEPS).round().short()),
        "texts": None if texts is None else list(map(str, texts)),
        "thumbnails": None if images is None else make_sheets(images.cpu()),
    }
    # Names and texts stand in the page only compressed, so none of them can be taken for markup.
    parts = {
        "title": html.escape(title or "Embeddings on the sphere"),
        "style": _asset("style.css"),
        "script": _asset("page.js"),
        "plotly": _compressed(plotly_js),
        "content": _compressed(json.dumps(content)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))
    write_text(path, page)
    return Path(path)


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def check_plotly() -> None:
    """Name the extra to install where plotly is missing.

    Raises:
        ImportError: If it is.
    """
    _read_plotly()


def _read_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the interactive sphere needs plotly: pip install 'hf_sphere[plotly]'.") from error
    # The bundle is one function, given to another. In parentheses browsers compile it at once; without, they first read
    # all of it only to find its end, which is a tenth of the time until the sphere is there.
    return re.sub(r"\bthis, (\(\) => \{.*\})\)\);\s*\Z", r"this, (\1)));\n", get_plotlyjs(), count=1, flags=re.DOTALL)


def _check_images(images: Tensor, count: int) -> None:
    if len(images) != count:
        raise ValueError(f"there are {len(images)} images for {count} points; give one a point.")
    if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"images have shape {tuple(images.shape)} and type {images.dtype}; give uint8 (N, C, H, W), C of 1 or 3."
        )


def _place(points: Tensor, directions: Tensor | None, classes: int) -> Shown:
    """Bring points and directions onto the sphere of three dimensions."""
    if directions is not None and len(directions) != classes:
        raise ValueError(f"there are {len(directions)} directions for {classes} class names; give one a class.")
    if points.ndim != 2 or points.shape[1] >= 3:
        return show_on_sphere(points, 3, directions)
    circle = show_on_sphere(points, 2, directions)
    flat = None if circle.directions is None else F.pad(circle.directions, (0, 1))
    return Shown(F.pad(circle.points, (0, 1)), flat, "2 coordinates, shown on the equator")


def _packed(values: Tensor) -> str:
    array: Any = values.numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _compressed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")
