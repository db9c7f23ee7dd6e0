import os
import random
import struct
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, load_dataset
from made_up_images import NOT_AN_IMAGE, encode, make_dataset, noise
from PIL import Image as PILImage, ImageFile
from torchvision.transforms.v2 import functional as tvF

from hf_sphere.data import CorruptImageError, ImageShape, decoding
from hf_sphere.data.decoding import EncodedImages, check_files, decode_all, probe_shapes
from hf_sphere.utils.pixels import WHITE

SHAPE = ImageShape(1, 4, 5)
"""Shape of `flat` images."""

PIL_MODES = {"1": 1, "L": 1, "LA": 1, "I;16": 1, "RGB": 3, "RGBA": 3, "P": 3}


def flat(value: int, height: int = 4, width: int = 5) -> np.ndarray:
    return np.full((height, width), value, dtype=np.uint8)


def decode(tmp_path, dataset, shape=SHAPE, **options):
    """Decode column `image` without a progress bar and with a cache below `tmp_path`."""
    images = EncodedImages(dataset, "image", shape)
    return decode_all(images, **({"cache_dir": tmp_path / "decoded", "progress": False} | options))


class TestProbing:
    def test_each_shape_is_found_once_in_the_order_of_the_images_gray_ones_with_one_channel(self):
        images = [noise(9, 9, 3), noise(3, 7), noise(9, 9, 3)]
        assert probe_shapes(make_dataset(images), "image") == [ImageShape(3, 9, 9), ImageShape(1, 3, 7)]
        for mode, channels in PIL_MODES.items():
            assert probe_shapes(make_dataset([PILImage.new(mode, (5, 4))]), "image")[0].channels == channels

    def test_unreadable_images_are_skipped_and_alone_an_error_that_names_the_column(self):
        for first in (NOT_AN_IMAGE, b"", None):
            assert probe_shapes(make_dataset([first, noise(3, 7, 3)]), "image") == [ImageShape(3, 3, 7)]
        with pytest.raises(CorruptImageError, match="no image of column 'image'"):
            probe_shapes(make_dataset([NOT_AN_IMAGE, NOT_AN_IMAGE]), "image")


class TestPixels:
    @pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
    def test_a_lossless_image_keeps_its_pixels(self, shape, tmp_path):
        pixels = noise(6, *shape)
        channels = 3 if len(shape) == 3 else 1
        images, rows = decode(tmp_path, make_dataset(list(pixels)), ImageShape(channels, 4, 5))
        expected = torch.from_numpy(pixels.reshape(6, 4, 5, channels)).permute(0, 3, 1, 2)
        assert images.dtype == torch.uint8
        assert torch.equal(images, expected)
        assert rows.tolist() == [0, 1, 2, 3, 4, 5]

    def test_gray_images_are_repeated_for_color_and_color_images_converted_to_luma_for_gray(self, tmp_path):
        pixels = noise(4, 5)
        images, _ = decode(tmp_path, make_dataset([pixels]), ImageShape(3, 4, 5))
        assert torch.equal(images[0], torch.from_numpy(pixels).expand(3, 4, 5))
        pixels = noise(4, 5, 3)
        images, _ = decode(tmp_path, make_dataset([pixels]), ImageShape(1, 4, 5))
        luma = pixels @ np.array([0.299, 0.587, 0.114])
        np.testing.assert_allclose(images[0, 0].numpy(), luma, atol=0.51)

    @pytest.mark.parametrize("size", [(3, 4), (20, 9), (6, 14)])
    def test_images_of_different_sizes_are_resized_bilinearly_with_antialiasing(self, size, tmp_path):
        pixels = [noise(12, 10), noise(9, 3), noise(1, 1)]
        images, _ = decode(tmp_path, make_dataset(pixels), ImageShape(1, *size))
        for image, original in zip(images, pixels, strict=True):
            exact = tvF.resize(torch.from_numpy(original).double()[None], list(size), antialias=True)
            np.testing.assert_allclose(image.double(), exact, atol=1.0)

    def test_exif_orientation_is_applied(self, tmp_path):
        photo = PILImage.fromarray(noise(8, 16, 3))
        orientation = photo.getexif()
        orientation[0x0112] = 6
        dataset = make_dataset([encode(photo, "JPEG", exif=orientation)])
        seen_by_datasets = np.array(dataset[0]["image"])
        (shape,) = probe_shapes(dataset, "image")
        assert (shape.height, shape.width) == seen_by_datasets.shape[:2]
        np.testing.assert_array_equal(decode(tmp_path, dataset, shape)[0][0].permute(1, 2, 0), seen_by_datasets)


def odd_metadata(number: int) -> bytes:
    """EXIF data with orientation 6 and one field of a random tag, type, count and value."""
    draw = random.Random(number)
    order = draw.choice("<>")
    kind, count = draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16]), draw.choice([0, 1, 2, 5, 2**31])
    tag = draw.choice([282, 296, 305, 513, 34665, 34853, 50341])
    value = draw.choice([b"72\0\0", b"\6\0\0\0", b"\xff" * 4])
    fields = struct.pack(f"{order}HHIHH", 274, 3, 1, 6, 0) + struct.pack(f"{order}HHI4s", tag, kind, count, value)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, 2)
    return b"Exif\0\0" + head + fields + bytes(20)


class TestMetadata:
    @pytest.mark.filterwarnings("ignore:::PIL")
    def test_a_photo_with_an_odd_field_is_turned_upright(self, tmp_path):
        photo, turned = noise(8, 16), np.rot90(noise(8, 16), -1)
        photos = [encode(photo, "JPEG", quality=100, subsampling=0, exif=odd_metadata(number)) for number in range(150)]
        images, _ = decode(tmp_path, make_dataset(photos), ImageShape(1, 16, 8))
        assert abs(images[:, 0].int() - torch.from_numpy(turned.astype(int))).max() <= 3

    def test_an_image_with_damaged_metadata_is_read(self, tmp_path):
        images = [encode(flat(9), kind, exif=b"Exif\0\0no EXIF") for kind in ("PNG", "WEBP", "JPEG")]
        assert decode(tmp_path, make_dataset(images))[0].unique().tolist() == [9]

    def test_whatever_pil_raises_names_the_image(self, tmp_path, monkeypatch):
        for error in (TypeError("odd"), struct.error("odd"), KeyError("odd"), AttributeError("odd")):
            monkeypatch.setattr(decoding, "convert_image", mock.Mock(side_effect=error))
            with pytest.raises(CorruptImageError, match=r"image 0 of the split cannot be decoded \('?odd'?\)"):
                decode(tmp_path, make_dataset([flat(0)]))


def test_a_drawing_on_transparency_is_drawn_on_the_color(tmp_path):
    drawings = [PILImage.new("RGBA", (5, 4)) for _ in range(2)]  # under their transparency the file is black
    for image, red in zip(drawings, (0, 200), strict=True):
        image.paste((red, 0, 0, 255), (0, 0, 5, 1))
    dataset = make_dataset(drawings)
    white, other = (decode(tmp_path, dataset, ImageShape(3, 4, 5, background=color))[0] for color in (WHITE, (1, 2, 3)))
    assert white[:, :, 1:].unique().tolist() == [255]
    assert other[0, :, 1:].flatten(1).unique(dim=1).tolist() == [[1], [2], [3]]
    assert torch.equal(white[:, :, 0], other[:, :, 0])
    assert not torch.equal(white[0], white[1])


class TestFiles:
    """The check of files before they are decoded."""

    def check(self, images: list[bytes]) -> list[int]:
        encoded = EncodedImages(make_dataset(images), "image", ImageShape(3, 64, 64))
        good = check_files(encoded, skip_corrupt=True, progress=False)
        return sorted({*range(len(images))} - {*good.tolist()})

    @pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000"])
    def test_a_truncated_file_is_found_but_not_one_with_more_bytes_after_its_end(self, file_format):
        whole = encode(noise(64, 64, 3), file_format)
        files = [whole, *(whole[: int(left * len(whole))] for left in (0.5, 0.97))]
        files += [whole + bytes(10)] * (file_format in ("PNG", "JPEG", "GIF"))
        assert self.check(files) == [1, 2]

    def test_complete_files_are_not_decoded(self, monkeypatch):
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
        assert self.check([encode(noise(64, 64), "JPEG"), encode(noise(64, 64))]) == []


class TestCorruptImages:
    @pytest.mark.parametrize("broken", [NOT_AN_IMAGE, b"", None, "gone.png"])
    def test_a_missing_or_empty_image_is_corrupt(self, broken, tmp_path):
        dataset = make_dataset([flat(0), broken]) if not isinstance(broken, str) else None
        if dataset is None:
            cells = [{"bytes": encode(flat(0)), "path": None}, {"bytes": None, "path": str(tmp_path / broken)}]
            dataset = Dataset.from_dict({"image": cells}, features=Features({"image": Image()}))
        with pytest.raises(CorruptImageError, match="image 1 "):
            decode(tmp_path, dataset)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_corrupt_images_are_skipped_one_by_one_and_as_entire_batches(self, num_workers, tmp_path):
        """More than one batch of 500 each, so both workers are used."""
        corrupt = {3, 499, 500, 777}
        dataset = make_dataset([NOT_AN_IMAGE if i in corrupt else flat(i % 256) for i in range(1003)])
        images, rows = decode(tmp_path, dataset, skip_corrupt=True, num_workers=num_workers)
        assert rows.tolist() == [i for i in range(1003) if i not in corrupt]
        assert images[:, 0, 0, 0].tolist() == [i % 256 for i in rows.tolist()]
        dataset = make_dataset([NOT_AN_IMAGE] * 500 + [flat(1), flat(2)])
        images, rows = decode(tmp_path, dataset, skip_corrupt=True, num_workers=num_workers)
        assert rows.tolist() == [500, 501]
        assert images[:, 0, 0, 0].tolist() == [1, 2]


class TestCache:
    def test_equal_data_built_again_reads_the_cache_which_stores_the_images_that_were_skipped(
        self, tmp_path, monkeypatch
    ):
        dataset = make_dataset([flat(0), NOT_AN_IMAGE, flat(2)])
        decode(tmp_path, dataset, skip_corrupt=True)
        with pytest.raises(CorruptImageError, match="image 1 "):
            decode(tmp_path, dataset)
        monkeypatch.setattr(decoding, "open_image", lambda _: pytest.fail("decoded although there is a cache"))
        images, rows = decode(tmp_path, make_dataset([flat(0), NOT_AN_IMAGE, flat(2)]), skip_corrupt=True)
        assert rows.tolist() == [0, 2]
        assert images[:, 0, 0, 0].tolist() == [0, 2]

    @pytest.mark.parametrize("shape", [ImageShape(3, 4, 5), ImageShape(1, 5, 4), ImageShape(1, 4, 6)])
    def test_other_data_a_subset_and_another_shape_do_not_read_the_cache(self, shape, tmp_path):
        dataset = make_dataset([flat(1), flat(2), flat(3)])
        decode(tmp_path, dataset)
        assert decode(tmp_path, dataset, shape)[0].shape[1:] == (shape.channels, shape.height, shape.width)
        assert decode(tmp_path, dataset.select([2, 0]))[0][:, 0, 0, 0].tolist() == [3, 1]
        assert decode(tmp_path, make_dataset([flat(7), flat(8), flat(9)]))[0][:, 0, 0, 0].tolist() == [7, 8, 9]

    @pytest.mark.parametrize("is_only_named", [False, True])
    def test_a_changed_image_file_does_not_read_the_cache(self, is_only_named, tmp_path):
        (tmp_path / "folder").mkdir()
        file = tmp_path / "folder" / "0.png"
        for value in (1, 9):
            PILImage.fromarray(flat(value)).save(file)
            os.utime(file, (value, value))
            named = Dataset.from_dict({"image": [str(file)]}).cast_column("image", Image())
            dataset = named if is_only_named else load_dataset(str(tmp_path / "folder"))["train"]
            assert int(decode(tmp_path, dataset)[0][0, 0, 0, 0]) == value
