"""Figures one after another as a film."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from hf_sphere.utils.files import atomic_file, atomic_folder
from hf_sphere.visualization.figures import check_matplotlib, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_DOTS_PER_INCH = 100

_EXACT = 64
"""Colours of a GIF that are the most frequent ones of its film; the others stand for all the rest."""

_LOOP = b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"
"""The extension of GIF that makes a film start again at its end."""


def save_film(figures: "Iterable[Figure]", path: str | Path, *, milliseconds: int = 400) -> None:
    """Write figures as a film: a GIF that starts again at its end, or a folder of pictures.

    Each figure is drawn when it comes and then let go of, so a generator of any length takes the memory of one. The
    film appears, or is replaced, when all of it has been written. All frames of a GIF have the same 256 colours, so
    that what stands still does not flicker: those of the film if it has no more, else its most frequent ones as they
    are, and for the rest the nearest of some that are far apart.

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
    from PIL import Image

    # The palette is known after the last frame only; until then the frames wait on the disk.
    with (
        atomic_file(path) as unfinished,
        TemporaryDirectory(prefix=".film-", dir=path.parent) as folder,
        unfinished.open("wb") as file,
    ):
        frames = Path(folder) / "frames"
        _save_frames(figures, frames)
        names = sorted(frames.iterdir(), key=lambda name: (len(name.name), name))  # 10000 behind 9999
        colours, palette, nearest = _choose_palette(Image.open(name) for name in names)
        for number, name in enumerate(names):
            with Image.open(name) as image:
                places = np.searchsorted(colours, _pack(np.asarray(image)))
            _append_to_gif(file, nearest[places], palette, milliseconds, first=number == 0)
        file.write(b"\x3b")


def _pack(pixels: np.ndarray) -> np.ndarray:
    """(..., 3) bytes of red, green and blue as one integer a pixel, (...)."""
    red, green, blue = np.moveaxis(pixels.astype(np.uint32), -1, 0)
    return red << 16 | green << 8 | blue


def _unpack(colours: np.ndarray) -> np.ndarray:
    """(N,) packed colours as (N, 3) bytes."""
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=-1).astype(np.uint8)


def _choose_palette(images: "Iterable[Image]") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose at most 256 colours for pictures.

    Returns:
        All colours of the pictures, packed and sorted, (N,); the chosen ones, (256, 3) bytes, black behind the last;
        and the index of the chosen one that is the nearest to each of all, (N,) bytes.
    """
    from PIL import Image

    colours, counts = np.empty(0, np.uint32), np.empty(0, np.int64)
    for image in images:
        with image:
            own, times = np.unique(_pack(np.asarray(image)), return_counts=True)
        colours, where = np.unique(np.concatenate([colours, own]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, times])).astype(np.int64)
    chosen = colours
    if len(colours) > 256:
        chosen = colours[np.argsort(-counts, kind="stable")[:_EXACT]]
        # The method that keeps the colours of the names, which are few among so many points.
        each = Image.fromarray(_unpack(colours)[None])
        spread = each.quantize(256 - _EXACT, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette("RGB")
        rest = _pack(np.asarray(spread).reshape(-1, 3))
        chosen = np.unique(np.concatenate([chosen, rest]))[:256]
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(chosen)] = _unpack(chosen)
    usable = palette[: len(chosen)].astype(np.int32)
    nearest = np.empty(len(colours), np.uint8)
    for start in range(0, len(colours), 4096):
        some = _unpack(colours[start : start + 4096]).astype(np.int32)
        nearest[start : start + 4096] = np.square(some[:, None] - usable).sum(-1).argmin(1)
    return colours, palette, nearest


def _save_frames(figures: "Iterable[Figure]", folder: Path) -> None:
    if folder.exists():
        others = [] if folder.is_dir() else [folder]
        others += [file for file in folder.glob("*") if not file.match("frame-*.png")]
        if others:
            raise FileExistsError(f"{others[0]} would be replaced by a film's frames. Choose another folder.")
    with atomic_folder(folder) as unfinished:
        for number, image in enumerate(_draw_frames(figures), 1):
            image.save(unfinished / f"frame-{number:04d}.png")


def _draw_frames(figures: "Iterable[Figure]") -> "Iterator[Image]":
    """Yield pictures, RGB, of the figures, which must be of one size and at least one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    size = None
    figures = iter(figures)
    while (figure := next(figures, None)) is not None:
        figure.set_dpi(_DOTS_PER_INCH)
        canvas = FigureCanvasAgg(figure)
        with plain_text():
            canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        del figure, canvas  # before the next one is made
        size = size or image.size
        if image.size != size:
            raise ValueError(f"the frames of a film must have one size; got {size} and {image.size} pixels.")
        yield image
    if size is None:
        raise ValueError("a film needs one figure at least; got none.")


def _append_to_gif(file: BinaryIO, pixels: np.ndarray, palette: np.ndarray, milliseconds: int, *, first: bool) -> None:
    """Write a frame (height, width) of indices of the palette (256, 3); before the first one what begins the file.

    Pillow keeps all frames until the last one has come. So each is encoded as a GIF of its own, and what is in it is
    put behind what is in the others (GIF89a specification, Compuserve 1990).
    """
    from PIL import Image

    image = Image.fromarray(pixels).convert("P")
    image.putpalette(palette.tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "GIF", optimize=False)
    data = buffer.getvalue()
    start = 13 + palette.size
    assert data[10] & 0x87 == 0x87  # Pillow writes all the colours in front
    assert data[13:start] == palette.tobytes()
    while data[start] == 0x21:  # extensions, each a chain of blocks that an empty one ends
        start += 2
        while data[start]:
            start += 1 + data[start]
        start += 1
    assert data[start] == 0x2C
    if first:
        file.write(b"GIF89a" + data[6:10] + b"\xf7\x00\x00" + palette.tobytes() + _LOOP)  # 256 colours for all frames
    file.write(b"\x21\xf9\x04\x04" + round(milliseconds / 10).to_bytes(2, "little") + b"\x00\x00")
    file.write(data[start:-1])  # all but the end of the file
