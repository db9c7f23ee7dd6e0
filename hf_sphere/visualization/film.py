"""Figures one after another as a film."""

import contextlib
import io
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from hf_sphere.visualization.figures import check_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_DOTS_PER_INCH = 100

_LOOP = b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"
"""The extension of GIF that makes a film start again at its end."""


def save_film(figures: "Iterable[Figure]", path: str | Path, *, milliseconds: int = 400) -> None:
    """Write figures as a film: a GIF that starts again at its end, or a folder of pictures.

    Each figure is drawn when it comes and then let go of, so a generator of any length takes the memory of one. The
    film appears, or is replaced, when all of it has been written.

    Args:
        figures: The frames, all of one size; at least one.
        path: A `.gif`, or without a suffix a folder of `frame-0001.png` and so on, for programs that make films of
            other formats of them. A folder that is there already may hold such frames only.
        milliseconds: Time of each frame of a GIF, which counts it in steps of 10; at least 20. Faster ones are shown
            slowly by most programs.

    Raises:
        ImportError: If matplotlib is missing.
        FileExistsError: If `path` is a folder with other files in it, or a file where a folder is to be.
        ValueError: If there is no figure, sizes differ, or the suffix or the time is none of those.
    """
    check_matplotlib()
    path = Path(path)
    if path.suffix.lower() not in ("", ".gif"):
        raise ValueError(f"a film is a .gif, or a folder of frames, whose name has no suffix; got {path.name!r}.")
    if milliseconds < 20:
        raise ValueError(f"a frame must last 20 milliseconds at least; got {milliseconds}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        _save_gif(figures, path, milliseconds)
    else:
        _save_frames(figures, path)


def _save_gif(figures: "Iterable[Figure]", path: Path, milliseconds: int) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            for number, image in enumerate(_draw_frames(figures)):
                _append_to_gif(file, image, milliseconds, first=number == 0)
            file.write(b"\x3b")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _save_frames(figures: "Iterable[Figure]", folder: Path) -> None:
    if folder.exists():
        others = [] if folder.is_dir() else [folder]
        others += [file for file in folder.glob("*") if not file.match("frame-*.png")]
        if others:
            raise FileExistsError(f"{others[0]} would be replaced by a film's frames. Choose another folder.")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for number, image in enumerate(_draw_frames(figures), 1):
            image.save(unfinished / f"frame-{number:04d}.png")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _draw_frames(figures: "Iterable[Figure]") -> "Iterator[Image]":
    """Yield pictures, RGB, of the figures, which must be of one size and at least one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    size = None
    figures = iter(figures)
    while (figure := next(figures, None)) is not None:
        figure.set_dpi(_DOTS_PER_INCH)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        del figure, canvas  # before the next one is made
        size = size or image.size
        if image.size != size:
            raise ValueError(f"the frames of a film must have one size; got {size} and {image.size} pixels.")
        yield image
    if size is None:
        raise ValueError("a film needs one figure at least; got none.")


def _append_to_gif(file: BinaryIO, image: "Image", milliseconds: int, *, first: bool) -> None:
    """Write a frame with its own colours; before the first one what begins the file.

    Pillow keeps all frames until the last one has come. So each is encoded as a GIF of its own, and what is in it is
    put behind what is in the others (GIF89a specification, Compuserve 1990).
    """
    from PIL import Image

    buffer = io.BytesIO()
    # The method that keeps the colours of the names, which are few among so many points.
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(buffer, "GIF", optimize=False)
    data = buffer.getvalue()
    flags = data[10]
    assert flags & 0x80  # Pillow writes the colours in front of all
    bits = flags & 0x07
    colours_end = 13 + 3 * 2 ** (bits + 1)
    start = colours_end
    while data[start] == 0x21:  # extensions, each a chain of blocks that an empty one ends
        start += 2
        while data[start]:
            start += 1 + data[start]
        start += 1
    assert data[start] == 0x2C
    if first:
        file.write(b"GIF89a" + data[6:10] + b"\x70\x00\x00" + _LOOP)  # no colours that are shared
    file.write(b"\x21\xf9\x04\x04" + round(milliseconds / 10).to_bytes(2, "little") + b"\x00\x00")
    file.write(data[start : start + 9] + bytes([0x80 | (data[start + 9] & 0x40) | bits]))
    file.write(data[13:colours_end])
    file.write(data[start + 10 : -1])  # all but the end of the file
