"""As many colours as there are classes, each as unlike the others as can be."""

import numpy as np

TEN = ["3f90da", "ffa90e", "bd1f01", "94a4a2", "832db6", "a96b59", "e76300", "b9ac70", "717581", "92dadd"]
"""Colours of up to ten classes, as in the other pictures: they can be told apart with any colour vision.

M. A. Petroff, "Accessible color sequences for data visualization", arXiv 2107.02270, 2021.
"""

_TO_CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
_TO_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
_LIGHTNESS = (0.45, 0.82)
"""Between what can be seen on a black and on a white page."""


def class_colours(count: int) -> list[str]:
    """Choose a colour a class: the ten of the other pictures, then each the farthest from all before it.

    Distances are those of Oklab, where they are as the eye has them; too light or too dark a colour for a page of
    either kind is not taken.

    Args:
        count: Number of classes.

    Returns:
        `count` colours as "#rrggbb". Above about 2,000 they begin again.
    """
    chosen = np.array([[int(colour[at : at + 2], 16) for at in (0, 2, 4)] for colour in TEN], dtype=float)
    if count > len(TEN):
        levels = np.arange(0, 256, 15.0)
        candidates = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
        places = _oklab(candidates)
        seen = (places[:, 0] > _LIGHTNESS[0]) & (places[:, 0] < _LIGHTNESS[1])
        candidates, places = candidates[seen], places[seen]
        distances = np.linalg.norm(places[:, None] - _oklab(chosen), axis=-1).min(-1)
        order = []
        for _ in range(min(count - len(TEN), len(candidates))):
            order.append(farthest := distances.argmax())
            distances = np.minimum(distances, np.linalg.norm(places - places[farthest], axis=-1))
        chosen = np.concatenate([chosen, candidates[order]])
    return ["#{:02x}{:02x}{:02x}".format(*map(int, chosen[index % len(chosen)])) for index in range(count)]


def _oklab(colours: np.ndarray) -> np.ndarray:
    """Place sRGB colours (N, 3) from 0 to 255 in Oklab (B. Ottosson, "A perceptual color space", 2020)."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ np.transpose(_TO_CONES)) @ np.transpose(_TO_LAB)
