"""Images of any source."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict
from PIL import Image as PILImage

from hf_sphere.data import folders, image_files, sources
from hf_sphere.data.targets import has_labels, read_class_names, read_labels
from hf_sphere.utils.pixels import WHITE, convert_image
from hf_sphere.utils.texts import damage


@dataclass(frozen=True)
class ImageSource:
    """Images that are opened on access.

    Attributes:
        name: Absolute path of the folder, or name of the dataset; empty for files and images in memory.
        split: Split of the dataset, if it is one.
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

    def open(self, index: int, channels: int = 3, background: Sequence[int] = WHITE) -> PILImage.Image:
        """Open an image as `hf_sphere.utils.pixels.convert_image` converts it.

        Raises:
            ValueError: If it cannot be opened, or is animated; the message has its name.
        """
        try:
            with image_files.open_image(self.encoded[index]["image"]) as image:
                return convert_image(image, channels, background)
        except Exception as error:  # of PIL and its plugins, of many classes
            raise ValueError(f"{self.names[index]} cannot be read as an image: {damage(error)}.") from error

    @classmethod
    def of(cls, images: Any, split: str | None = None) -> "ImageSource":
        """Make a source of a folder, a dataset or its name, a file, an image of PIL, or several files and images.

        Args:
            images: The images. Those of a folder are all its image files, at any depth; the folder of a file is its
                class. Any other folder, and any other text, is a dataset; see `hf_sphere.data.sources.load_splits`.
                A folder that `datasets` reads from tables, or from a metadata file that names its images, is one too.
            split: Split of a dataset; if None its evaluation split, or all images of a folder.

        Raises:
            TypeError: If an image is an array or something else.
            ValueError: If there are no images, or no such split.
        """
        if isinstance(images, ImageSource):
            return images
        if isinstance(images, (Dataset, DatasetDict, IterableDataset, IterableDatasetDict)):
            return cls._of_splits("", sources.as_splits(images, {}), split)
        if isinstance(images, (str, os.PathLike)):
            path = Path(images)
            if path.is_file():
                return cls.of([path])
            files = folders.list_files(path, folders.SUFFIXES)
            if path.is_dir() and not files and not folders.list_files(path, folders.TABLES | folders.UNREADABLE):
                raise ValueError(f"{path} has no images.")
            if files and folders.has_metadata(path):
                split = split or "all"
            elif files and not folders.has_tables(path):
                return cls._of_folder(path, files, split)
            return cls._of_splits(str(images), sources.load_splits(str(images)), split)
        is_one = hasattr(images, "ndim") or isinstance(images, (PILImage.Image, Mapping, bytes))
        several = list(images) if isinstance(images, Iterable) and not is_one else [images]
        for image in several:
            if not isinstance(image, (str, os.PathLike, PILImage.Image)):
                hint = "Convert images by PIL.Image.fromarray; search embeddings with hf_sphere.search.NeighborSearch."
                got = "an array" if hasattr(image, "ndim") else type(image).__name__
                raise TypeError(f"images are files, a folder, a dataset or images of PIL; got {got}. {hint}")
        if not several:
            raise ValueError("no images are given.")
        names = [
            f"image {n}" if isinstance(image, PILImage.Image) else str(Path(image).parent.resolve() / Path(image).name)
            for n, image in enumerate(several)
        ]
        return cls("", None, names, [], _encode(several))

    @classmethod
    def _of_folder(cls, path: Path, files: list[Path], split: str | None) -> "ImageSource":
        if split is not None:
            hint = f"name its folder {path / split}" if (path / split).is_dir() else f"leave out {split!r}"
            raise ValueError(f"{path} is a folder of image files, which has no splits; {hint}.")
        inside = [file.relative_to(path) for file in files]
        labels = [name.parent.name for name in inside]
        return cls(str(path.resolve()), None, [*map(str, inside)], labels if any(labels) else [], _encode(files))

    @classmethod
    def _of_splits(cls, name: str, splits: DatasetDict, split: str | None) -> "ImageSource":
        """Make a source of a dataset; `name` is empty if it is in memory."""
        split = sources.choose_eval_split(splits, split) or next(iter(splits))
        rows = sources.find_split(splits, split, "--split")
        column = sources.find_column(rows, None, sources.IMAGE_COLUMNS, "image")
        labels: list[str] = []
        label = next((candidate for candidate in sources.LABEL_COLUMNS if candidate in rows.column_names), None)
        if label is not None and has_labels(rows, label):
            classes = read_class_names(rows, label)
            labels = [classes[index] for index in read_labels(rows, label, classes, split).tolist()]
        names = image_files.file_names(rows, column, name)
        # Images without files, or with the names of another folder's files.
        if len(set(names) - {""}) < len(rows) or not (name or all(map(os.path.isabs, names))):
            names = [f"{split}/{row}" if name else f"image {row}" for row in range(len(rows))]
        encoded = image_files.encoded_images(rows, column)
        encoded = encoded if column == "image" else encoded.rename_column(column, "image")
        name = str(Path(name).resolve()) if name and Path(name).is_dir() else name
        return cls(name, split if name else None, names, labels, encoded)


def _encode(images: Sequence[Any]) -> Dataset:
    """Return a column of files and images, each encoded."""
    folders.check_names(Path(image) for image in images if not isinstance(image, PILImage.Image))
    encoded = [
        image_files.encode_image(image) if isinstance(image, PILImage.Image) else {"bytes": None, "path": str(image)}
        for image in images
    ]
    return Dataset.from_dict({"image": encoded}).cast_column("image", Image(decode=False))
