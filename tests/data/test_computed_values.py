import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_sphere.data import COMPUTED_VALUES, Augmentation, targets
from hf_sphere.data.augmentation import _rotate

slant = COMPUTED_VALUES["slant"]


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def picture(*rows: str) -> Tensor:
    """An image (1, 1, H, W) whose `#` pixels are light on a dark background."""
    return torch.tensor([[255 * (sign == "#") for sign in row] for row in rows], dtype=torch.uint8)[None, None]


def plain_slant(image: np.ndarray) -> float:
    """Slant of an image (H, W) by its definition, with y pointing up."""
    height, width = image.shape
    points = [(x, height - 1 - y, float(image[y, x])) for y in range(height) for x in range(width)]
    total = sum(ink for _, _, ink in points)
    mean_x, mean_y = (sum(p[i] * p[2] for p in points) / total for i in (0, 1))
    moment_xy = sum((x - mean_x) * (y - mean_y) * ink for x, y, ink in points)
    moment_yy = sum((y - mean_y) ** 2 * ink for _, y, ink in points)
    return math.degrees(math.atan(moment_xy / moment_yy))


@pytest.mark.parametrize("shape", [(5, 1, 7, 4), (3, 3, 4, 9), (0, 1, 4, 4), (50, 3, 5, 6)])
def test_slants_are_one_float32_per_image_which_is_not_modified_also_in_chunks(shape, monkeypatch):
    images = noise(*shape)
    values = slant(images)
    assert (values.shape, values.dtype) == (shape[:1], torch.float32)
    assert torch.equal(images, noise(*shape))
    monkeypatch.setattr(targets, "_PIXELS_AT_A_TIME", 7 * 3 * 5 * 6)
    assert torch.equal(slant(images), values)


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (2, 2)])
def test_slant_equals_the_plain_formula(shape):
    images = noise(10, 1, *shape)
    expected = [plain_slant(image[0].numpy()) for image in images]
    np.testing.assert_allclose(slant(images), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slant(images.expand(-1, 3, -1, -1)), slant(images))


def test_a_stroke_has_the_slant_to_the_right_also_if_it_is_rotated():
    for rows, degrees in (
        (["...#", "..#.", ".#..", "#..."], 45.0),
        (["#...", ".#..", "..#.", "...#"], -45.0),
        (["..#", "..#", ".#.", ".#.", "#..", "#.."], math.degrees(math.atan(16 / 35))),  # nearly one to two up
        ([".##.", ".##.", ".##."], 0.0),
        (["....", "....", "...."], 0.0),
    ):
        assert slant(picture(*rows)).item() == pytest.approx(degrees, abs=1e-6)
    degrees = torch.tensor([-30.0, -10.0, 15.0, 25.0])
    strokes = torch.zeros(4, 1, 61, 61, dtype=torch.uint8)
    strokes[..., 5:56, 30] = 255
    turned = _rotate(strokes, degrees.deg2rad())  # clockwise, so the top moves right
    torch.testing.assert_close(slant(turned), degrees, rtol=0, atol=1.0)


def test_slant_is_independent_of_position_and_0_for_a_single_row():
    image = torch.zeros(1, 1, 30, 30, dtype=torch.uint8)
    image[..., 2:10, 3:9] = noise(8, 6)
    moved = image.roll((15, 11), (-2, -1))
    assert slant(moved).item() == pytest.approx(slant(image).item(), rel=1e-5)
    images = torch.zeros(200, 3, 9, 9, dtype=torch.uint8)
    images[:, :, 4] = noise(200, 3, 9)
    assert torch.equal(slant(images), torch.zeros(200))
    assert all(hasattr(Augmentation(), option) for option in targets.CHANGED_BY["slant"])


def test_mnist_digits_lean_right_on_average(real_data, load_named):
    options = {"task": "regression", "computed_value": "slant", "max_train_samples": 2000, "max_eval_samples": 10}
    data = load_named(str(real_data("ylecun/mnist")), **options)
    assert data.train.labels.mean().item() == pytest.approx(5.9, abs=1.5)
    assert data.train.labels.std().item() == pytest.approx(14.6, abs=1.5)
