"""Augmentation by the processes that decode images, from their original pixels."""

import io

import numpy as np
import pytest
import torch
from made_up_images import encode, make_dataset, noise
from PIL import Image as PILImage
from torchvision.transforms import v2

from hf_sphere.data import Augmentation, Episodes, ImagesFromDisk, ImageShape, ImagesInMemory, ImageSourceOptions
from hf_sphere.data.decoding import EncodedImages
from hf_sphere.data.splits import Corruption
from hf_sphere.utils.seeds import mix_seed

ORIGINALS = [noise(31, 44, 3, seed=seed) for seed in range(11)]
EVERYTHING = Augmentation(random_resized_crop=0.2, horizontal_flip=True, rand_augment=[2, 9], rotation=20.0)


def batches(images=ORIGINALS, shape=(16, 16), **options) -> ImagesFromDisk:
    """Return a function that makes training batches of images, with pixel values from 0 to 255."""
    encoded = EncodedImages(make_dataset(images), "image", ImageShape(3, *shape))
    options = {"batch_size": 4, "mean": [0.0], "std": [1 / 255], "shuffle": True, "num_workers": 0} | options
    return ImagesFromDisk(encoded, torch.arange(len(images)), **options)


def images_by_label(epoch) -> dict[int, torch.Tensor]:
    return {int(label): image for batch in epoch for image, label in zip(*batch.values(), strict=True)}


@pytest.mark.parametrize("shape", [(16, 16), (12, 20)])
def test_an_augmented_image_is_what_torchvision_makes_of_the_original(shape):
    augmentation = Augmentation(
        random_resized_crop=0.2, crop_aspect_ratio=1.5, horizontal_flip=True, rand_augment=[2, 9]
    )
    training = batches(shape=shape, augmentation=augmentation, seed=3)
    aspect = shape[1] / shape[0]
    crop = v2.RandomResizedCrop(shape, (0.2, 1.0), (aspect / 1.5, aspect * 1.5), antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.RandAugment(2, 9)])
    order = [label for batch in training.epoch(5) for label in batch["labels"].tolist()]
    found = images_by_label(training.epoch(5))
    assert sorted(order) == list(range(11))
    for place, label in enumerate(order):
        torch.manual_seed(mix_seed(3, 5, place + 1))
        expected = transform(torch.from_numpy(ORIGINALS[label]).permute(2, 0, 1))
        assert torch.equal(found[label].round().byte(), expected)


def test_crops_are_sharper_than_those_of_the_resized_image():
    """A small crop of an image that was resized first has no detail."""
    stripes = np.tile(np.array([0, 255], dtype=np.uint8), (32, 16))[..., None].repeat(3, 2)
    crop = Augmentation(random_resized_crop=0.05)
    original = torch.cat([batch["pixel_values"] for batch in batches([stripes] * 40, augmentation=crop).epoch()])
    resized = v2.functional.resize(torch.from_numpy(stripes).permute(2, 0, 1), [16, 16], antialias=True)
    kept = ImagesInMemory(
        resized.expand(40, -1, -1, -1), torch.zeros(40), batch_size=40, mean=[0.0], std=[1 / 255], augmentation=crop
    )
    assert next(kept.epoch())["pixel_values"].std(dim=(1, 2, 3)).max() < 10
    assert original.std(dim=(1, 2, 3)).max() > 60


def test_a_turned_photo_is_cropped_upright():
    upright = noise(40, 60, 3)
    pixels, buffer = PILImage.fromarray(upright), io.BytesIO()
    exif = PILImage.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show it
    pixels.transpose(PILImage.Transpose.ROTATE_90).save(buffer, "PNG", exif=exif)
    options = {"augmentation": Augmentation(random_resized_crop=0.1), "batch_size": 1}
    (turned,), (plain,) = (list(batches([image], **options).epoch()) for image in (buffer.getvalue(), upright))
    assert torch.equal(turned["pixel_values"], plain["pixel_values"])


def test_a_large_jpeg_is_decoded_at_a_smaller_size_with_nearly_the_same_crop(monkeypatch):
    x, y = np.meshgrid(np.arange(1200), np.arange(900))
    waves = np.stack([127 + 100 * np.sin(x / 160), 127 + 100 * np.cos(y / 120), (x + y) / 9], -1).astype(np.uint8)
    photo = encode(waves, "JPEG", quality=95)
    crop = Augmentation(random_resized_crop=0.3)
    scaled = [batches([photo], augmentation=crop, seed=seed, batch_size=1) for seed in range(8)]
    found = torch.cat([next(each.epoch())["pixel_values"] for each in scaled])
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.draft", lambda self, mode, size: None)
    exact = torch.cat([next(each.epoch())["pixel_values"] for each in scaled])
    assert not torch.equal(found, exact)
    assert (found - exact).abs().mean() < 1.5
    assert (found - exact).abs().max() < 16


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_is_the_same_for_any_number_of_workers_and_processes(num_workers):
    augmentation = Augmentation(random_resized_crop=0.2, horizontal_flip=True, rand_augment=[2, 9])
    parts = {}
    for index in range(2):
        options = {"num_workers": num_workers, "process_index": index, "num_processes": 2, "batch_size": 2}
        parts |= images_by_label(batches(ORIGINALS[:8], augmentation=augmentation, **options).epoch(2))
    alone = images_by_label(batches(ORIGINALS[:8], augmentation=augmentation).epoch(2))
    assert parts.keys() == alone.keys() == {*range(8)}
    assert all(torch.equal(parts[label], image) for label, image in alone.items())


def test_augmentation_of_episodes_is_the_same_for_any_number_of_processes():
    drawn = {"augmentation": Augmentation(random_resized_crop=0.2), "batch_size": None, "episodes": Episodes(4, 1, 4)}
    alone = [batch["pixel_values"] for batch in batches(**drawn).epoch(2)]
    for index in range(2):
        part = batches(**drawn, process_index=index, num_processes=2).epoch(2)
        assert torch.equal(torch.stack([batch["pixel_values"] for batch in part]), torch.stack(alone[index::2]))


def test_shuffled_pixels_are_augmented_like_those_in_memory():
    """The permutation is for the size of the model, so the crop must come after it."""
    encoded = EncodedImages(make_dataset(ORIGINALS), "image", ImageShape(3, 16, 16))
    rows, options = torch.arange(11), {"batch_size": 4, "mean": [0.0], "std": [1 / 255], "shuffle": True}
    options["augmentation"] = EVERYTHING
    shuffled = Corruption(ImageSourceOptions(shuffled_pixels="shared"), 0).shuffle(encoded, rows, "train")
    disk = ImagesFromDisk(shuffled, rows, num_workers=0, **options)
    memory = ImagesInMemory(torch.stack(shuffled.__getitems__(list(range(11)))), rows, **options)
    for one, other in zip(disk.epoch(1), memory.epoch(1), strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
