"""Image sizes and channels: timm's crop, and the same pixels in training and inference, for images and arrays."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from datasets import Dataset
from PIL import Image as PILImage

from hf_sphere import SphereVisionImageProcessor
from hf_sphere.data.decoding import EncodedImages, ImageShape
from hf_sphere.utils.model_sources import processor_options
from hf_sphere.utils.pixels import convert_image, resize_image


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
    assert resize_image(pixels, (10, 10))[0, 0, -1] > 230  # without a crop, the right edge remains


def test_the_image_processor_rotates_photos_upright(tmp_path):
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the camera was turned
    picture(8, 4).save(tmp_path / "photo.png", exif=exif)
    processor = SphereVisionImageProcessor(size={"height": 8, "width": 4}, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    upright = np.rot90(np.array(picture(8, 4)), -1).transpose(2, 0, 1) / 255
    pixels = processor(PILImage.open(tmp_path / "photo.png"), return_tensors="np").pixel_values
    np.testing.assert_allclose(pixels[0], upright, atol=1e-6)


@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
@pytest.mark.parametrize("crop_pct", [None, 0.8])
@pytest.mark.parametrize("size", [(10, 10), (8, 14)])
def test_the_image_processor_computes_the_pixels_of_training(crop_pct, size, resample, tmp_path):
    image, sides = picture(33, 21), dict(zip(("height", "width"), size, strict=True))
    options = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "crop_pct": crop_pct, "resample": resample}
    SphereVisionImageProcessor(size=sides, **options).save_pretrained(tmp_path)
    processor = SphereVisionImageProcessor.from_pretrained(tmp_path)
    found = processor_options(processor)
    shape = ImageShape(3, *size, found["crop_pct"], found["interpolation"])
    trained = EncodedImages(Dataset.from_dict({"image": [image]}), "image", shape).__getitems__([0])[0]
    assert torch.equal((processor(image, return_tensors="pt")["pixel_values"][0] * 255).round().byte(), trained)


def processor(channels: int, **options: Any) -> SphereVisionImageProcessor:
    size, values = {"height": 8, "width": 8}, [0.0] * channels
    return SphereVisionImageProcessor(
        num_channels=channels, size=size, image_mean=values, image_std=[1.0] * channels, **options
    )


@pytest.mark.parametrize("layout", ["last", "first", "batch"])
@pytest.mark.parametrize("channels", [1, 3])
def test_array_has_the_pixels_of_the_same_image(channels, layout):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    expected = processor(channels)(PILImage.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    given = {"last": pixels, "first": torch.from_numpy(pixels).permute(2, 0, 1), "batch": pixels[None]}[layout]
    result = processor(channels)(given, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(result, expected, rtol=0, atol=1.01 / 255)  # gray is rounded, or truncated


def test_bad_input_is_refused():
    for shape in ((8, 8, 4), (4, 8, 8)):
        with pytest.raises(RuntimeError, match=r"size of tensor a \(4\) must match the size of tensor b \(3\)"):
            processor(3)(np.zeros(shape, np.uint8), return_tensors="pt")
    for color in ([0, 0, 300], [0, 0, -1], [0, 0], []):  # transformers checks the types
        with pytest.raises(ValueError, match="background_color must be red, green and blue, integers from 0 to 255"):
            processor(3)(np.zeros((8, 8, 3), np.uint8), background_color=color, return_tensors="pt")


def test_crop_in_the_call_replaces_that_of_the_processor():
    for configured, given in ((None, 0.5), (0.8, 0.5), (0.5, None)):
        expected = processor(3, crop_pct=given)(picture(33, 21), return_tensors="pt")["pixel_values"]
        result = processor(3, crop_pct=configured)(picture(33, 21), crop_pct=given, return_tensors="pt")
        assert torch.equal(result["pixel_values"], expected)


GRAY = {"uint8": 255, "uint16": 65535, "int32": 255, "int64": 255, "bool": 1, "float16": 255, "float64": 255}


@pytest.mark.parametrize("dtype", GRAY)
@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("channels", [1, 3])
def test_white_is_one_in_every_dtype(dtype, kind, channels):
    white = np.full((9, 9, 3), GRAY[dtype], dtype)
    given = torch.from_numpy(white).permute(2, 0, 1) if kind == "tensor" else white
    pixels = processor(channels)(given, return_tensors="pt")["pixel_values"]
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels, torch.ones(1, channels, 8, 8), rtol=0, atol=2e-4)  # weights of 0.9999 in sum


def test_a_16_bit_array_has_the_pixels_of_its_file(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (8, 8), np.uint16)
    PILImage.fromarray(values).save(tmp_path / "gray.png")
    expected = processor(1)(PILImage.open(tmp_path / "gray.png"), return_tensors="pt")["pixel_values"]
    for given in (values[..., None], torch.from_numpy(values)[None].repeat(3, 1, 1)):
        result = processor(1)(given, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(result, expected, rtol=0, atol=1.01 / 255)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.1), (-1.0, 1.0), (-2.0, 2.5), (0.0, 60000.0)])
def test_values_that_may_be_scaled_already_cause_a_warning(low, high, dtype):
    image = np.linspace(low, high, 192).reshape(8, 8, 3).astype(dtype)
    with pytest.warns(UserWarning, match="divided by 255, as values from 0 to 255. .* pass do_rescale=False"):
        processor(3)(image, return_tensors="pt")
    unchanged = processor(3)(image, do_rescale=False, return_tensors="pt")["pixel_values"]
    np.testing.assert_allclose(unchanged[0].permute(1, 2, 0), image.astype("float32"), rtol=1e-6)
    assert not processor(3)(np.zeros((8, 8, 3), dtype), return_tensors="pt")["pixel_values"].any()  # without a warning


def test_8_bit_values_in_16_bits_cause_a_warning():
    with pytest.warns(UserWarning, match="the uint16 image has 8-bit values, so it is black; convert it to uint8"):
        processor(3)(np.full((8, 8, 3), 200, np.uint16), return_tensors="pt")


@pytest.mark.parametrize(("dtype", "value"), [("int64", 65535), ("int32", 256), ("int16", -1), ("int8", -5)])
def test_integers_of_unknown_range_are_an_error_unless_their_scale_is_given(dtype, value):
    image = np.full((8, 8, 3), value, dtype)
    with pytest.raises(ValueError, match=rf"must be from 0 to 255; got torch.{dtype} from {value} to {value}"):
        processor(3)(image, return_tensors="pt")
    pixels = processor(3, rescale_factor=1 / 65535)(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, torch.full((1, 3, 8, 8), value / 65535))


def test_gray_of_an_array_is_that_of_the_image():
    processor = SphereVisionImageProcessor(num_channels=1, do_resize=False, do_normalize=False, do_rescale=False)
    colors = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    gray = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, 2)
    for pixels, largest in ((gray, 0), (colors, 1)):
        by_image, by_array = (
            processor(given, return_tensors="np").pixel_values.astype(int)
            for given in (PILImage.fromarray(pixels), pixels)
        )
        assert abs(by_image - by_array).max() <= largest
        assert abs(by_image - by_array).mean() < 0.05


def with_transparency(mode: str) -> PILImage.Image:
    """An image of 2 x 1 pixels: black and opaque, and transparent over black."""
    image = PILImage.new("RGBA", (2, 1))
    image.putpixel((0, 0), (0, 0, 0, 255))
    if mode == "PA":
        image = image.convert("P").convert("PA")
        image.putpixel((1, 0), (0, 0))
    elif mode in ("L", "RGB", "1", "I;16"):
        image = PILImage.new(mode, (2, 1))
        image.putpixel((1, 0), {"RGB": (3, 3, 3), "1": 255, "I;16": 3000}.get(mode, 3))
        image.info["transparency"] = image.getpixel((1, 0))
    elif mode == "P":
        image = PILImage.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
        image.info["transparency"] = bytes([255, 0])
    else:
        image = image.convert(mode)
    return image


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "PA", "P", "L", "RGB", "1", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_pixels_have_the_background(mode, channels):
    assert np.array(convert_image(with_transparency(mode), channels)).reshape(2, -1)[:, 0].tolist() == [0, 255]
    drawn = np.array(convert_image(with_transparency(mode), 3, (10, 20, 30)))
    assert drawn.tolist() == [[[0, 0, 0], [10, 20, 30]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_opaque_pixels_do_not_change(mode, channels):
    image = PILImage.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8))
    image = image.quantize(64) if mode == "P" else image.convert("RGB" if mode == "RGBA" else "L")
    expected = np.array(image.convert("L" if channels == 1 else "RGB"))
    if mode == "P":
        image.info["transparency"] = 200  # no pixel has it
    else:
        image = image.convert(mode)
    assert image.has_transparency_data
    np.testing.assert_array_equal(convert_image(image, channels), expected)


def test_a_turned_image_is_not_turned_again():
    image = picture(8, 4)
    image.getexif()[0x0112] = 6
    image.info["exif"] = image.getexif().tobytes()
    once = convert_image(image, 3)
    assert once.size == (4, 8)
    np.testing.assert_array_equal(convert_image(once, 3), once)


def test_the_processor_of_a_trained_model_interpolates_and_draws_on_the_color_as_in_training(tmp_path):
    shape = ImageShape(3, 4, 4, interpolation="bicubic", background=(0, 90, 180))
    trained = EncodedImages(Dataset.from_dict({"image": [PILImage.new("RGBA", (4, 4), (9, 9, 9, 99))]}), "image", shape)
    data = SimpleNamespace(shape=shape, mean=[0.0] * 3, std=[1.0] * 3)
    SphereVisionImageProcessor.from_data(data).save_pretrained(tmp_path)
    saved = SphereVisionImageProcessor.from_pretrained(tmp_path)
    options = processor_options(saved)
    assert (options["background_color"], options["interpolation"]) == ([0, 90, 180], "bicubic")
    pixels = saved(PILImage.new("RGBA", (4, 4), (9, 9, 9, 99)), return_tensors="pt")["pixel_values"][0]
    assert torch.equal((pixels * 255).round().byte(), trained.__getitems__([0])[0])
    white = saved(PILImage.new("RGBA", (4, 4)), background_color=[255] * 3, return_tensors="pt")["pixel_values"]
    assert white.unique().tolist() == [1.0]
