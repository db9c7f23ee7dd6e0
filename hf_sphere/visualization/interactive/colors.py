"""A distinct color for every class."""

import numpy as np

from hf_sphere.visualization.figures import COLORS

_TO_CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
_TO_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
_LIGHTNESS = (0.45, 0.82)  # range of lightness that is visible on both a black and a white page


def class_colors(count: int) -> list[str]:
    """Choose a color per class: the ten of the other figures, then repeatedly the one farthest from all previous ones.

    Distances are those of Oklab, which is perceptually uniform. Colors that are too light or too dark for one of the
    two themes are excluded. The colors have the form "#rrggbb"; beyond about 2,000 they repeat.
    """
    chosen = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in COLORS], dtype=float)
    if count > len(COLORS):
        levels = np.arange(0, 256, 15.0)
        candidates = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
        places = _oklab(candidates)
        visible = (places[:, 0] > _LIGHTNESS[0]) & (places[:, 0] < _LIGHTNESS[1])
        candidates, places = candidates[visible], places[visible]
        distances = np.linalg.norm(places[:, None] - _oklab(chosen), axis=-1).min(-1)
        order = []
        for _ in range(min(count - len(COLORS), len(candidates))):
            order.append(farthest := distances.argmax())
            distances = np.minimum(distances, np.linalg.norm(places - places[farthest], axis=-1))
        chosen = np.concatenate([chosen, candidates[order]])
    return ["#{:02x}{:02x}{:02x}".format(*map(int, chosen[index % len(chosen)])) for index in range(count)]


def _oklab(colors: np.ndarray) -> np.ndarray:
    """Convert sRGB colors (N, 3) from 0 to 255 to Oklab (B. Ottosson, "A perceptual color space", 2020)."""
    share = colors / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ np.transpose(_TO_CONES)) @ np.transpose(_TO_LAB)
