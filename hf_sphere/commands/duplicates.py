"""Find near-identical images, texts or vectors, likely wrong labels, and rows that two parts have in common.

hf-sphere duplicates photos
hf-sphere duplicates photos/train --other photos/test --label_column label --table duplicates.csv
hf-sphere duplicates texts.parquet --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --threshold 0.95
hf-sphere duplicates outputs/index

Without a model, images are compared by thumbnails, which finds copies that were resized or compressed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.commands.search import write_table
from hf_sphere.utils.arguments import Arguments, argument, command_arguments, named_first
from hf_sphere.utils.files import check_writable


@dataclass
class DuplicateArguments(Arguments):
    """Rows to compare, and output."""

    source: str = argument(
        help="Folder of images (at any depth), parquet, CSV, JSON or text file, name of a dataset, or folder of an "
        "index. It can be the first argument."
    )
    model_name_or_path: str | None = argument(
        None, "Model, see hf-sphere index. Without one, the --column has vectors, or images are compared by thumbnails."
    )
    column: str | None = argument(None, "Column of the images, texts or vectors of a dataset, if its name is unusual.")
    split: str | None = argument(None, "Split of a dataset; the evaluation split if not set.")
    other: str | None = argument(None, "Images, texts or vectors of another split, such as the test set.")
    other_split: str | None = argument(None, "Split of the other part, of the same dataset if --other is not set.")
    label_column: str | None = argument(None, "Column of labels, or `label` for the class, to find likely wrong ones.")
    group_column: str | None = argument(
        None, "Column of groups that contain the duplicates of their rows, such as the product; not the class."
    )
    threshold: float | None = argument(
        None, "Smallest cosine of a duplicate; if not set, chosen.", gt=-1, le=1, not_with=["expected_false"]
    )
    expected_false: float | None = argument(
        None, "Number of false pairs that a chosen threshold is expected to find; 1 if not set.", gt=0
    )
    table: str | None = argument(None, "CSV file for the table; printed if not set.")
    skip_unreadable_images: bool = argument(False, "Leave out images that cannot be read.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and find duplicates."""
    words = named_first("source", argv)
    (args,) = command_arguments((DuplicateArguments,), words, __doc__)
    if args.table is not None:
        check_writable(args.table, is_folder=False)
    images, space, places, labels = read_rows(args)
    parts = images["source"] if len({*images.get("source", [])}) > 1 else None
    found = space.duplicates(args.threshold, expected_false=args.expected_false, labels=labels, parts=parts)
    suggested = dict(zip(found.suspects.tolist(), found.suggestions, strict=True))
    clusters = {row: number for number, rows in enumerate(found.clusters, start=1) for row in rows.tolist()}
    nearest: dict[int, float] = {}
    for pair, cosine in zip(found.pairs.tolist(), found.cosines.tolist(), strict=True):
        nearest |= {row: max(cosine, nearest.get(row, -1.0)) for row in pair}
    table: list[dict[str, Any]] = []
    for row in {**clusters, **suggested}:  # suspects without a duplicate are in no cluster
        cosine = f"{nearest[row]:.6g}" if row in nearest else None
        table.append({"cluster": clusters.get(row), "id": int(space.ids[row]), "cosine": cosine})
        table[-1] |= {"file": places[row].removeprefix(f"{Path.cwd()}/")} if places else {}
        table[-1] |= {"text": images["text"][row]} if "text" in images else {}
        table[-1] |= {"label": labels[row], "suggested_label": suggested.get(row)} if labels else {}
    if table:
        write_table(table, args.table)
    expected = "unknown" if found.expected_false is None else f"{found.expected_false:.3g} by a fitted model"
    lines = [f"threshold cosine {found.threshold:.6g}; expected number of false pairs: {expected}"]
    lines += [f"found     {len(clusters):,} of {len(space):,} rows in {len(found.clusters):,} clusters"]
    suspect = f"{len(suggested):,} rows are suspect"
    lines += [f"labels    {len(found.conflicts):,} clusters have several; {suspect}"] * bool(labels)
    lines += [f"parts     {len(found.shared):,} clusters have rows of several"] * bool(parts)
    print("\n".join(lines), file=sys.stderr)  # since stdout may be the table


def read_rows(args: DuplicateArguments) -> tuple[dict[str, list[Any]], Any, list[str], list[Any] | None]:
    """Return the columns of the rows, their space, their paths, and their labels."""
    from hf_sphere.search.encoder import ThumbnailEncoder, load_encoder
    from hf_sphere.search.index_files import ABOUT_FILE, read_index

    if (Path(args.source) / ABOUT_FILE).exists():
        for name in ("model_name_or_path", "column", "split", "other", "other_split", "group_column"):
            if (value := getattr(args, name)) is not None:
                raise ValueError(f"--{name} {value} has no effect on {args.source}, which is an index. Leave it out.")
        about, images, space = read_index(search.EmbeddingSpace, args.source)
        index, labels = search.ImageIndex(None, images, space, about.sources), images.get(args.label_column or "")
        if args.label_column and labels is None:
            raise ValueError(f"{args.source} has no {args.label_column!r}. Leave out --label_column.")
    else:
        has_model = args.model_name_or_path or args.column
        encoder = load_encoder(args.model_name_or_path) if has_model else ThumbnailEncoder()
        other = [(args.other or args.source, args.other_split)] if args.other or args.other_split else []
        options: dict[str, Any] = {"column": args.column, "content": encoder.content}
        sources = [search.ImageSource.of(name, split, **options) for name, split in [(args.source, args.split), *other]]
        if len({(source.name, source.split) for source in sources}) < len(sources):
            raise ValueError(f"--other is {args.source} itself. Name another part, or leave it out.")
        names = [source.read_groups(args.label_column, "labels") for source in sources if args.label_column]
        options = {"skip_unreadable": args.skip_unreadable_images}
        index = search.ImageIndex.build(encoder, sources[0], groups=args.group_column, **options)
        for source in sources[1:]:
            index.add(source, **options)
        at = zip(index.images["source"], index.images["row"], strict=True)
        labels = [names[source][row] for source, row in at] if names else None
    return index.images, index.space, [*map(index.path, range(len(index)))] if index.sources else [], labels
