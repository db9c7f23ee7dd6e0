"""Images to embed, with their names and classes: a folder, a split of a data set, files, or images in memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, Image
from PIL import Image as PILImage

from hf_sphere.data.decoding import file_names, open_image
from hf_sphere.data.sources import IMAGE_COLUMNS, LABEL_COLUMNS, choose_eval_split, find_column, find_split, load_splits
from hf_sphere.data.targets import read_class_names, read_labels
from hf_sphere.utils.pixels import convert_image

SUFFIXES = {
    *(".apng", ".avif", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
}
"""Suffixes of the image files of a folder."""


@dataclass(frozen=True)
class ImageSource:
    """Images that are opened on access.

    Attributes:
        name: Absolute path of the folder, or name of the data set; empty for files and images in memory.
        split: Split of the data set, if it is one.
        names: Name of each image: its file, relative to the folder, or `<split>/<row>`.
        labels: Name of the class of each image; empty if the source has none.
        encoded: The images in the column `image`, not decoded.
    """

    name: str
    split: str | None
    names: list[str]
    labels: list[str]
    encoded: Dataset = field(repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int, channels: int = 3) -> PILImage.Image:
        """Open an image, rotated upright, in 8-bit gray (1 channel) or color (3 channels).

        Raises:
            ValueError: If it cannot be opened, or is animated; the message has its name.
        """
        try:
            with open_image(self.encoded[index]["image"]) as image:
                return convert_image(image, channels)
        except Exception as error:  # of PIL and its plugins, of many classes
            raise ValueError(f"{self.names[index]} cannot be read as an image: {error}.") from error

    @classmethod
    def of(cls, images: Any, split: str | None = None) -> "ImageSource":
        """Make a source of a folder, the name of a data set, a file, an image of PIL, or a list of files and images.

        Args:
            images: The images. Those of a folder are all its image files, at any depth; the first subfolder is the
                class. Any other folder, and any other text, is a data set; see `hf_sphere.data.sources.load_splits`.
            split: Split of a data set; its evaluation split if None.

        Raises:
            ValueError: If there are no images, or no such split.
        """
        if isinstance(images, ImageSource):
            return images
        if isinstance(images, (str, os.PathLike)):
            path = Path(images)
            if path.is_file():
                return cls.of([path])
            files = _list_images(path)
            if not files:
                return cls._of_data_set(str(images), split)
            if split is not None:
                raise ValueError(f"{path} is a folder of image files, which has no splits; leave out {split!r}.")
            inside = [file.relative_to(path) for file in files]
            labels = [name.parts[0] if len(name.parts) > 1 else "" for name in inside]
            return cls(str(path.resolve()), None, [*map(str, inside)], labels if any(labels) else [], _encode(files))
        several: Sequence[Any] = [images] if isinstance(images, PILImage.Image) else images
        if not several:
            raise ValueError("no images are given.")
        names = [f"image {n}" if isinstance(i, PILImage.Image) else os.path.abspath(i) for n, i in enumerate(several)]
        return cls("", None, names, [], _encode(several))

    @classmethod
    def _of_data_set(cls, name: str, split: str | None) -> "ImageSource":
        if Path(name).is_dir() and not any(Path(name).rglob("*.*")):
            raise ValueError(f"{name} has no images.")
        splits = load_splits(name)
        split = choose_eval_split(splits, split) or next(iter(splits))
        rows = find_split(splits, split, "--split")
        column = find_column(rows, None, IMAGE_COLUMNS, "image")
        labels: list[str] = []
        if (label := next((known for known in LABEL_COLUMNS if known in rows.column_names), None)) is not None:
            classes = read_class_names(rows, label)
            labels = [classes[index] for index in read_labels(rows, label, classes, split).tolist()]
        names = file_names(rows, column, name)
        names = [known or f"{split}/{row}" for row, known in enumerate(names or [""] * len(rows))]
        encoded = rows.select_columns([column]).rename_columns({column: "image"} if column != "image" else {})
        name = str(Path(name).resolve()) if Path(name).is_dir() else name
        return cls(name, split, names, labels, encoded.cast_column("image", Image(decode=False)))


def _list_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, by suffix, sorted; hidden ones are left out."""
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    shown = (file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(file for file in shown if file.suffix.lower() in SUFFIXES)


def _encode(images: Sequence[Any]) -> Dataset:
    """Return a column of files and images, each encoded."""
    cells = [image if isinstance(image, PILImage.Image) else str(image) for image in images]
    encoded = [Image().encode_example(cell) for cell in cells]
    return Dataset.from_dict({"image": encoded}).cast_column("image", Image(decode=False))
