"""Animations of figures, as a GIF or a folder of frames."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hf_sphere.utils.files import atomic_file, atomic_folder
from hf_sphere.visualization.figures import Figure, check_matplotlib, plain_text

_DOTS_PER_INCH = 100

_EXACT = 64
"""Number of the most frequent colors of a film that its GIF keeps exactly; the other 192 represent all others."""


def save_film(figures: Iterable[Figure], path: str | Path, *, milliseconds: int = 400) -> None:
    """Save figures as an animation: a looping GIF, or a folder of frames.

    Only one figure is in memory at a time, so `figures` can be a long generator. The file is written atomically. All
    frames of a GIF share a palette of 256 colors, so that static parts do not flicker. If the film has more colors, the
    most frequent ones are exact, and the others are replaced by the nearest color of the palette.

    Args:
        figures: The frames, all of the same size; at least one.
        path: A `.gif`, or without a suffix a folder of `frame-0001.png` and so on, as input for programs that write
            other formats. An existing folder may contain only such frames.
        milliseconds: Duration of each frame of a GIF, which is stored in steps of 10; at least 20. Most programs show
            faster films at a lower speed.

    Raises:
        ImportError: If matplotlib is missing.
        FileExistsError: If `path` is a folder that contains other files, or a file instead of a folder.
        ValueError: If there is no figure, sizes differ, or the suffix or the duration is invalid.

    Example:
        >>> figures = (plot_circle(embeddings + shift, labels, ["cat", "dog", "fox"]) for shift in (0.0, 0.5))
        >>> save_film(figures, "film.gif")
    """
    check_matplotlib()
    path = Path(path)
    if path.suffix.lower() not in ("", ".gif"):
        raise ValueError(f"a film must be a .gif, or a folder of frames, whose name has no suffix; got {path.name!r}.")
    if milliseconds < 20:
        raise ValueError(f"a frame must last at least 20 milliseconds; got {milliseconds}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        _save_gif(figures, path, milliseconds)
    else:
        _save_frames(figures, path)


def _save_gif(figures: Iterable[Figure], path: Path, milliseconds: int) -> None:
    from PIL import Image

    # The palette depends on all frames, which are stored on disk until then.
    with atomic_file(path) as unfinished, TemporaryDirectory(prefix=".film-", dir=path.parent) as folder:
        frames = Path(folder) / "frames"
        _save_frames(figures, frames)
        files = sorted(frames.iterdir(), key=lambda file: (len(file.name), file.name))  # 10000 after 9999
        colors, palette, nearest = _choose_palette(files)

        def indexed() -> Iterator[Image.Image]:
            for file in files:
                image = Image.fromarray(nearest[np.searchsorted(colors, _read_packed(file))])
                image.putpalette(palette.tobytes())
                yield image

        images = indexed()
        duration = 10 * round(milliseconds / 10)
        next(images).save(unfinished, "GIF", save_all=True, append_images=images, duration=duration, loop=0)


def _read_packed(file: Path) -> np.ndarray:
    """Read an image as (height, width), with red, green and blue of each pixel in one integer."""
    from PIL import Image

    with Image.open(file) as image:
        red, green, blue = np.moveaxis(np.asarray(image, dtype=np.uint32), -1, 0)
    return red << 16 | green << 8 | blue


def _unpack(colors: np.ndarray) -> np.ndarray:
    """Convert packed colors (N,) to (N, 3) bytes."""
    return np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=-1).astype(np.uint8)


def _choose_palette(files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose at most 256 colors for images.

    Returns:
        All colors of the images, packed and sorted, (N,); the palette, (256, 3) bytes, black after the chosen colors;
        and the index of the nearest palette color of each color, (N,) bytes.
    """
    from PIL import Image

    colors, counts = np.empty(0, np.uint32), np.empty(0, np.int64)
    for file in files:
        own, times = np.unique(_read_packed(file), return_counts=True)
        colors, where = np.unique(np.concatenate([colors, own]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, times])).astype(np.int64)
    chosen = colors
    if len(colors) > 256:
        frequent = colors[np.argsort(-counts, kind="stable")[:_EXACT]]
        # This method preserves the colors of the names, which are rare compared with those of the points.
        each = Image.fromarray(_unpack(colors)[None])
        spread = each.quantize(256 - _EXACT, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette("RGB")
        red, green, blue = np.asarray(spread, dtype=np.uint32).reshape(-1, 3).T
        chosen = np.unique(np.concatenate([frequent, red << 16 | green << 8 | blue]))[:256]
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(chosen)] = _unpack(chosen)
    usable = palette[: len(chosen)].astype(np.int32)
    parts = np.array_split(_unpack(colors).astype(np.int32), -(-len(colors) // 4096))
    nearest = [np.square(part[:, None] - usable).sum(-1).argmin(1) for part in parts]
    return colors, palette, np.concatenate(nearest).astype(np.uint8)


def _save_frames(figures: Iterable[Figure], folder: Path) -> None:
    """Draw at least one figure, all of the same size, as numbered images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    if folder.exists():
        others = [] if folder.is_dir() else [folder]
        others += [file for file in folder.glob("*") if not file.match("frame-*.png")]
        if others:
            raise FileExistsError(f"{others[0]} would be replaced by the frames of a film. Choose another folder.")
    with atomic_folder(folder) as unfinished:
        number, size = 0, None
        figures = iter(figures)
        while (figure := next(figures, None)) is not None:
            figure.set_dpi(_DOTS_PER_INCH)
            canvas = FigureCanvasAgg(figure)
            with plain_text():
                canvas.draw()
            image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
            del figure, canvas  # before the next one is created
            number, size = number + 1, size or image.size
            if image.size != size:
                raise ValueError(f"the frames of a film must have the same size; got {size} and {image.size} pixels.")
            image.save(unfinished / f"frame-{number:04d}.png")
        if not number:
            raise ValueError("a film needs at least one figure; got none.")
