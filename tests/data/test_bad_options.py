"""Options that contradict each other, the task or the data; bounds of single numbers are those of all arguments."""

import pytest

from hf_sphere.data import Episodes

SLANT, FEW = {"computed_value": "slant"}, Episodes(2, 2, 1)
VALUES = {"task": "regression", **SLANT}
STREAM = {
    **{"streaming": True, "image_size": 8, "num_channels": 1, "image_mean": [0.5], "image_std": [0.5]},
    **{"max_train_samples": 9, "max_eval_samples": 9},
}
OPTIONS = [
    *(({"image_size": size}, "image_size needs 1 or 2 numbers") for size in ([4, 4, 4], [])),
    ({"image_size": [4, 0]}, "image_size must be at least 1 and at most 16384; got 0"),
    ({"num_channels": 2}, "num_channels must be 1 or 3; got 2"),
    ({"keep_in_memory": "maybe"}, "keep_in_memory must be auto or yes or no; got 'maybe'"),
    ({"image_std": [0.5, 0.0]}, "image_std must be above 0"),
    *(({f"image_{name}": [0.5, 0.5]}, "could not be broadcast") for name in ("mean", "std")),
    ({"color_jitter": (0.3, 0.3, 0.3)}, "color_jitter needs 4 numbers; got"),
    ({"rand_augment": (2,)}, "rand_augment needs 2 numbers; got"),
    ({"rand_augment": (2, 31)}, "rand_augment must be at least 0 and at most 30; got 31"),
    ({"crop_padding": 4, "random_resized_crop": 0.08}, "random_resized_crop and crop_padding exclude each other"),
    ({"horizontal_flip": True, "alternating_flip": True}, "horizontal_flip and alternating_flip exclude each other"),
    ({"crop_aspect_ratio": 1.0}, "crop_aspect_ratio 1.0 has no effect without random_resized_crop"),
    ({"crop_padding_mode": "reflect"}, "crop_padding_mode reflect has no effect without crop_padding"),
    ({"shuffled_pixels": "all"}, "^shuffled_pixels must be per_image or shared; got 'all'"),
    ({"sample_classes": 11}, "--sample_classes 11 is more than the data has: 10 classes"),
    ({"validation_fraction": 0.2, "validation_split": "test"}, "validation_split and validation_fraction exclude"),
    ({"validation_split": "test"}, "--validation_split test is also the split of --eval_split"),
    ({"validation_split": "train"}, "--validation_split train is also the split of --train_split"),
    ({"validation_split": "dev"}, "no split 'dev'; the data has train, test.*--validation_split"),
    ({"task": "retrieval", "train_classes": 2, "validation_split": "test"}, "all classes are divided"),
    ({"task": "retrieval", "train_classes": 10}, "--train_classes 10 does not divide 10 classes"),
    ({"task": "ranking"}, "task must be one of classification, regression, joint, retrieval, few_shot; got 'ranking'"),
    (VALUES | {"computed_value": "slope"}, "computed_value must be slant; got 'slope'"),
    (VALUES | {"value_column_name": "year"}, "value_column_name and computed_value exclude each other"),
    # The task
    (VALUES | {"label_column_name": "label"}, "--label_column_name label does not apply to regression"),
    (VALUES | {"label_noise": 0.2}, r"--label_noise 0\.2 does not apply to regression"),
    (VALUES | {"class_balanced_sampling": True}, "does not apply to regression, but to .*; leave it out"),
    (VALUES | {"episodes": FEW}, r"--episodes .* does not apply to regression"),
    (SLANT, "--computed_value slant does not apply to classification, but to regression and joint"),
    (SLANT | {"task": "retrieval"}, "--computed_value slant does not apply to retrieval"),
    ({"value_column_name": "year"}, "--value_column_name year does not apply to classification"),
    *(
        ({"task": task, "sample_classes": 3}, f"--sample_classes 3 does not apply to {task}")
        for task in ("retrieval", "few_shot")
    ),
    *(
        ({"task": task, "train_classes": 1}, f"--train_classes 1 does not apply to {task}")
        for task in ("classification", "joint")
    ),
    *(({"task": task, "mixup": 0.2}, rf"--mixup 0\.2 does not apply to {task}") for task in ("joint", "few_shot")),
    *(({"task": task, "rejection_fraction": 0.1}, f"does not apply to {task}") for task in ("joint", "retrieval")),
    ({"class_balanced_sampling": True, "episodes": FEW}, "does not apply to episodes, which draw classes"),
    ({"cutmix": 1.0, "episodes": FEW}, "does not apply to episodes, which draw classes"),
    # Streams
    ({"class_names": ["a"]}, "class_names .* has no effect without streaming; leave it out"),
    ({"shuffle_buffer_size": 5}, "has no effect without streaming; leave it out"),
    *(
        (STREAM | {name: value}, f"{name} {value} needs all images or labels before training; leave it or stream")
        for name, value in (
            *(("validation_fraction", 0.1), ("rejection_fraction", 0.1), ("sample_classes", 2), ("label_noise", 0.5)),
            *(("shuffled_pixels", "shared"), ("class_balanced_sampling", True), ("alternating_flip", True)),
            *(("keep_in_memory", "yes"), ("task", "retrieval")),
        )
    ),
    (STREAM | {"episodes": FEW}, "episodes needs all images"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=str)
def test_options_that_do_not_fit_are_an_error(options, message, load_named):
    with pytest.raises(ValueError, match=message):
        load_named("digits", **options)


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("test", {"label_column_name": "kind"}, "no label column 'kind'; the data has the columns"),
        ("dev", {}, r"no split 'dev'; the data has train, test\. Choose one with --split"),
        ("test", {"image_mean": [0.1, 0.2, 0.3]}, "could not be broadcast"),
        ("test", {"train_classes": 10}, "--train_classes 10 does not divide 10 classes"),
        ("test", {"sample_classes": 11}, "more than the data has: 10 classes"),
        ("test", {"sample_classes": 3, "train_classes": 4}, "--sample_classes 3 does not apply to retrieval"),
    ],
)
def test_options_of_a_single_split_that_do_not_fit_are_an_error(split, options, message, load_one):
    with pytest.raises(ValueError, match=message):
        load_one("digits", split, **options)
