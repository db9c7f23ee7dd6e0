"""The texts of a figure: their sizes, and whether one is cut or covers another."""

import itertools
from typing import Any
from unittest import mock

from matplotlib.text import Text

SMALLEST = 9.0  # points


def legend_of(figure: Any) -> list[str]:
    """Return the names in the legends of a figure and of its axes."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def drawn_texts(figure: Any) -> list[Text]:
    """Return the texts that are drawn; tick labels outside the limits, for instance, are not."""
    figure.draw_without_rendering()  # the layout
    found: dict[Text, None] = {}
    draw = Text.draw

    def record(text: Text, *args: Any, **options: Any) -> Any:
        if text.get_visible() and text.get_text().strip():
            found[text] = None
        return draw(text, *args, **options)

    with mock.patch.object(Text, "draw", record):
        figure.draw_without_rendering()
    return list(found)


def problems(figure: Any) -> list[str]:
    """Return what is wrong with the texts of a figure, by more than a pixel."""
    texts = drawn_texts(figure)
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    small = [
        f"small: {text.get_text()!r}, {text.get_fontsize()} points" for text in texts if text.get_fontsize() < SMALLEST
    ]
    (left, low), (right, high) = figure.bbox.get_points()
    cut = [f"cut: {text!r}" for text, box in boxes if box.x0 < left or box.y0 < low or box.x1 > right or box.y1 > high]
    pairs = itertools.combinations(boxes, 2)
    return small + cut + [f"overlap: {one!r} and {other!r}" for (one, a), (other, b) in pairs if a.overlaps(b)]
