"""Animations of figures."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hf_sphere.utils.files import atomic_file
from hf_sphere.visualization.figures import Figure, check_matplotlib, plain_text

_DOTS_PER_INCH = 100


def save_film(figures: Iterable[Figure], path: str | Path, *, milliseconds: int = 400) -> None:
    """Save figures as a looping GIF.

    Only one figure is in memory at a time, so `figures` can be a long generator. The file is written atomically. All
    frames share 256 colors, chosen on up to eight of them, so that static parts do not flicker.

    Args:
        figures: The frames, all of the same size; at least one.
        path: File with the suffix `.gif`.
        milliseconds: Duration of each frame, which is stored in steps of 10; at least 20. Most programs show faster
            films at a lower speed.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no figure, sizes differ, or the suffix or the duration is invalid.

    Example:
        >>> figures = (plot_circle(embeddings + shift, labels, ["cat", "dog", "fox"]) for shift in (0.0, 0.5))
        >>> save_film(figures, "film.gif")
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"a film must be a .gif; got {path.name!r}.")
    if milliseconds < 20:
        raise ValueError(f"a frame must last at least 20 milliseconds; got {milliseconds}.")
    frames: list[Image.Image] = []
    for figure in figures:
        figure.set_dpi(_DOTS_PER_INCH)
        canvas = FigureCanvasAgg(figure)
        with plain_text():
            canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        del figure, canvas  # before the next one is created
        if frames and image.size != frames[0].size:
            raise ValueError(f"all frames must have the same size; got {frames[0].size} and {image.size}.")
        frames.append(image)
    if not frames:
        raise ValueError("a film needs at least one figure.")
    sample = np.concatenate([np.asarray(frame) for frame in frames[:: -(-len(frames) // 8)]])
    palette = Image.fromarray(sample).quantize(256, Image.Quantize.MAXCOVERAGE)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = 10 * round(milliseconds / 10)
    with atomic_file(path) as unfinished:
        frames[0].save(unfinished, "GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)
