"""Options for loading image and text datasets; each is also an argument of the recipes.

Nothing heavy is imported here, so that recipes can parse their arguments quickly.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_sphere.utils.arguments import SEED, Arguments, argument

DataTask = Literal["classification", "regression", "joint", "retrieval", "few_shot"]
"""Kind of `labels`: classes, real values, classes with real values in addition, or (the last two) classes that are
numbered separately in each split."""

LARGEST_SIDE = 2**14
"""Largest side of images, pixels."""


def check_lengths(options: Any, **lengths: tuple[int, ...]) -> None:
    """Raise an error if an option, by name, has another number of values than one of these."""
    for name, allowed in lengths.items():
        if (values := getattr(options, name)) is not None and len(values) not in allowed:
            raise ValueError(f"{name} needs {' or '.join(map(str, allowed))} numbers; got {[*values]}.")


@dataclass
class ImageSourceOptions(Arguments):
    """Images, their size and their labels."""

    dataset_name: str = argument("digits", "Hub id, folder, or a bundled dataset: `digits` or `two_clusters`.")
    dataset_config_name: str | None = argument(None, "Configuration of the dataset.")
    train_split: str = argument("train", "Training split, or a part of the data such as `train[:80%]` or `all`.")
    eval_split: str | None = argument(None, "Evaluation split or part; default: test, else validation, else held out.")
    eval_fraction: float | None = argument(
        None,
        "Fraction of the training images (in retrieval and few-shot of their classes) to hold out; default: 0.2.",
        not_with=["eval_split"],
        gt=0,
        lt=1,
    )
    eval_seed: int = argument(0, "Seed of the images held out for evaluation.", not_with=["eval_split"], **SEED)
    validation_split: str | None = argument(
        None, "Split for choosing the best epoch and for early stopping.", not_with=["validation_fraction"]
    )
    validation_fraction: float = argument(
        0.0, "Fraction to hold out likewise for choosing the best epoch, instead of a validation split.", ge=0, lt=1
    )
    rejection_fraction: float = argument(
        0.0,
        "Fraction of the training images to reserve for the rejection of unknown ones; only for classification.",
        ge=0,
        lt=1,
    )
    image_column_name: str | None = argument(None, "Image column; detected by name by default.")
    label_column_name: str | None = argument(None, "Label column; detected by name by default.")
    image_size: list[int] | None = argument(
        None, "Side in pixels, or height and width; default: those of the images, if equal.", ge=1, le=LARGEST_SIDE
    )
    crop_pct: float | None = argument(
        None, "Crop the center, this fraction of a side, as timm does; default: stretch the whole image.", gt=0, le=1
    )
    interpolation: Literal["bilinear", "bicubic"] | None = argument(
        None, "Interpolation of resized images; default: of the pretrained model, else bilinear."
    )
    background_color: list[int] | None = argument(
        None, "Color behind transparent parts, 0 to 255; default: of the pretrained model, else white.", ge=0, le=255
    )
    num_channels: Literal[1, 3] | None = argument(None, "1 or 3; default: 3 if some images have colors.")
    image_mean: list[float] | None = argument(None, "Mean per channel, on the scale 0 to 1; default: measured.")
    image_std: list[float] | None = argument(None, "Standard deviation per channel; default: measured.", gt=0)
    sample_classes: int | None = argument(None, "Keep only this many classes, sampled with corruption_seed.", ge=2)
    label_noise: float = argument(0.0, "Fraction of training labels to replace by uniformly drawn classes.", ge=0, le=1)
    shuffled_pixels: Literal["per_image", "shared"] | None = argument(
        None, "Permute the pixels of every image: with a permutation per image, or one shared by all images."
    )
    corruption_seed: int | None = argument(
        None,
        "Seed of sample_classes, label_noise and shuffled_pixels; default: the seed of the run.",
        only_with=["sample_classes", "label_noise", "shuffled_pixels"],
        **SEED,
    )
    max_train_samples: int | None = argument(None, "Use at most this many training images.", ge=1)
    max_eval_samples: int | None = argument(None, "Use at most this many evaluation images.", ge=1)
    skip_invalid: bool = argument(False, "Skip images that cannot be decoded.")
    cache_dir: str | None = argument(None, "Cache folder for decoded images; default: in the Hugging Face home.")
    keep_in_memory: Literal["auto", "yes", "no"] = argument(
        "auto", "Keep images in memory and in cache_dir; auto: up to 96 pixels a side, in at most half the free memory."
    )
    dataloader_num_workers: int | None = argument(None, "Decoding processes; default: one per core.", ge=0, le=1024)
    follow_links: bool = argument(
        False, "Follow links in the folder of the dataset to files outside it, which are an error by default."
    )

    def __post_init__(self) -> None:
        self.dataset_name = os.fspath(self.dataset_name)
        if isinstance(self.image_size, int):
            self.image_size = [self.image_size]
        super().__post_init__()
        check_lengths(self, image_size=(1, 2), background_color=(3,))

    @property
    def held_out_fraction(self) -> float:
        """Fraction of the training split to hold out for evaluation, if there is no evaluation split."""
        return self.eval_fraction or 0.2

    def fill(self, preprocessing: Mapping[str, Any]) -> None:
        """Set the options of a model's preprocessing that are None."""
        for name, value in preprocessing.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


@dataclass
class AugmentationOptions(Arguments):
    """Random augmentation of training images."""

    crop_padding: int = argument(0, "Padding in pixels before a random crop of training images.", ge=0, le=LARGEST_SIDE)
    horizontal_flip: bool = argument(
        False, "Flip training images horizontally with probability 1/2.", not_with=["alternating_flip"]
    )
    alternating_flip: bool = argument(False, "Flip each training image in every other epoch, a random half first.")
    rotation: float = argument(0.0, "Maximum angle of random rotations of training images, in degrees.", ge=0, le=180)
    random_resized_crop: float | None = argument(
        None, "Random resized crops of at least this fraction of the area.", not_with=["crop_padding"], gt=0, le=1
    )
    crop_padding_mode: Literal["zeros", "reflect"] = argument(
        "zeros", "Pad with zeros, or reflect the image.", only_with=["crop_padding"]
    )
    crop_aspect_ratio: float = argument(
        4 / 3, "Largest relative aspect ratio of random resized crops.", only_with=["random_resized_crop"], ge=1
    )
    color_jitter: list[float] | None = argument(
        None, "Strengths of random changes of brightness, contrast, saturation and hue of training images.", ge=0, le=1
    )
    occlusion: int = argument(
        0, "Side in pixels of a square of the mean color on each training image; 0 for none.", ge=0, le=LARGEST_SIDE
    )
    rand_augment: list[int] | None = argument(
        None, "Number of operations and magnitude of RandAugment on training images, for instance 2 9.", ge=0, le=30
    )
    mixup: float | None = argument(None, "Mix pairs of training images and labels, with this alpha, say 0.2.", gt=0)
    cutmix: float | None = argument(
        None, "Mix parts of training images by area, with this alpha. With mixup, half of the batches each.", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self, color_jitter=(4,), rand_augment=(2,))


@dataclass
class ImageDataOptions(AugmentationOptions, ImageSourceOptions):
    """Drawing of training images."""

    class_balanced_sampling: bool = argument(
        False, "Draw the training images of an epoch with replacement, each class equally often on average."
    )
    streaming: bool = argument(
        False,
        "Read images from shards when needed. Set max_train_samples and max_eval_samples if it states no numbers.",
    )
    shuffle_buffer_size: int = argument(
        1000, "Images of a stream among which the next one is drawn.", only_with=["streaming"], ge=1
    )
    class_names: list[str] | None = argument(
        None, "Classes by index, for a stream whose labels do not list them.", only_with=["streaming"]
    )


@dataclass
class ValueOptions(Arguments):
    """Targets of a regression."""

    value_column_name: str | None = argument(
        None, "Value column; detected by name by default.", not_with=["computed_value"]
    )
    computed_value: Literal["slant"] | None = argument(
        None, "Value computed from the image, which is kept in memory, instead: slant, in degrees."
    )


@dataclass
class OpenSetOptions(Arguments):
    """Division of the classes into training and evaluation."""

    train_classes: int | None = argument(
        None, "Pool both splits, train on the first N classes and evaluate on the others; default: keep them.", ge=1
    )


@dataclass
class TextDataOptions(Arguments):
    """Text, and the tokens to predict."""

    dataset_name: str = argument(help="Hub id, folder, or a text, parquet, json or csv file.")
    dataset_config_name: str | None = argument(None, "Configuration of the dataset.")
    train_split: str = argument("train", "Training split.")
    eval_split: str | None = argument(None, "Evaluation split; default: test, else validation, else the held-out part.")
    validation_split: str | None = argument(
        None,
        "Split for choosing the best epoch and for early stopping; default: `validation`, if not used otherwise.",
        not_with=["validation_fraction"],
    )
    validation_fraction: float = argument(
        0.0, "Fraction of the training text to hold out, from its end, instead of using a validation split.", ge=0, lt=1
    )
    text_column_name: str | None = argument(None, "Text column; detected by name by default.")
    max_seq_length: int | None = argument(
        None, "Tokens per block, including special tokens; default: the maximum of the model, but at most 512.", ge=1
    )
    objective: Literal["masked", "reconstruction"] = argument(
        "masked", "Predict masked tokens, or reproduce all tokens without masking, as in the paper."
    )
    mask_probability: float | None = argument(
        None, "Fraction of the tokens to predict; default: 0.15.", only_with=["objective=masked"], gt=0, le=1
    )
    max_train_samples: int | None = argument(None, "Use at most this many training blocks.", ge=1)
    max_eval_samples: int | None = argument(None, "Use at most this many blocks for evaluation, and validation.", ge=1)
    cache_dir: str | None = argument(None, "Cache folder for prepared text; by default the cache of `datasets`.")
    preprocessing_num_workers: int | None = argument(None, "Tokenization processes; default: one.", ge=1, le=1024)
    follow_links: bool = argument(
        False, "Follow links in the folder of the dataset to files outside it, which are an error by default."
    )
