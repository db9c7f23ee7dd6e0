"""Images of any source, and their embeddings and predictions by a saved model."""

import hashlib
import json
import logging
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict
from PIL import Image as PILImage
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoTokenizer

from hf_sphere.data import folders, image_files, sources
from hf_sphere.data.targets import has_labels, read_class_names, read_labels
from hf_sphere.search.extract import class_names, embed, embedding_metric, load_embedding_model
from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.modules import digest_weights
from hf_sphere.utils.pixels import WHITE, convert_image
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import damage

logger = logging.getLogger(__name__)


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


class ImageEncoder:
    """A saved model that embeds images, and texts if it is a model such as CLIP.

    Args:
        name: Folder or Hub id; see `load_embedding_model`.
        device: Device of the model; a GPU if there is one.

    Attributes:
        name: The name.
        model: The model, in eval mode.
        processor: Its image processor.
        class_names: Names of the classes, by index; empty for a model without a head.
        embeds_texts: Whether the model embeds texts.
        metric: Distance of the embeddings, as options of `NeighborSearch`.
        weights: Digest of the weights, which identifies the model.

    Raises:
        ValueError: If the model is of another type, or has no image processor.

    Example:
        >>> encoder = ImageEncoder("outputs/my-model")  # doctest: +SKIP
        >>> for rows, columns in encoder.encode(["cat.jpg", "dog.jpg"]):  # doctest: +SKIP
        ...     print(columns["embedding"].shape)
    """

    def __init__(self, name: str, device: torch.device | str | None = None) -> None:
        self.name = name
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_embedding_model(name)
        try:
            # Not AutoProcessor, which loads other models that a processor names, and offers to run code.
            self.processor = load_pretrained(AutoImageProcessor, name)
        except OSError as error:
            raise ValueError(
                f"{name} has no image processor, so the preprocessing of its images is unknown. Save the one of its "
                "training there by its `save_pretrained`."
            ) from error
        self.model = model.to(device).eval()
        self.class_names = class_names(model)
        channels = [getattr(source, "num_channels", None) for source in (self.processor, model.config)]
        if None not in channels and channels[0] != channels[1]:
            what = f"the image processor of {name} makes {channels[0]} channels, but its model has {channels[1]}"
            raise ValueError(f"{what}; save the processor of the model's training beside it.")
        for kind in ("image_mean", "image_std"):
            statistics = torch.tensor(getattr(self.processor, kind, None) or [1.0])
            if not statistics.isfinite().all() or (kind == "image_std" and not statistics.all()):
                raise ValueError(f"{kind} in preprocessor_config.json of {name} is {statistics.tolist()}; correct it.")
        self.embeds_texts = hasattr(model, "get_text_features")
        self._texts: Any = load_pretrained(AutoTokenizer, name) if self.embeds_texts else None
        self.metric = embedding_metric(model)
        self.weights = digest_weights(model)

    @property
    def settings(self) -> str:
        """Digests of the preprocessing and of the class names, which the weights do not identify."""
        options = {name: value for name, value in self.processor.to_dict().items() if value is not None}
        texts = (json.dumps(values, sort_keys=True, default=str) for values in (options, self.class_names))
        return "-".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)

    def encode(
        self,
        images: Any,
        rows: Sequence[int] | None = None,
        *,
        batch_size: int = 64,
        num_workers: int | None = None,
        skip_unreadable: bool = False,
        progress: bool = True,
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the indices of the images of each batch, (b,), and the columns of `hf_sphere.search.extract.embed`.

        Args:
            images: See `ImageSource.of`.
            rows: Indices of the images; all if None.
            batch_size: Images per batch.
            num_workers: Number of decoding processes; if None, one per core, or 0 for few images.
            skip_unreadable: Leave out images that cannot be read, with a warning, instead of raising an error.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: If an image cannot be read, or an output is not finite; the message names the image.
        """
        source = ImageSource.of(images)
        rows = range(len(source)) if rows is None else rows
        if num_workers is None:
            num_workers = min(os.cpu_count() or 1, 16) if len(rows) > 500 else 0
        hint = "Repair or remove it, or skip such images: --skip_unreadable_images."
        background = getattr(self.processor, "background_color", WHITE)
        damaged, transparent = image_files.examine_files(source.encoded, "image", rows, progress=progress)
        if damaged and not skip_unreadable:
            row, error = next(iter(damaged.items()))
            raise ValueError(f"{source.names[row]} cannot be read as an image: {error}. {hint}")
        image_files.log_transparent(transparent, len(rows), background)
        loader: DataLoader = DataLoader(
            _Prepared(source, self.processor, getattr(self.model.config, "num_channels", 3), background),
            batch_sampler=[list(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)],
            num_workers=num_workers,
            collate_fn=operator.itemgetter(0),
            generator=torch.Generator(),  # the loader draws a seed, which must not change the global random state
        )
        with progress_bar(total=len(rows), unit="image", disable=not progress, leave=False) as bar:
            for indices, pixels, errors in loader:
                if errors and not skip_unreadable:
                    raise ValueError(f"{errors[0]} {hint}")
                for error in errors:
                    logger.warning("Skipped: %s", error)
                if pixels is not None:
                    names = [source.names[index] for index in indices.tolist()]
                    yield indices, self._embed(names, pixel_values=pixels)
                bar.update(len(indices) + len(errors))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, (B, d), float32 on the CPU.

        Raises:
            ValueError: If the model embeds no texts.
        """
        if not self.embeds_texts:
            raise ValueError(f"{self.name} embeds no texts; search with images, or use a model such as CLIP.")
        padding: dict[str, Any] = {"padding": True}
        if self.model.config.model_type.startswith("siglip"):  # trained with texts of one length, without a mask
            length = self.model.config.text_config.max_position_embeddings
            padding = {"padding": "max_length", "max_length": length, "return_attention_mask": False}
        tokens: Any = self._texts(list(texts), truncation=True, return_tensors="pt", **padding)
        return self._embed(list(texts), **tokens)["embedding"]

    def name_cells(self, source: ImageSource, indices: Tensor, columns: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """Return the row, file, label, prediction and certainty, as far as known, of the images of a batch."""
        rows = indices.tolist()
        cells = {"row": rows, "file": [source.names[row] for row in rows]}
        if source.labels:
            cells["label"] = [source.labels[row] for row in rows]
        if "prediction" in columns:
            cells["prediction"] = [self.class_names[index] for index in columns["prediction"].tolist()]
        return cells | {name: columns[name].tolist() for name in ("confidence", "concentration") if name in columns}

    def _embed(self, names: Sequence[str], **inputs: Tensor) -> dict[str, Tensor]:
        return embed(self.model, names, **{name: value.to(self.model.device) for name, value in inputs.items()})


class _Prepared(torch.utils.data.Dataset):
    """Batches of a source, prepared for a model: indices of the readable images, their pixels, and the errors."""

    def __init__(self, source: ImageSource, processor: Any, channels: int, background: Sequence[int]) -> None:
        self.source, self.processor, self.conversion = source, processor, (channels, background)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor | None, list[str]]]:
        images, good, errors = [], [], []
        for index in indices:
            try:
                images.append(self.source.open(index, *self.conversion))
                good.append(index)
            except ValueError as error:
                errors.append(str(error))
        pixels = self.processor(images, return_tensors="pt")["pixel_values"] if images else None
        return [(torch.tensor(good, dtype=torch.long), pixels, errors)]
