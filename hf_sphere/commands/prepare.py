"""Convert an image dataset in its published layout to parquet files that all jobs can load.

hf-sphere prepare imagenet200 --source data/tiny-imagenet-200 --output data/prepared/imagenet200
hf-sphere prepare omniart --source data/omniart --output data/prepared/omniart --skip_missing
hf-sphere prepare cub200 --source data/CUB_200_2011 --output data/prepared/cub200
hf-sphere prepare sop --source data/Stanford_Online_Products --output data/prepared/sop
hf-sphere prepare class_split --source data/mini_imagenet --output data/prepared/mini_imagenet

The columns are image and label (the school in omniart, the number of the class in sop), and year in omniart,
super_class in sop. Image files are stored unchanged. Nothing is written if the data is incomplete, or if the numbers of
classes and images differ from the published ones (not checked for class_split).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments


@dataclass
class PrepareArguments(Arguments):
    """Dataset and folders."""

    kind: Literal["imagenet200", "omniart", "cub200", "sop", "class_split"] = argument(
        help="Dataset; can also be passed as the first argument, without --kind."
    )
    source: str = argument(
        help="Folder of the data as published. imagenet200: {train,test}/<class>/*.jpg, or train/<class>/images/*.JPEG "
        "with val/images and val/val_annotations.txt, whose val becomes the test split; with words.txt, if it exists, "
        "as names of the classes. omniart: {train,test}/<omni_id>.jpg with train_complete.csv and test_complete.csv. "
        "cub200: images/<class>/*.jpg with images.txt, image_class_labels.txt, train_test_split.txt and classes.txt. "
        "sop: <super class>_final/*.JPG with Ebay_train.txt and Ebay_test.txt. class_split, the usual layout of "
        "mini-ImageNet and other few-shot datasets: images/*.jpg with train.csv, val.csv and test.csv, next to images "
        "or in a folder split, whose first line is filename,label and whose classes differ."
    )
    output: str = argument(help="Output folder, for --dataset_name of `hf-sphere train`.")
    overwrite_output_dir: bool = argument(False, "Replace the prepared data in output.")
    skip_missing: bool = argument(False, "Skip rows with a missing or unreadable image, or an unknown school or year.")
    expect_counts: bool = argument(True, "Require published numbers of classes and images; false warns, for subsets.")
    disable_tqdm: bool = argument(False, "Disable progress bars.")


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a dataset."""
    (args,) = parse_arguments((PrepareArguments,), named_first("kind", argv), __doc__)
    from hf_sphere.data.published_images import prepare_images

    prepare_images(args)
