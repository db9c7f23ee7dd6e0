"""Image sizes: timm's crop, and the same pixels in training and inference."""

import numpy as np
import pytest
import timm.data
import torch
from datasets import Dataset
from PIL import Image as PILImage

from hf_sphere import SphereVisionImageProcessor
from hf_sphere.data.decoding import EncodedImages, ImageShape
from hf_sphere.utils.pixels import resize_image


def picture(width: int, height: int) -> PILImage.Image:
    """A smooth image, whose interpolation differs little between implementations."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return PILImage.fromarray((255 * np.stack([x, y, (x + y) / 2], axis=-1)).astype(np.uint8))


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("size", [(400, 300), (90, 200), (64, 64)])
def test_center_crop_equals_that_of_timm(size, crop_pct):
    image = picture(*size)
    transform = timm.data.create_transform(
        (3, 64, 64), crop_pct=crop_pct, interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1)
    )
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    ours = resize_image(pixels, (64, 64), crop_pct).float() / 255
    torch.testing.assert_close(ours, transform(image), rtol=0, atol=2 / 255)


def test_without_a_crop_the_whole_image_is_stretched():
    pixels = torch.from_numpy(np.array(picture(40, 20))).permute(2, 0, 1)
    stretched = resize_image(pixels, (10, 10))
    assert stretched.shape == (3, 10, 10)
    assert stretched[0, 0, -1] > 240  # the right edge remains


@pytest.mark.parametrize("crop_pct", [None, 0.8])
@pytest.mark.parametrize("size", [(10, 10), (8, 14)])
def test_the_image_processor_computes_the_pixels_of_training(crop_pct, size, tmp_path):
    image = picture(33, 21)
    height, width = size
    processor = SphereVisionImageProcessor(
        size={"height": height, "width": width}, image_mean=[0.0] * 3, image_std=[1.0] * 3, crop_pct=crop_pct
    )
    processor.save_pretrained(tmp_path)
    processor = SphereVisionImageProcessor.from_pretrained(tmp_path)
    shape = ImageShape(3, height, width, processor.source_options()["crop_pct"])
    trained = EncodedImages(Dataset.from_dict({"image": [image]}), "image", shape)[0]
    assert torch.equal((processor(image, return_tensors="pt")["pixel_values"][0] * 255).round().byte(), trained)
