"""Training images that are mixed in pairs."""

import pytest
import torch

from hf_sphere import SphereVisionConfig
from hf_sphere.data import ImageDataOptions, ImagesInMemory, load_image_data
from hf_sphere.data.augmentation import Augmentation
from hf_sphere.training import RecipeArguments
from hf_sphere.training.tasks.classification import ImageDataArguments, ModelArguments, check_head


def plain_images(count=8):
    """Images of one value each, their number, on which shares can be read."""
    values = torch.arange(count, dtype=torch.uint8)
    return values[:, None, None, None].expand(count, 1, 16, 16).contiguous(), values.long()


def batches(**options):
    images, labels = plain_images()
    augmentation = Augmentation(**options)
    sizes = {"batch_size": 8, "mean": [0.0], "std": [1 / 255]}  # pixel values are the numbers
    return ImagesInMemory(images, labels, **sizes, augmentation=augmentation, shuffle=True)


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


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_head_that_compares_the_batch_is_refused_before_the_data_is_loaded(is_saved, tmp_path):
    SphereVisionConfig(backbone="lenet5", head="proxy_anchor").save_pretrained(tmp_path)
    source = {"model_name_or_path": str(tmp_path)} if is_saved else {"head": "proxy_anchor"}
    with pytest.raises(ValueError, match="head proxy_anchor compares the images of a batch; leave out mixup"):
        check_head(ModelArguments(**source), ImageDataArguments("digits", mixup=0.2), RecipeArguments("unused"))
