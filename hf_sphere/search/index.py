"""Search for similar images or texts: an index of embeddings in a folder of safetensors, parquet and JSON files."""

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.calibration import Score
from hf_sphere.search.encoder import load_encoder
from hf_sphere.search.index_files import read_index, write_index
from hf_sphere.search.indexed_images import IndexedImages, identify, predicted_class
from hf_sphere.search.matching import Matches
from hf_sphere.search.neighbor_search import SearchKind, check_kind
from hf_sphere.search.source import Groups, ImageSource
from hf_sphere.search.space import EmbeddingSpace
from hf_sphere.search.vectors import check_ids, check_names
from hf_sphere.utils.checks import check_integer, check_not_text, text_list

logger = logging.getLogger(__name__)

Classes = Sequence[str] | None
KEPT = ("sources", "groups", "calibrated_with", "calibration_settings", "columns", "ids", "extra")
"""Attributes of an index that `index.json` has under the same name."""


class ImageIndex(IndexedImages):
    """A space of the embeddings of images or texts, searchable by these and, for a model such as CLIP, by text.

    Attributes:
        encoder: The model, or a `VectorEncoder` for vectors without one.
        images: Columns of the indexed images: `id`, `file`, `source` (a number), `row` of the source, and as far as
            known `label`, `group`, `text`, `columns` (those of the data that are kept), `prediction`, `confidence`,
            `concentration`, `known` and `p_value`; and what shows whether an image changed: `size`, `time`, `digest`
            and the `settings` of the model. An image without an id of its own has a number as its `id`, which it keeps
            when others are added or removed, and when it is overwritten.
        space: The embeddings (N, d), float32, with their search and its calibration.
        groups: What the groups are: `label`, a column, an empty text for names that are given, or None.
        calibrated_with: Content of the queries that calibrate.
        calibration_settings: The `settings` of the model that embedded separate calibration queries.
        columns: Column of the images of a dataset, by its name, if that was asked for.
        ids: The column of the ids, an empty text for ids that are given, or None for numbers.
        extra: Columns of the data that are kept, and that results repeat.
        sources: Folder or dataset and split of the images, by number.

    Example:
        >>> index = ImageIndex.build("outputs/birds", "photos")
        >>> found = index.search("bird.jpg", 5, false_accept=0.05)
        >>> [index.images["file"][row] for row in found.rows[0]]
    """

    @classmethod
    def build(
        cls,
        model: Any,
        images: Any,
        *,
        groups: Groups = None,
        ids: Groups = None,
        columns: Sequence[str] = (),
        calibration: Any = None,
        score: Literal["auto"] | Score = "auto",
        kind: SearchKind | None = None,
        **options: Any,
    ) -> "ImageIndex":
        """Embed images, texts or vectors.

        Args:
            model: The model, or its folder or Hub id; None for vectors.
            images: See `ImageSource.of`.
            groups: Groups of rows that match each other, see `EmbeddingSpace.fit`: `label`, a column of the dataset,
                or one name per row. If None, each row is a group.
            ids: Ids by which results name the rows, different texts or integers: a column, or one per row. If None,
                rows are numbered.
            columns: Columns of texts, numbers or dates of the dataset that results repeat.
            calibration: See `calibrate`; its groups are labels or a column too, or each is one. If None, the rows of
                the index calibrate.
            score: See `EmbeddingSpace.fit`: the score of searches with a level.
            kind: Kind of the search; if None, chosen by the number of images.
            **options: Options of `encode` of the encoder.

        Raises:
            TypeError: If an image is an array; search embeddings with `EmbeddingSpace`.
            ValueError: If there are no images, or one cannot be read, or the kind does not support the distance.
            ImportError: If the kind needs FAISS and it is not installed.
        """
        encoder = load_encoder(model)
        space: Any = EmbeddingSpace(torch.empty(0, 0), metric=encoder.metric, score=score, kind=kind)
        space.score = score  # chosen with the first rows
        rule, id_rule = (names if names is None or isinstance(names, str) else "" for names in (groups, ids))
        check_not_text("columns", columns)
        index = cls(encoder, {}, space, [], rule, encoder.content, ids=id_rule, extra=[*columns])
        if kind is not None:
            check_kind(kind, encoder.metric.get("distance", "cosine"))
        calibration = None if calibration is None else ImageSource.of(calibration, content=encoder.content)
        names = calibration and rule and calibration.read_groups(rule)  # before the work, for its errors
        index.add(images, groups, ids=ids, **options)
        if calibration is not None:
            index.calibrate(calibration, names or None, **options | {"folder": None})
        return index

    def calibrate(self, images: Any, groups: Groups = None, **options: Any) -> None:
        """Calibrate by separate queries, see `EmbeddingSpace.calibrate`.

        The images, texts or vectors have no match in the index; for the other arguments, see `build`. For a model
        such as CLIP they can be texts, `ImageSource.of(texts, content="text")`; then only searches by text have levels.
        """
        source = ImageSource.of(images, content=self.encoder.content)
        names = None if groups is None else source.read_groups(groups)
        digests = {state.digest for state in identify(source, range(len(source)), progress=False).values()} - {None}
        if count := len(digests.intersection(self.images["digest"])):
            raise ValueError(f"{count:,} of the calibration {source.content}s are in the index; leave them out.")
        cells, embeddings = self._embed_queries(source, options)
        queries = project_to_sphere(embeddings) if self.encoder.metric["distance"] == "cosine" else embeddings
        self.space.calibrate(queries, names and [names[row] for row in cells["row"]], score=self.space.score)
        self.calibrated_with, self.calibration_settings = source.content, self.encoder.settings

    def add(self, images: Any, groups: Groups = None, *, ids: Groups = None, check: bool = True, **options: Any) -> int:
        """Embed and add images that the index does not have yet; return their number.

        Images whose content, preprocessing or class names have changed are embedded again, and keep their `id`. An
        image that was moved is a new one; a warning names one that is gone, until it is removed. The row of a table is
        recognized by its own id, if the index has such, else by its number. For the arguments, see `build`. Groups and
        ids by label or column are the same for all.
        Vectors that look like those of another model are refused unless `check` is False.
        """
        source = ImageSource.of(images, content=self.encoder.content)
        for what, given, known in (("ids", ids, self.ids), ("groups", groups, self.groups)):
            if given is not None and known is None:
                raise ValueError(f"the index has no {what}; leave out {what}, or build it again with them.")
        source = source.with_columns(self.ids if ids is None else ids, self.extra)
        groups = self.groups if groups is None else groups
        names = None if groups is None else source.read_groups(groups)
        if names:
            check_names("groups", both := [*self.images.get("group", ()), *names], len(both))
            self.space.check_groups(names)
        sources, settings = [*self.sources, (source.name, source.split)], self.encoder.settings
        source_id = sources.index(sources[-1])
        kept, states = self.match(source, progress=options.get("progress", True))
        stored = list(zip(self.images.get("digest", ()), self.images.get("settings", ()), strict=True))
        outdated = [n for n in states if n not in kept or stored[kept[n]] != (states[n].digest, settings)]
        # Nothing is changed before all is embedded.
        added, embeddings = self._embed(source, outdated, options) if outdated else ({"row": []}, self.embeddings[:0])
        if check and len(self) and len(embeddings) and self.encoder.content == "vector":
            self.space._refuse_foreign(embeddings)
        embedded = {n: at for at, n in enumerate(added["row"])}
        old, new = len(self), [n for n in embedded if n not in kept]
        size = old + len(new)
        rows = kept | dict(zip(new, range(old, size), strict=True))
        images = defaultdict[str, list[Any]](lambda: [None] * size)
        images |= {name: [*column, *[None] * len(new)] for name, column in self.images.items()}
        if self.ids is None:
            images["id"][old:] = range(self.space._next, self.space._next + len(new))
        own = source.ids if self.ids is not None else None, source.cells if self.extra else None
        columns: Any = replace(source, ids=own[0], cells=own[1]).columns
        columns |= {"source": [source_id] * len(source)} | ({"group": names} if names else {})
        of_model = {name: values for name, values in added.items() if name not in source.columns}
        for n in rows.keys() - ({*outdated} - embedded.keys()):
            cells = {name: column[n] for name, column in columns.items()}
            cells |= states[n]._asdict() if n in states else {}
            if n in embedded:
                cells |= {name: values[embedded[n]] for name, values in of_model.items()} | {"settings": settings}
            for name, value in cells.items():
                images[name][rows[n]] = value
        if self.ids is not None:
            check_ids(images["id"], size)
        rows_here = {row for row, other in enumerate(self.images.get("source", [])) if other == source_id}
        if source.name and (lost := rows_here - {*kept.values()}):
            text = "%d rows of the index are no longer in %s, such as %s; remove them."
            logger.warning(text, len(lost), source.name, self.images["file"][min(lost)])
        again = [kept[n] for n in embedded if n in kept]
        if again:
            self.space.vectors = self.embeddings.clone()
            self.space.vectors[again] = embeddings[[at for n, at in embedded.items() if n in kept]]
            self.space._calibration = self.space._search = self.space._axes = None
            logger.warning("%d rows of the index were embedded again.", len(again))
        self.columns |= {source.name: source.column} if source.column else {}
        self.sources = sources
        self._set(images, set(), embeddings[[embedded[n] for n in new]])
        return len(new)

    def remove(self, images: str | PathLike | int) -> int:
        """Remove an image by its id, path or name, or all images of a folder or dataset; return their number.

        Args:
            images: Path of a file or folder, which need not exist any more; name of a dataset; name of an image, as in
                the column `file`; or an id.

        Raises:
            ValueError: If there are no such images, images of several sources have the name, or no others remain.
        """
        name, what, paths = str(images), self.encoder.content, [self.path(row) for row in range(len(self))]
        above = set() if isinstance(images, int) else {name, os.path.abspath(name), os.path.realpath(name)}
        below = tuple(os.path.join(path, "") for path in above)
        removed = {row for row, path in enumerate(paths) if path in above or path.startswith(below)}
        ids, wanted = (self.images["id"], images) if self.ids is None else (map(str, self.images["id"]), name)
        removed = removed or {row for row, cell in enumerate(ids) if cell == wanted}
        if not removed:
            removed = {row for row, cell in enumerate(self.images["file"]) if cell == name}
            if len(removed) != 1:
                candidates = ", ".join(paths[row] for row in removed) or f"no such {what}, folder or dataset"
                raise ValueError(f"{images} does not name {what}s of the index: there is {candidates}.")
        if len(removed) == len(self):
            raise ValueError(f"{images} names all {what}s of the index; remove its folder instead.")
        self._set(self.images, removed, self.embeddings[:0])
        return len(removed)

    def __len__(self) -> int:
        return len(self.space)

    def __repr__(self) -> str:
        return f"ImageIndex({len(self):,} {self.encoder.content}s, model {self.encoder.name!r})"

    @property
    def embeddings(self) -> Tensor:
        """The embeddings, (N, d) float32."""
        return self.space.vectors

    def search(
        self, images: Any, k: int = 10, *, classes: Classes = None, false_accept: float | None = None, **options: Any
    ) -> Matches:
        """Find the nearest indexed images of images; with a level, those of the best scores, as `EmbeddingSpace` does.

        Args:
            images: See `ImageSource.of`.
            k: Number of neighbors, at most the number of images.
            classes: Find only images whose class (see `classes`) is one of these, by an exact search.
            false_accept: Level of false accepts, see `EmbeddingSpace.search`.
            **options: Options of `encode` of the encoder.

        Raises:
            ValueError: If k is too large, no image has one of the classes, an image cannot be read, or the calibration
                has too few groups for the level, or is one by texts.
        """
        names = None if classes is None else text_list("classes", classes)
        source = ImageSource.of(images, content=self.encoder.content)
        if false_accept is not None:
            if reason := self.why_no_level(source.content):
                hint = f"calibrate it with {source.content}s (ImageIndex.calibrate, or hf-sphere index --calibration)"
                raise ValueError(f"no level of false accepts: {reason}; leave it out, or {hint}.")
            self.space.calibration.check_level(false_accept)
        queries, embeddings = self._embed_queries(source, options)
        if self.encoder.content == "vector":  # else its model is known
            self.space._warn_of_foreign(embeddings)
        among, count = None, len(self)
        if names is not None:
            among = torch.tensor([n for n, name in enumerate(self.classes()) if name in names], dtype=torch.long)
            count = len(among)
        check_integer("k", k, 1, count)
        # Without a level there are no p-values, which would be wrong for queries of other content.
        found = self.space._judge(embeddings, k, false_accept, false_accept is not None, among)
        return replace(found, queries=queries | {"embedding": embeddings})

    def search_texts(
        self, texts: Sequence[str], k: int = 10, *, classes: Classes = None, false_accept: float | None = None
    ) -> Matches:
        """Find the indexed images that are nearest to texts; see `search`.

        Raises:
            ValueError: If the model embeds no texts, and for the reasons of `search`.
        """
        texts = text_list("texts", texts)
        source = ImageSource("", None, texts, [], texts, "text")
        return self.search(source, k, classes=classes, false_accept=false_accept)

    def classes(self, *, mark: str = "") -> list[str]:
        """Return the class of each image: its label, else its prediction and a `mark`, or `unknown`, else no text."""
        labels = self.images.get("label", [None] * len(self))
        return [label or predicted_class(self.images, row, mark) for row, label in enumerate(labels)]

    def save(self, folder: str | PathLike) -> None:
        """Write the index to a folder; an index that is there is replaced.

        To change an index that others may change too, hold `hf_sphere.utils.files.lock_folder` from `load` to `save`.

        Raises:
            FileExistsError: If the folder contains other files, or has changed since the index was loaded from it.
        """
        encoder = self.encoder
        about: dict[str, Any] = {name: getattr(self, name) for name in KEPT}
        about |= {"model": encoder.name, "weights": encoder.weights}
        # Found from every working directory, and not absolute, which is private.
        is_folder = os.path.isdir(encoder.name)
        about["model_folder"] = os.path.relpath(encoder.name, Path(folder).resolve()) if is_folder else None
        write_index(folder, self.space, self.images, **about)

    @classmethod
    def load(cls, folder: str | PathLike, model: Any = None) -> "ImageIndex":
        """Read an index that `save` wrote; the embeddings stay on disk, mapped into memory.

        Without FAISS the search is exact. A warning lists what has changed, see `changes`. Later changes of the folder
        do not affect the index. Its `model` is needed if that is not where it was when the index was built.

        Raises:
            OSError: If there is no such index or model.
            ValueError: If a file is damaged, or the index is of another model.
        """
        folder = Path(folder)
        # All before the model, which takes seconds to load.
        about, images, space = read_index(EmbeddingSpace, folder)
        beside = os.path.normpath(folder.resolve() / (about.model_folder or ""))
        model_name = beside if about.model_folder and Path(beside).is_dir() else about.model
        encoder = load_encoder(model or model_name)
        if encoder.weights != about.weights or encoder.metric != about.metric:
            which = f"is of another model than {encoder.name}: the weights differ"
            raise ValueError(f"the index {folder} {which}. Load its model ({about.model}), or build it again.")
        index = cls(encoder, images, space, **{name: getattr(about, name) for name in KEPT})
        if texts := index.changes():
            hint = "Add the images of each source again, which embeds what has changed; remove those that are gone"
            logger.warning("The index %s is not up to date: %s. %s.", folder, "; ".join(texts), hint)
        return index

    def _embed_queries(self, source: ImageSource, options: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Return the columns and embeddings (Q, d) of queries; models may embed texts that search in their own way."""
        rows = range(len(source))
        if source.content != "text":
            return self._embed(source, rows, options | {"what": "queries"} if source.content == "vector" else options)
        parts = [self.encoder.encode_texts(source.encoded[at : at + 256]) for at in rows[::256]]
        return {name: [*column] for name, column in source.columns.items()}, torch.cat(parts)

    def _embed(self, source: ImageSource, rows: Sequence[int], options: Any) -> tuple[dict[str, Any], Tensor]:
        """Return the columns of the readable images of some rows, and their embeddings (N, d)."""
        embeddings: list[Tensor] = []
        cells = defaultdict[str, list[Any]](list, file=[], row=[])
        for indices, columns in self.encoder.encode(source, rows, **options):
            embeddings.append(columns["embedding"])
            for name, values in self.encoder.name_cells(source, indices, columns).items():
                cells[name] += values
        if not embeddings and not len(self):
            raise ValueError(f"none of the {len(rows)} images can be read.")
        if len(self) and embeddings and (got := embeddings[0].shape[1]) != (dim := self.embeddings.shape[1]):
            raise ValueError(f"the embeddings of the index have {dim} dimensions, but the new ones {got}.")
        return dict(cells), torch.cat(embeddings or [self.embeddings[:0]])

    def _set(self, images: Mapping[str, list[Any]], removed: set[int], embeddings: Tensor) -> None:
        """Set the columns but for some rows, the last ones of new embeddings; sources without images are removed."""
        space, kept = self.space, [row for row in range(len(images["id"])) if row not in removed]
        self.images = {name: [column[row] for row in kept] for name, column in images.items()}
        used = sorted({*self.images["source"]})
        self.images["source"] = [used.index(number) for number in self.images["source"]]
        self.sources, self._opened = [self.sources[number] for number in used], {}
        ids, groups = self.images["id"] if self.ids is not None else None, self.images.get("group")
        if not len(self):
            options: Any = {"metric": space.metric, "score": space.score, "kind": space.kind}
            self.space = EmbeddingSpace(embeddings, groups, ids=ids, **options)
            return
        rows = torch.tensor([row for row in kept if row < len(self)], dtype=torch.long)
        new = torch.arange(space._next, space._next + len(embeddings))
        all_groups = space._number(groups, torch.cat([space._numbers[rows], new]))
        space._set(rows, embeddings, new, all_groups, ids)

    def why_no_level(self, content: str) -> str:
        """Return why searches by images, texts or vectors have no level of false accepts; an empty text if they can."""
        is_separate = self.space._queries is not None
        used = {self.calibration_settings} if is_separate else {*self.images["settings"]}
        if content != self.calibrated_with:
            text = f"the index is calibrated with {self.calibrated_with}s, whose similarities differ from"
            return f"{text} {content}s"
        if not is_separate and not self.encoder.is_symmetric:
            return "its model embeds queries in another way than the texts of the index, which calibrate it"
        if {settings.split("-")[0] for settings in used} != {self.encoder.settings.split("-")[0]}:
            return "the preprocessing of the model has changed since the calibration queries were embedded"
        return ""
