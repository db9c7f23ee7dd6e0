import itertools
import math

import numpy as np
import pytest
import torch
from made_up_images import pixels as noise
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop, functional as tvF

from hf_sphere.data import Augmentation, ImageDataOptions, ImagesInMemory, augmentation, load_image_data

EVERYTHING = [
    Augmentation(crop_padding=2, horizontal_flip=True, rotation=30.0, occlusion=1),
    Augmentation(random_resized_crop=0.08, horizontal_flip=True, rotation=30.0, color_jitter=(0.3, 0.3, 0.3, 0.1)),
]


def windows(image: Tensor, padding: int, mode: str = "constant") -> list[np.ndarray]:
    """All windows of the original size in the padded image, by numpy's mode of padding."""
    _, height, width = image.shape
    padded = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)), mode)
    return [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]


class TestAugmentation:
    @pytest.mark.parametrize(
        "change",
        [Augmentation(crop_padding=3), Augmentation(horizontal_flip=True), Augmentation(rotation=90.0), *EVERYTHING],
    )
    @pytest.mark.parametrize("shape", [(5, 1, 4, 9), (5, 3, 9, 4), (1, 1, 1, 2)])
    def test_shape_and_dtype_are_preserved_and_the_input_is_not_modified(self, change, shape):
        images = noise(*shape)
        changed = change(images, torch.Generator())
        assert (changed.shape, changed.dtype) == (shape, torch.uint8)
        assert torch.equal(images, noise(*shape))
        assert torch.equal(Augmentation()(images, torch.Generator()), images)

    @pytest.mark.parametrize(("padding", "mode"), [(1, "zeros"), (2, "zeros"), (7, "zeros"), (3, "reflect")])
    @pytest.mark.parametrize("shape", [(1, 5, 5), (3, 4, 7)])
    def test_a_crop_is_any_window_of_the_padded_image(self, shape, padding, mode):
        change, image = Augmentation(crop_padding=padding, crop_padding_mode=mode), noise(*shape)
        expected = {window.tobytes() for window in windows(image, padding, mode.replace("zeros", "constant"))}
        crops = change(image.expand(500, -1, -1, -1), torch.Generator().manual_seed(1))
        seen = {crop.numpy().tobytes() for crop in crops}
        assert seen <= expected
        assert seen == expected or padding > 2

    def test_a_flip_mirrors_half_of_the_images_and_leaves_the_others_unchanged(self):
        images = noise(4000, 3, 2, 3)
        flipped = Augmentation(horizontal_flip=True)(images, torch.Generator().manual_seed(1))
        is_same, is_mirrored = ((flipped == each).flatten(1).all(1) for each in (images, images.flip(-1)))
        assert (is_same | is_mirrored).all()
        # Six standard deviations of a fair coin.
        assert is_mirrored.float().mean().item() == pytest.approx(0.5, abs=6 * 0.5 / math.sqrt(4000))

    @pytest.mark.parametrize("side", [5, 6])
    def test_quarter_turns_equal_clockwise_rot90_and_half_turns_of_any_image_a_flip(self, side):
        images = noise(4, 3, side, side)
        turned = augmentation._rotate(images, torch.arange(4) * math.pi / 2)  # each by its own angle
        for quarters in range(4):
            assert torch.equal(turned[quarters], torch.rot90(images[quarters], -quarters, dims=(-2, -1)))
        for shape in ((4, side + 4), (side + 4, 4)):
            images = noise(4, 1, *shape)
            assert torch.equal(augmentation._rotate(images, torch.zeros(4)), images)
            assert torch.equal(augmentation._rotate(images, torch.full((4,), math.pi)), images.flip(-1, -2))

    @pytest.mark.parametrize("degrees", [-75.0, -10.0, 12.5, 33.0, 88.0, 140.0])
    @pytest.mark.parametrize("shape", [(11, 11), (7, 16), (16, 7)])
    def test_rotation_matches_torchvision(self, shape, degrees):
        image = noise(1, *shape)
        result = augmentation._rotate(image[None], torch.tensor([math.radians(degrees)]))[0]
        assert (result == tvF.rotate(image, -degrees)).float().mean() > 0.97  # but for pixels halfway between two

    def test_angles_cover_the_range_in_both_directions(self, monkeypatch):
        monkeypatch.setattr(augmentation, "_rotate", lambda images, radians: radians.rad2deg())
        images = torch.zeros(2000, 1, 1, 1, dtype=torch.uint8)
        degrees = Augmentation(rotation=40.0)(images, torch.Generator().manual_seed(1))
        assert -40.0 <= degrees.min() < -39.0
        assert 39.0 < degrees.max() <= 40.0


class TestRandomResizedCrop:
    @pytest.mark.parametrize(("height", "width"), [(16, 16), (12, 20), (1, 2)])
    def test_a_crop_is_that_of_torchvision_with_an_aspect_ratio_relative_to_the_image(self, height, width):
        images, aspect = noise(30, 3, height, width), width / height
        crop = RandomResizedCrop((height, width), (0.2, 1.0), (aspect / 1.5, aspect * 1.5))
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        expected = torch.stack([crop(image.float()).round().byte() for image in images])
        change = Augmentation(random_resized_crop=0.2, crop_aspect_ratio=1.5)
        assert torch.equal(change(images, torch.Generator().manual_seed(1)), expected)

    @pytest.mark.parametrize("shape", [(2, 1, 9, 9), (2, 3, 5, 8)])
    def test_a_crop_of_the_full_area_is_the_whole_image(self, shape):
        images = noise(*shape)
        assert torch.equal(
            Augmentation(random_resized_crop=1.0, crop_aspect_ratio=1.0)(images, torch.Generator()), images
        )

    def test_each_image_gets_a_different_crop_of_all_channels_by_the_generator(self):
        images = noise(1, 1, 16, 16).expand(20, 3, -1, -1)
        crops, again = (Augmentation(random_resized_crop=0.08)(images, torch.Generator().manual_seed(1)) for _ in "ab")
        assert len({crop.numpy().tobytes() for crop in crops}) == 20
        assert torch.equal(crops, crops[:, :1].expand(-1, 3, -1, -1))
        assert torch.equal(crops, again)


class TestColorJitter:
    @pytest.mark.parametrize(
        ("adjust", "neutral"),
        [(tvF.adjust_brightness, 1.0), (tvF.adjust_contrast, 1.0), (tvF.adjust_saturation, 1.0), (tvF.adjust_hue, 0.0)],
    )
    def test_each_change_matches_torchvision_image_by_image(self, adjust, neutral):
        images = noise(11, 3, 6, 7).double() / 255
        images[0] = images[0, :1]  # gray
        amounts = torch.linspace(-0.5, 0.5, 11, dtype=torch.float64)
        kind = ("brightness", "contrast", "saturation", "hue").index(adjust.__name__.removeprefix("adjust_"))
        result = augmentation._change_color(images, amounts[:, None, None, None], kind)
        for image, amount, mine in zip(images, amounts.tolist(), result, strict=True):
            torch.testing.assert_close(mine, adjust(image, neutral + amount), atol=1e-6, rtol=0)

    def test_jittered_images_are_a_composition_of_torchvision_changes_in_an_order_per_batch(self):
        strengths, count, used = (0.3, 0.25, 0.2, 0.1), 3, set()
        images = noise(count, 3, 5, 5)
        for seed in range(30):
            amounts = torch.rand(4, count, generator=torch.Generator().manual_seed(seed))
            amounts = (2 * amounts - 1) * torch.tensor(strengths)[:, None]
            jittered = Augmentation(color_jitter=strengths)(images, torch.Generator().manual_seed(seed))
            differences = dict.fromkeys(itertools.permutations(range(4)), 0.0)
            for image, (*factors, hue), result in zip(images, amounts.T.tolist(), jittered, strict=True):
                adjust = [
                    lambda x, f=factors[0]: tvF.adjust_brightness(x, 1 + f),
                    lambda x, f=factors[1]: tvF.adjust_contrast(x, 1 + f),
                    lambda x, f=factors[2]: tvF.adjust_saturation(x, 1 + f),
                    lambda x, f=hue: tvF.adjust_hue(x, f),
                ]
                for order in differences:
                    changed = image / 255
                    for kind in order:
                        changed = adjust[kind](changed)
                    differences[order] = max(differences[order], (255 * changed - result).abs().max().item())
            order = min(differences, key=differences.get)
            assert differences[order] < 0.51
            used.add(order)
        assert len(used) > 12

    def test_amounts_cover_both_directions_and_gray_images_change_in_brightness_only(self):
        images, generator = torch.full((2000, 1, 1, 1), 100, dtype=torch.uint8), torch.Generator().manual_seed(1)
        for channels, strengths in ((3, (0.3, 0.0, 0.0, 0.0)), (1, (0.3, 0.3, 0.3, 0.1))):
            of_channels = images.expand(-1, channels, -1, -1)
            brightness = Augmentation(color_jitter=strengths)(of_channels, generator)[:, 0, 0, 0]
            assert (brightness.min().item(), brightness.max().item()) == (70, 130)
            assert brightness.float().mean().item() == pytest.approx(100, abs=2)
        assert torch.equal(Augmentation(color_jitter=(0.0, 0.3, 0.3, 0.1))(images, generator), images)


class TestOcclusion:
    def test_exactly_one_square_of_the_color_is_covered_in_each_image(self):
        images = torch.full((300, 3, 9, 6), 255, dtype=torch.uint8)
        change = Augmentation(occlusion=4, occlusion_color=(10.4, 20.6, 30.0))
        covered = change(images, torch.Generator().manual_seed(1))
        corners = set()
        for image in covered:
            rows, columns = (image[0] != 255).nonzero(as_tuple=True)
            top, left = int(rows.min()), int(columns.min())
            expected = torch.full((3, 9, 6), 255, dtype=torch.uint8)
            expected[:, top : top + 4, left : left + 4] = torch.tensor([10, 21, 30], dtype=torch.uint8)[:, None, None]
            assert torch.equal(image, expected)
            corners.add((top, left))
        assert corners == set(itertools.product(range(6), range(3)))

    def test_occlusion_of_a_data_set_has_its_mean_color(self):
        options = {"image_size": 8, "dataloader_num_workers": 0, "image_mean": [0.2], "image_std": [0.5]}
        data = load_image_data(ImageDataOptions(occlusion=8, **options), batch_size=16, progress=False)
        pixels = next(data.train.epoch())["pixel_values"]
        # The color is rounded to 8 bits.
        assert pixels.abs().max() <= 0.5 / 255 / 0.5


def test_what_exceeds_the_image_is_an_error():
    with pytest.raises(ValueError, match=r"crop_padding 4 exceeds what .* 4 x 9 pixels allow, 3"):
        Augmentation(crop_padding=4, crop_padding_mode="reflect").check_size(4, 9)
    with pytest.raises(ValueError, match="occlusion 5 exceeds what images of 4 x 9 pixels allow, 4"):
        Augmentation(occlusion=5).check_size(4, 9)


def batches(**options):
    """Batches of eight images of one value each, their number, on which shares can be read."""
    images = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 1, 16, 16).contiguous()
    sizes = {"batch_size": 8, "mean": [0.0], "std": [1 / 255]}  # pixel values are the numbers
    return ImagesInMemory(images, torch.arange(8), **sizes, augmentation=Augmentation(**options), shuffle=True)


def first_batches(count, **options):
    split = batches(**options)
    return [next(split.epoch(epoch)) for epoch in range(count)]


@pytest.mark.parametrize("options", [{"mixup": 0.5}, {"cutmix": 1.0}])
def test_the_mean_pixel_is_that_of_the_labels_by_share(options):
    for batch in first_batches(20, **options):
        share = batch["mixed_share"]
        expected = (1 - share) * batch["labels"] + share * batch["mixed_labels"]
        torch.testing.assert_close(batch["pixel_values"].mean((1, 2, 3)), expected, rtol=1e-4, atol=1e-4)


def test_the_label_is_that_of_the_larger_share_and_both_kinds_are_drawn():
    shares = torch.cat([batch["mixed_share"] for batch in first_batches(20, mixup=1.0)])
    assert shares.min() > 0
    assert shares.max() <= 0.5
    assert len(shares.unique()) == 20
    mixed = [batch["pixel_values"][0].unique().numel() for batch in first_batches(40, mixup=1.0, cutmix=1.0)]
    assert 10 <= mixed.count(1) <= 30  # mixup leaves one value per image


def test_cutmix_keeps_pixels_of_two_images():
    for batch in first_batches(10, cutmix=1.0):
        for image, *labels in zip(batch["pixel_values"], batch["labels"], batch["mixed_labels"], strict=True):
            assert {*image.round().unique().tolist()} <= {float(label) for label in labels}


def test_an_epoch_has_the_same_batches_again_and_leaves_the_random_state():
    split, before = batches(mixup=0.5, cutmix=0.5, horizontal_flip=True), torch.get_rng_state()
    first, again = next(split.epoch(3)), next(split.epoch(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_images_for_evaluation_and_initialization_are_not_mixed():
    data = load_image_data(ImageDataOptions("digits", mixup=0.2), progress=False)
    assert "mixed_labels" in next(data.train.epoch())
    assert "mixed_labels" not in next(data.evaluation.epoch())
    assert "mixed_labels" not in next(batches(mixup=0.5).epoch(augment=False))
