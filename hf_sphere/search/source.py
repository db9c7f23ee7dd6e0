"""Images, texts or vectors of any source."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict, Value
from PIL import Image as PILImage

from hf_sphere.data import folders, sources
from hf_sphere.data.targets import has_labels, read_class_names, read_labels
from hf_sphere.search.vectors import Content, check_ids, check_names, column_vectors, parse_vectors
from hf_sphere.utils.checks import check_not_text, text_list
from hf_sphere.utils.loading import FILE_KINDS, load_file
from hf_sphere.utils.pixels import WHITE, convert_image
from hf_sphere.utils.texts import damage

logger = logging.getLogger(__name__)

Groups = str | Sequence[str | int] | None

COLUMNS = {"image": sources.IMAGE_COLUMNS, "text": ("text", "sentence"), "vector": ("embedding", "vector")}
"""Usual names of columns, by their content."""

WRITTEN = {"query", "rank", "id", "row", "file", "class", "distance", "p_value", "accepted", "confidence"}
WRITTEN |= {"concentration", "cluster", "cosine"}
"""Columns that tables have themselves."""


@dataclass(frozen=True)
class ImageSource:
    """Images that are opened on access, or texts or vectors.

    Attributes:
        name: Absolute path of the folder or file of rows, or name of the dataset; empty for image files and what is in
            memory.
        split: Split of the dataset, if it is one.
        names: Name of each image: its file, relative to the folder, or `<split>/<row>`.
        labels: Name of the class of each image; empty if the source has none.
        encoded: The images in the column `image`, not decoded; or texts, or vectors (N, d), by the content.
        table: The rows with all their columns, if it is a dataset.
        column: The column that was asked for, or found by its type.
        ids: The id of each row, if they are known.
        cells: Of each row, the columns that results repeat.
    """

    name: str
    split: str | None
    names: list[str]
    labels: list[str]
    encoded: Any = field(repr=False)
    content: Content = "image"
    table: Dataset | None = field(default=None, repr=False)
    column: str | None = None
    ids: list[Any] | None = field(default=None, repr=False)
    cells: list[dict[str, Any]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int, channels: int = 3, background: Sequence[int] = WHITE) -> PILImage.Image:
        """Open an image as `hf_sphere.utils.pixels.convert_image` converts it.

        Raises:
            ValueError: If it cannot be opened, or is animated; the message has its name.
        """
        try:
            with sources.open_image(self.encoded[index]["image"]) as image:
                return convert_image(image, channels, background)
        except Exception as error:  # of PIL and its plugins, of many classes
            raise ValueError(f"{self.names[index]} cannot be read as an image: {damage(error)}.") from error

    @property
    def columns(self) -> dict[str, Sequence[Any]]:
        """`row`, `file` and, as far as known, `label`, `text`, `id` and `columns` of all rows."""
        known = {"label": self.labels, "text": self.content == "text" and self.encoded, "id": self.ids}
        known |= {"columns": self.cells}
        return {"row": range(len(self)), "file": self.names} | {name: cells for name, cells in known.items() if cells}

    def read_groups(self, groups: Any, what: str = "groups") -> list[Any]:
        """Return the name of the group of each row: its label (`label`), its cell of a column, or the given name."""
        table: Any = self.table
        if isinstance(groups, str):
            there = [*(table.column_names if table is not None else ()), *["label"] * bool(self.labels)]
            if groups not in there:
                where = f"{self.name or 'the data'} has {there or 'none'}; name a column, or give one name per row"
                raise ValueError(f"no column {groups!r} for {what}: {where}.")
            groups = self.labels if groups == "label" and self.labels else table[groups][:]
        names = check_names(what, groups, len(self))
        if "" in names:
            raise ValueError(f"{what} must have a value in each of the {len(self):,} rows; some have none.")
        return names

    def with_columns(self, ids: Groups, columns: Sequence[str] = ()) -> "ImageSource":
        """Return the source with an id of each row, see `read_groups`, and with columns of texts, numbers or dates.

        Messages and results of queries have them, and those of an index if it was built with them.

        Raises:
            ValueError: If a column is missing, of other content, or one that results have themselves, or ids repeat.
        """
        check_not_text("columns", columns)
        table: Any = self.table
        features: dict[str, Any] = {} if table is None else table.features
        taken, cells = {*WRITTEN, *["text"] * (self.content == "text")}, dict[str, list[Any]]()
        for name in columns:
            kind = features.get(name)
            if not isinstance(kind, (Value, ClassLabel)) or name in taken:
                why = "is not there" if kind is None else "is written by the job" if name in taken else f"is {kind}"
                others = [name for name in features if name not in taken]
                raise ValueError(f"column {name!r} {why}; name texts, numbers or dates among {others}.")
            cells[name] = table.with_format(None)[name][:]
            if isinstance(kind, ClassLabel):
                cells[name] = [None if label is None or label < 0 else kind.int2str(label) for label in cells[name]]
        rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
        names = self.ids if ids is None else check_ids(self.read_groups(ids, "ids"), len(self))
        return replace(self, ids=names, cells=rows or self.cells)

    @classmethod
    def of(
        cls, images: Any, split: str | None = None, *, column: str | None = None, content: Content | None = "image"
    ) -> "ImageSource":
        """Make a source of a folder, a dataset or its name, a file, an image of PIL, or several files and images.

        Args:
            images: The images. Those of a folder are all its image files, at any depth; the folder of a file is its
                class. Any other folder, and any other text, is a dataset; see `hf_sphere.data.sources.load_splits`.
                A folder that `datasets` reads from tables, or from a metadata file that names its images, is one too,
                as are a parquet, CSV, JSON or text file, and several mappings. Texts and vectors can be lists.
            split: Split of a dataset; if None its evaluation split, or all images of a folder.
            column: Column of a dataset; if None, the one with a usual name, or the only one of images or of vectors.
            content: Whether these are images, texts or vectors; if None, vectors if there are no images.

        Raises:
            TypeError: If an image is an array or something else; search embeddings with `EmbeddingSpace`.
            ValueError: If there are no texts, or no such split or column.
        """
        if isinstance(images, ImageSource):
            return images
        of_rows: dict[str, Any] = {"split": split, "column": column, "content": content}
        if isinstance(images, (Dataset, DatasetDict, IterableDataset, IterableDatasetDict)):
            return cls._of_splits("", sources.as_splits(images), **of_rows)
        if isinstance(images, (str, os.PathLike)):
            path = Path(images)
            if path.is_file() and path.suffix.lower() == ".npy" and content != "text":
                if column is not None or split not in (None, "all"):
                    raise ValueError(f"{path} is one array, without columns and splits; leave out {column or split!r}.")
                array = parse_vectors(np.load(path, allow_pickle=False), str(path))
                return cls(str(path.resolve()), "all", [f"all/{row}" for row in range(len(array))], [], array, "vector")
            if path.is_file() and path.suffix.lower() in FILE_KINDS:
                return cls._of_splits(str(path), load_file(path), **of_rows)
            if path.is_file() and content in ("image", None):
                return cls.of([path])
            if content in ("image", None) and column is None and str(images) not in sources.BUNDLED:
                files = folders.list_files(path, folders.SUFFIXES)
                if files and folders.has_metadata(path):
                    of_rows["split"] = split or "all"
                elif files and not folders.has_tables(path):
                    if split is not None:
                        raise ValueError(f"{path} is a folder of image files, without splits; leave out {split!r}.")
                    inside = [file.relative_to(path) for file in files]
                    labels = [name.parent.name for name in inside]
                    labels = labels if any(labels) else []
                    return cls(str(path.resolve()), None, [*map(str, inside)], labels, _encode(files))
            return cls._of_splits(str(images), sources.load_splits(str(images)), **of_rows)
        content = content or "image"
        is_one = hasattr(images, "ndim") or isinstance(images, (PILImage.Image, Mapping, bytes))
        several = list(images) if isinstance(images, Iterable) and (content == "vector" or not is_one) else [images]
        if several and not is_one and all(isinstance(row, Mapping) for row in several):
            return cls._of_splits("", DatasetDict(train=Dataset.from_list(several)), **of_rows)
        if content == "text":
            several = text_list("texts", several)
        if content != "image":
            vectors = several if isinstance(images, Iterator) else images
            encoded = parse_vectors(vectors) if content == "vector" else several
            return cls("", None, [f"{content} {n}" for n in range(len(encoded))], [], encoded, content)
        names = [
            f"image {n}" if isinstance(image, PILImage.Image) else str(Path(image).parent.resolve() / Path(image).name)
            for n, image in enumerate(several)
        ]
        return cls("", None, names, [], _encode(several))

    @classmethod
    def _of_splits(
        cls, name: str, splits: DatasetDict, split: str | None, column: str | None, content: Content | None
    ) -> "ImageSource":
        """Make a source of a dataset; `name` is empty if it is in memory."""
        split = sources.choose_eval_split(splits, split) or next(iter(splits))
        rows = sources.find_split(splits, split, "--split")
        if content is None:
            images = [each for each, feature in rows.features.items() if sources.holds_images(feature)]
            content = "image" if (column in images if column else images) else "vector"
        if content == "vector" and column is None and not {*COLUMNS["vector"]} & {*rows.column_names}:
            cells = {each: getattr(feature, "feature", None) for each, feature in rows.features.items()}
            found = [each for each, cell in cells.items() if getattr(cell, "dtype", "").startswith(("float", "double"))]
            if len(found) > 1:
                raise ValueError(f"several columns have vectors: {', '.join(found)}. Name one with --column.")
            column = found[0] if found else None
        named, column = column, sources.find_column(rows, column, COLUMNS[content], content, option="--column")
        labels, what = list[str](), f"column {column} of {name or 'the data'}"
        kept: Sequence[int] = range(len(rows))
        if content == "text":
            texts = rows[column][:]
            kept = [row for row, text in enumerate(texts) if text.strip()]
            if count := len(rows) - len(kept):
                logger.warning("%d of %d texts are empty, and are left out.", count, len(rows))
            rows = rows.select(kept)
        if (label := sources.usual_label(rows)) is not None and has_labels(rows, label):
            classes = read_class_names(rows, label)
            labels = [classes[index] for index in read_labels(rows, label, classes, split).tolist()]
        names = sources.file_names(rows, column, name) if content == "image" else []
        # Images without files, or with the names of another folder's files.
        if len(set(names) - {""}) < len(rows) or not (name or all(map(os.path.isabs, names))):
            names = [f"{split}/{row}" if name else f"{content} {row}" for row in kept]
        if content == "image":
            encoded = sources.encoded_images(rows, column).rename_columns({column: "image"})
        elif content == "vector":
            encoded = parse_vectors(column_vectors(rows, column), what)
        else:
            encoded = rows[column][:]
        name = str(Path(name).resolve()) if name and Path(name).exists() else name
        return cls(name, split if name else None, names, labels, encoded, content, rows, named)


def _encode(images: Sequence[Any]) -> Dataset:
    """Return a column of files and images, each encoded."""
    is_file = [not isinstance(image, PILImage.Image) for image in images]
    pairs = zip(images, is_file, strict=True)
    encoded = [{"bytes": None, "path": str(each)} if file else sources.encode_image(each) for each, file in pairs]
    return Dataset.from_dict({"image": encoded}).cast_column("image", Image(decode=False))
