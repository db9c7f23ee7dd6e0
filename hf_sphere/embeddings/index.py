"""Search for similar images: an index of embeddings in a folder of safetensors, parquet and JSON files."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL.Image import Image as PILImage
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sphere.embeddings.encoder import ImageEncoder, ImageSource
from hf_sphere.metrics.search import APPROXIMATE, NeighborSearch, SearchKind
from hf_sphere.utils.arguments import error_text
from hf_sphere.utils.files import MANIFEST_FILE, atomic_folder, find_damage, read_json, write_json, write_manifest

ABOUT_FILE = "index.json"
"""Model, distance, sources and kind of search."""

EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE = "embeddings.safetensors", "images.parquet", "search.faiss"
"""Embeddings; name, class, prediction and certainty of each image; and the index of an approximate search."""


@dataclass(frozen=True)
class Neighbors:
    """The nearest images of queries.

    Attributes:
        queries: Columns of the queries by name, as those of `ImageIndex.images`.
        rows: (Q, k), rows of the index, nearest first; -1 where an approximate search found none.
        distances: (Q, k), float64.
    """

    queries: dict[str, list[Any]]
    rows: Tensor
    distances: Tensor


@dataclass(repr=False)
class ImageIndex:
    """Embeddings of images, searchable by image and, for a model such as CLIP, by text.

    Attributes:
        encoder: The model.
        images: Columns of the indexed images: `file`, `source` (a number), `row` of the source, and as far as known
            `label`, `prediction`, `confidence` and `concentration`.
        embeddings: (N, d), float32.
        sources: Folder or data set and split of the images, by number.
        kind: Kind of the search; if None, chosen by the number of images.

    Example:
        >>> index = ImageIndex.build("outputs/birds", "photos")
        >>> found = index.search("bird.jpg", 5)
        >>> [index.images["file"][row] for row in found.rows[0]]
    """

    encoder: ImageEncoder
    images: dict[str, list[Any]]
    embeddings: Tensor
    sources: list[tuple[str, str | None]]
    kind: SearchKind | None = None
    _search: NeighborSearch | None = None

    @classmethod
    def build(
        cls, model: str | ImageEncoder, images: Any, *, kind: SearchKind | None = None, **options: Any
    ) -> "ImageIndex":
        """Embed images.

        Args:
            model: The model, or its folder or Hub id.
            images: See `ImageSource.of`.
            kind: Kind of the search; if None, chosen by the number of images.
            **options: Options of `ImageEncoder.encode`.

        Raises:
            TypeError: If an image is an array; search embeddings with `hf_sphere.metrics.NeighborSearch`.
            ValueError: If there are no images, or one cannot be read.
        """
        index = cls(model if isinstance(model, ImageEncoder) else ImageEncoder(model), {}, torch.empty(0, 0), [], kind)
        index.add(images, **options)
        return index

    def add(self, images: Any, **options: Any) -> int:
        """Embed and add images that the index does not have yet, by source and file; return their number.

        An approximate search is built again. The arguments are those of `build`.
        """
        source = ImageSource.of(images)
        key = (source.name, source.split)
        number = self.sources.index(key) if key in self.sources else len(self.sources)
        known = zip(self.images.get("source", []), self.images.get("file", []), strict=True)
        # Images in memory have no name that identifies them.
        present = {file for of, file in known if of == number and (source.name or Path(file).is_absolute())}
        new = [row for row, name in enumerate(source.names) if name not in present]
        if not new:
            return 0
        added, embeddings = self._embed(source, new, options)
        before, count = len(self), len(embeddings)
        added["source"] = [number] * count
        for name in {**self.images, **added}:
            self.images[name] = self.images.get(name, [None] * before) + added.get(name, [None] * count)
        self.embeddings = torch.cat([self.embeddings, embeddings]) if before else embeddings
        self.sources += [key] * (number == len(self.sources))
        self._search = None
        return count

    def __len__(self) -> int:
        return len(self.embeddings)

    def __repr__(self) -> str:
        return f"ImageIndex({len(self):,} images, model {self.encoder.name!r})"

    @property
    def neighbor_search(self) -> NeighborSearch:
        """The search, with its kind and recall; built when it is first used."""
        if self._search is None:
            self._search = NeighborSearch(self.embeddings, kind=self.kind, **self.encoder.metric)
        return self._search

    def search(self, images: Any, k: int = 10, *, classes: Sequence[str] | None = None, **options: Any) -> Neighbors:
        """Find the nearest indexed images of images.

        Args:
            images: See `ImageSource.of`.
            k: Number of neighbors, at most that of the images to choose from.
            classes: Find only images whose class (see `classes`) is one of these, by an exact search.
            **options: Options of `ImageEncoder.encode`.

        Raises:
            ValueError: If k is too large, no image has one of the classes, or an image cannot be read.
        """
        source = ImageSource.of(images)
        queries, embeddings = self._embed(source, range(len(source)), options)
        if not len(embeddings):
            raise ValueError(f"none of the {len(source)} images can be read.")
        return self._find(queries, embeddings, k, classes)

    def search_texts(self, texts: Sequence[str], k: int = 10, *, classes: Sequence[str] | None = None) -> Neighbors:
        """Find the indexed images that are nearest to texts; see `search`.

        Raises:
            ValueError: If the model embeds no texts, and for the reasons of `search`.
        """
        return self._find({"file": list(texts)}, self.encoder.encode_texts(texts), k, classes)

    def classes(self, *, mark: str = "") -> list[str]:
        """Return the class of each image: its label, else its prediction and a `mark`, else an empty text."""
        known, predicted = (self.images.get(name, [None] * len(self)) for name in ("label", "prediction"))
        guesses = [prediction and prediction + mark for prediction in predicted]
        return [label or guess or "" for label, guess in zip(known, guesses, strict=True)]

    def path(self, row: int) -> str:
        """Return the absolute path of an indexed image; of one of a data set, the name of that and its own."""
        return str(Path(self.sources[self.images["source"][row]][0], self.images["file"][row]))

    def open_image(self, row: int) -> PILImage:
        """Open an indexed image from its source.

        Raises:
            ValueError: If it was in memory, or cannot be read any more.
            OSError: If there is no such source any more.
        """
        name, split = self.sources[self.images["source"][row]]
        if split is None:
            return ImageSource.of([Path(name, self.images["file"][row])]).open(0)
        return _data_set(name, split).open(self.images["row"][row])

    def save(self, folder: str | PathLike) -> None:
        """Write the index to a folder; an index that is there is replaced.

        Raises:
            FileExistsError: If the folder contains other files.
        """
        folder = Path(folder)
        own = {ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE, MANIFEST_FILE}
        other = [path for path in folder.iterdir() if path.name not in own] if folder.exists() else []
        if other:
            raise FileExistsError(f"{folder} is not replaced: {other[0]} is not part of an index.")
        search = self.neighbor_search
        about = {"model": self.encoder.name, "weights": self.encoder.weights, **self.encoder.metric}
        if Path(self.encoder.name).is_dir():  # found from every working directory, and not absolute, which is private
            about["model_folder"] = os.path.relpath(self.encoder.name, folder)
        about |= {"sources": self.sources, "kind": self.kind, "search": search.kind, "recall": search.recall}
        with atomic_folder(folder) as unfinished:
            save_file({"embeddings": self.embeddings.contiguous()}, unfinished / EMBEDDINGS_FILE)
            pq.write_table(pa.table(self.images), unfinished / IMAGES_FILE)
            if search.kind in APPROXIMATE:
                search.save(unfinished / SEARCH_FILE)
            write_json(unfinished / ABOUT_FILE, about, strict=True)
            write_manifest(unfinished)

    @classmethod
    def load(cls, folder: str | PathLike, model: str | ImageEncoder | None = None) -> "ImageIndex":
        """Read an index that `save` wrote; embeddings and an approximate search stay on disk, mapped into memory.

        Without FAISS the search is exact.

        Args:
            folder: The folder.
            model: The model of the index, if it is not where it was when the index was built.

        Raises:
            OSError: If there is no such index or model.
            ValueError: If a file is damaged, or the index is of another model.
        """
        folder = Path(folder)
        if not (folder / ABOUT_FILE).is_file():
            raise FileNotFoundError(f"there is no {folder / ABOUT_FILE}; build an index with recipes/build_index.py.")
        if damage := find_damage(folder):
            raise ValueError(f"the index {folder} is damaged: {damage}. Build it again.")
        about = read_json(folder / ABOUT_FILE)
        beside = os.path.normpath(folder / about.get("model_folder", ""))
        known = beside if "model_folder" in about and Path(beside).is_dir() else about["model"]
        try:
            encoder = model if isinstance(model, ImageEncoder) else ImageEncoder(model or known)
        except FileNotFoundError as error:
            hint = "" if model else f" If the model of {folder} was moved, name its folder (--model_name_or_path)."
            raise FileNotFoundError(f"{error_text(error).rstrip('.')}.{hint}") from error
        if encoder.weights != about["weights"]:
            which = f"is of another model than {encoder.name}, or that one was trained further: the weights differ"
            raise ValueError(f"the index {folder} {which}. Load its model ({about['model']}), or build it again.")
        embeddings = load_file(folder / EMBEDDINGS_FILE)["embeddings"]
        images = pq.read_table(folder / IMAGES_FILE).to_pydict()
        index = cls(encoder, images, embeddings, [(name, split) for name, split in about["sources"]], about["kind"])
        if importlib.util.find_spec("faiss") is None:
            index.kind = None  # with a message, exact
        elif about["search"] in APPROXIMATE:
            options = {"kind": about["search"], "file": folder / SEARCH_FILE, **encoder.metric}
            index._search = NeighborSearch(embeddings, **options)
            index._search.recall = about["recall"]
        return index

    def _embed(
        self, source: ImageSource, rows: Sequence[int], options: dict[str, Any]
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the columns of the readable images of some rows, and their embeddings (N, d)."""
        names, embeddings = self.encoder.class_names, []
        cells: dict[str, list[Any]] = {"file": [], "row": []}
        for indices, columns in self.encoder.encode(source, rows, **options):
            embeddings.append(columns["embedding"])
            cells["row"] += indices.tolist()
            cells["file"] += [source.names[row] for row in indices.tolist()]
            if source.labels:
                cells.setdefault("label", []).extend(source.labels[row] for row in indices.tolist())
            if "prediction" in columns:
                cells.setdefault("prediction", []).extend(names[index] for index in columns["prediction"].tolist())
            for name in {"confidence", "concentration"} & set(columns):
                cells.setdefault(name, []).extend(columns[name].tolist())
        if not embeddings and not len(self):
            raise ValueError(f"none of the {len(rows)} images can be read.")
        return cells, torch.cat([self.embeddings[:0], *embeddings] if len(self) else embeddings)

    def _find(self, queries: dict[str, Any], embeddings: Tensor, k: int, classes: Sequence[str] | None) -> Neighbors:
        if classes is None:
            return Neighbors(queries, *reversed(self.neighbor_search.search(embeddings, k)))
        chosen = torch.tensor([row for row, name in enumerate(self.classes()) if name in classes], dtype=torch.long)
        if len(chosen) == 0:
            known = ", ".join(sorted(set(self.classes())))
            raise ValueError(f"no image has the class {' or '.join(classes)}; there are {known}.")
        exact = NeighborSearch(self.embeddings[chosen], kind="torch", **self.encoder.metric)
        distances, rows = exact.search(embeddings, k)
        return Neighbors(queries, chosen[rows], distances)


@lru_cache(maxsize=4)
def _data_set(name: str, split: str) -> ImageSource:
    return ImageSource.of(name, split)
