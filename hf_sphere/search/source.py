"""Images, texts or vectors of any source."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import ClassLabel, Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict
from PIL import Image as PILImage

from hf_sphere.data import folders, image_files, sources
from hf_sphere.data.targets import has_labels, read_class_names, read_labels
from hf_sphere.search.vectors import read_vectors
from hf_sphere.utils.loading import load_dataset
from hf_sphere.utils.pixels import WHITE, convert_image
from hf_sphere.utils.texts import damage

Content = Literal["image", "text", "vector"]

COLUMNS = {"image": sources.IMAGE_COLUMNS, "text": ("text", "sentence"), "vector": ("embedding", "vector")}
"""Usual names of columns, by their content."""

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}
"""Formats of `datasets` of single files of rows, by suffix."""


@dataclass(frozen=True)
class ImageSource:
    """Images that are opened on access, or texts or vectors.

    Attributes:
        name: Absolute path of the folder or file of rows, or name of the dataset; empty for image files and what is in
            memory.
        split: Split of the dataset, if it is one.
        names: Name of each image: its file, relative to the folder, or `<split>/<row>`.
        labels: Name of the class of each image; empty if the source has none.
        encoded: The images in the column `image`, not decoded; or a list of texts, or vectors (N, d).
        content: What these are.
        table: The rows with all their columns, if it is a dataset.
    """

    name: str
    split: str | None
    names: list[str]
    labels: list[str]
    encoded: Any = field(repr=False)
    content: Content = "image"
    table: Dataset | None = field(default=None, repr=False)

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

    def read_groups(self, groups: str | Sequence[str | int]) -> list[str | int]:
        """Return the name of the group of each row: its label (`label`), its cell of a column, or the given names.

        Raises:
            ValueError: If there is no such column, or a row has no name.
        """
        names: list[Any] = list(groups)
        if groups == "label":
            names = self.labels or [None]
        elif isinstance(groups, str):
            columns = [] if self.table is None else self.table.column_names
            if self.table is None or groups not in columns:
                raise ValueError(f"no column {groups!r} for groups; {self.name or 'the data'} has {columns or 'none'}.")
            feature, names = self.table.features[groups], self.table[groups][:]
            if isinstance(feature, ClassLabel):
                names = [feature.names[number] if number is not None and number >= 0 else None for number in names]
        elif len(names) != len(self):
            raise ValueError(f"groups must have one name per row, {len(self):,}; got {len(names):,}.")
        if (missing := next((row for row, name in enumerate(names) if name in (None, "")), None)) is not None:
            raise ValueError(f"{self.names[missing]} has no group: name one for each row, or leave out groups.")
        return names

    @classmethod
    def of(
        cls, images: Any, split: str | None = None, *, column: str | None = None, content: Content = "image"
    ) -> "ImageSource":
        """Make a source of a folder, a dataset or its name, a file, an image of PIL, or several files and images.

        Args:
            images: The images. Those of a folder are all its image files, at any depth; the folder of a file is its
                class. Any other folder, and any other text, is a dataset; see `hf_sphere.data.sources.load_splits`.
                A folder that `datasets` reads from tables, or from a metadata file that names its images, is one too,
                and so are a parquet, CSV, JSON (lines) or text file, and several rows as mappings. Texts and vectors
                are the same, or lists of them.
            split: Split of a dataset; if None its evaluation split, or all images of a folder.
            column: Column of a dataset; if None, one of the usual names.
            content: Whether these are images, texts or vectors.

        Raises:
            TypeError: If an image is an array or something else.
            ValueError: If there are no images, or no such split or column.
        """
        if isinstance(images, ImageSource):
            return images
        of_rows = {"split": split, "column": column, "content": content}
        if isinstance(images, (Dataset, DatasetDict, IterableDataset, IterableDatasetDict)):
            return cls._of_splits("", sources.as_splits(images, {}), **of_rows)
        if isinstance(images, (str, os.PathLike)):
            path = Path(images)
            if path.is_file() and path.suffix.lower() in FORMATS:
                folders.check_depth([path])
                rows = load_dataset(FORMATS[path.suffix.lower()], data_files=[str(path)], source=str(path))
                return cls._of_splits(str(path), rows, **of_rows)
            if path.is_file():
                return cls.of([path], content=content)
            if content == "image" and column is None:
                files = folders.list_files(path, folders.SUFFIXES)
                if path.is_dir() and not files and not folders.list_files(path, folders.TABLES | folders.UNREADABLE):
                    raise ValueError(f"{path} has no images.")
                if files and folders.has_metadata(path):
                    of_rows["split"] = split or "all"
                elif files and not folders.has_tables(path):
                    return cls._of_folder(path, files, split)
            return cls._of_splits(str(images), sources.load_splits(str(images)), **of_rows)
        is_array = hasattr(images, "ndim")
        is_one = isinstance(images, (PILImage.Image, Mapping, bytes)) or (is_array and content != "vector")
        several = list(images) if isinstance(images, Iterable) and not (is_one or is_array) else [images]
        if several and all(isinstance(row, Mapping) for row in several) and not is_one:
            return cls._of_splits("", DatasetDict(train=Dataset.from_list(several)), **of_rows)
        if content == "vector":
            vectors = read_vectors(images if is_array else several)
            return cls("", None, [f"vector {n}" for n in range(len(vectors))], [], vectors, content)
        expected = (str, os.PathLike, PILImage.Image) if content == "image" else str
        for image in several:
            if not isinstance(image, expected):
                hint = "Convert images by PIL.Image.fromarray; search embeddings with hf_sphere.search.EmbeddingSpace."
                got = "an array" if hasattr(image, "ndim") else type(image).__name__
                what = (
                    "images are files, a folder, a dataset or images of PIL" if content == "image" else "texts are str"
                )
                raise TypeError(f"{what}; got {got}. {hint}")
        if not several:
            raise ValueError(f"no {content}s are given.")
        if content == "text":
            return cls("", None, [f"text {n}" for n in range(len(several))], [], several, content)
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
    def _of_splits(
        cls, name: str, splits: DatasetDict, split: str | None, column: str | None, content: Content
    ) -> "ImageSource":
        """Make a source of a dataset; `name` is empty if it is in memory."""
        split = sources.choose_eval_split(splits, split) or next(iter(splits))
        rows = sources.find_split(splits, split, "--split")
        if content != "image":
            column = column or next((name for name in COLUMNS[content] if name in rows.column_names), None)
        if content == "image" and column is None:
            column = sources.find_column(rows, None, sources.IMAGE_COLUMNS, "image")
        elif column not in rows.column_names:
            raise ValueError(
                f"no column {column or content!r}; {name or 'the data'} has {rows.column_names} (--column)."
            )
        labels: list[str] = []
        label = next((candidate for candidate in sources.LABEL_COLUMNS if candidate in rows.column_names), None)
        if label is not None and has_labels(rows, label):
            classes = read_class_names(rows, label)
            labels = [classes[index] for index in read_labels(rows, label, classes, split).tolist()]
        names = image_files.file_names(rows, column, name) if content == "image" else []
        # Images without files, or with the names of another folder's files.
        if len(set(names) - {""}) < len(rows) or not (name or all(map(os.path.isabs, names))):
            names = [f"{split}/{row}" if name else f"{content} {row}" for row in range(len(rows))]
        encoded: Any = None
        if content == "image":
            encoded = image_files.encoded_images(rows, column)
            encoded = encoded if column == "image" else encoded.rename_column(column, "image")
        elif content == "vector":
            encoded = read_vectors(rows.with_format("numpy")[column][:], f"column {column} of {name or 'the data'}")
        else:
            encoded = rows[column][:]
            wrong = next((row for row, text in enumerate(encoded) if not isinstance(text, str)), None)
            if wrong is not None:
                raise ValueError(
                    f"column {column} of {name or 'the data'} has no text in row {wrong}; name another one."
                )
        name = str(Path(name).resolve()) if name and Path(name).exists() else name
        return cls(name, split if name else None, names, labels, encoded, content, rows)


def _encode(images: Sequence[Any]) -> Dataset:
    """Return a column of files and images, each encoded."""
    folders.check_names(Path(image) for image in images if not isinstance(image, PILImage.Image))
    encoded = [
        image_files.encode_image(image) if isinstance(image, PILImage.Image) else {"bytes": None, "path": str(image)}
        for image in images
    ]
    return Dataset.from_dict({"image": encoded}).cast_column("image", Image(decode=False))
