"""Find near-identical images, texts or vectors, likely wrong labels, and rows that two parts have in common.

hf-sphere duplicates photos
hf-sphere duplicates photos/train --other photos/test --label_column label --page duplicates.html
hf-sphere duplicates texts.parquet --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --threshold 0.95
hf-sphere duplicates vectors.parquet --id_column id --columns title --table pairs.csv
hf-sphere duplicates outputs/index

Without a model, images are compared by thumbnails, which finds copies that were resized or compressed. The table has a
row per pair; `cluster` numbers what pairs connect.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.commands.search import write_table
from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.files import check_writable
from hf_sphere.utils.pages import MOST_BYTES, draw_image, draw_markdown, escape, write_page

THUMBNAIL, FEW_CARDS, MOST_CARDS = 96, 6, 50
"""Longest side of an image on the page, pixels, and rows of a cluster that it shows at once, and unfolded."""


@dataclass
class DuplicateArguments(Arguments):
    """Rows to compare, and output."""

    source: str = argument(
        help="Folder of images (at any depth), parquet, CSV, JSON or text file, name of a dataset, or folder of an "
        "index. It can be the first argument."
    )
    model_name_or_path: str | None = argument(
        None, "Model, see hf-sphere index. Without one, images are compared by thumbnails, or the source has vectors."
    )
    column: str | None = argument(
        None, "Column of the images, texts or vectors; if not set, one with a usual name, or the only one with vectors."
    )
    id_column: str | None = argument(None, "Column of ids, by which the tables name the rows, different in each part.")
    columns: list[str] | None = argument(None, "Further columns of the rows that the table has.")
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
    expected_false: float | None = argument(None, "Expected false pairs of a chosen threshold; 1 if not set.", gt=0)
    table: str | None = argument(None, "CSV file for the table of pairs; printed if neither it nor a page is set.")
    suspects: str | None = argument(
        None, "CSV file for the rows whose label is likely wrong, with a better one.", only_with=["label_column"]
    )
    skip_invalid: bool = argument(False, "Leave out unreadable images, and vectors that are zero or not finite.")
    page: str | None = argument(None, "HTML file for a page with the clusters and likely wrong labels, one by one.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and find duplicates."""
    (args,) = parse_arguments((DuplicateArguments,), named_first("source", argv), __doc__)
    for output in filter(None, (args.table, args.suspects, args.page)):
        check_writable(output, is_folder=False)
    columns, space, index = read_rows(args)
    from hf_sphere.search.encoder import ThumbnailEncoder

    labels, parts = columns.get("label"), columns.get("part")
    found = space.duplicates(args.threshold, expected_false=args.expected_false, labels=labels, parts=parts)
    pairs = found.pairs_by_column(columns)
    pairs["cosine"] = [f"{cosine:.6g}" for cosine in pairs["cosine"]]
    if len(found.pairs) and (args.table or not args.page):
        write_table([dict(zip(pairs, cells, strict=True)) for cells in zip(*pairs.values(), strict=True)], args.table)
    suspects = [{name: column[row] for name, column in columns.items()} for row in found.suspects.tolist()]
    if suspects and args.suspects is not None:
        named = zip(suspects, found.suggestions, strict=True)
        write_table([cells | {"suggested_label": label} for cells, label in named], args.suspects)
    hint = " (--suspects lists them)" * bool(suspects and args.suspects is None)
    if isinstance(index.encoder, ThumbnailEncoder):
        hint += "; thumbnails know little of classes: name a model by --model_name_or_path"
    lines = [f"labels    {len(found.conflicts):,} clusters have several; {len(suspects):,} rows are suspect{hint}"]
    lines = lines * bool(labels) + [f"parts     {len(found.shared):,} clusters have rows of several"] * bool(parts)
    lines = [*lines, f"found     {found}"]
    if args.page is not None:
        write_page(args.page, f"Duplicates in {args.source}", draw_clusters(index, found, columns, lines))
        print(f"wrote     {args.page}")
    print("\n".join(lines), file=sys.stderr)  # since stdout may be the table


def draw_clusters(index: Any, found: Any, columns: dict[str, list[Any]], lines: list[str]) -> list[str]:
    """Return the parts of a page: a summary, likely wrong labels, and clusters; what does not fit is left out."""
    rows = found.suspects.tolist()
    suggested = dict(zip(rows, found.suggestions, strict=True))
    flags = {n: " (several labels)" for n in found.conflicts} | {n: " (rows of several parts)" for n in found.shared}
    pairs = found.pairs_by_column({})
    lowest = dict(zip(pairs["cluster"], pairs["cosine"], strict=True))  # the pairs of a cluster end with the lowest one
    sections = [(f"{len(rows):,} likely wrong labels, the surest first", rows, MOST_CARDS)] * bool(rows)
    for n, members in enumerate(found.clusters):
        title = f"Cluster {n + 1}: {len(members):,} rows, cosines from {lowest[n + 1]:.4f}{flags.get(n, '')}"
        sections.append((title, members.tolist(), FEW_CARDS))
    parts, end, left, is_text = [draw_markdown(lines)], list[str](), MOST_BYTES, "text" in columns
    for done, (title, rows, few) in enumerate(sections):
        shown = list[str]()
        for row in rows[:MOST_CARDS]:
            about = [escape(str(column[row])[:500]) for name, column in columns.items() if name != "row"]
            about += [f'<span class="flag">{escape(suggested[row])}?</span>'] if suggested.get(row) is not None else []
            image = ""
            if "file" in columns:
                with contextlib.suppress(ValueError, OSError):  # an image that was removed has a card without it
                    image = draw_image(index.open_image(row), THUMBNAIL)
            shown.append(f'<div class="card">{image}{"<br>".join(about) or row}</div>')
            left -= len(shown[-1].encode()) + 100
        cards = [f'<div class="cards{" texts" * is_text}">{"".join(some)}</div>' for some in (shown[:few], shown[few:])]
        more = f"<p>and {len(rows) - MOST_CARDS:,} more, see the table (--table)</p>" * (len(rows) > MOST_CARDS)
        rest = f"<details><summary>{len(shown) - few:,} more</summary>{cards[1]}</details>" * (len(shown) > few)
        parts.append(f"<h2>{title}</h2>{cards[0]}{rest}{more}")
        if left < 0:
            end.append(f"<p>{len(sections) - done - 1:,} more clusters are left out; see the table (--table).</p>")
            break
    if len(parts) > MOST_CARDS:
        parts[MOST_CARDS:] = ["<details><summary>More clusters</summary>", *parts[MOST_CARDS:], "</details>"]
    return parts + end


def read_rows(args: DuplicateArguments) -> tuple[dict[str, list[Any]], Any, Any]:
    """Return the columns of the rows by name, for the tables, their space, and an index of them."""
    from hf_sphere.search.encoder import ThumbnailEncoder, VectorEncoder, load_encoder
    from hf_sphere.search.index_files import ABOUT_FILE, read_index

    if (Path(args.source) / ABOUT_FILE).exists():
        of_source = "model_name_or_path column split other other_split group_column id_column columns skip_invalid"
        if given := [name for name in of_source.split() if getattr(args, name)]:
            raise ValueError(f"--{given[0]} has no effect on {args.source}, which is an index. Leave it out.")
        about, images, space = read_index(search.EmbeddingSpace, args.source)
        index, labels = search.ImageIndex(None, images, space, about.sources), images.get(args.label_column or "")
        if args.label_column and labels is None:
            raise ValueError(f"{args.source} has no {args.label_column!r}. Leave out --label_column.")
        columns, has_files = {"id": images["id"]}, about.model != ""
    else:
        encoder = load_encoder(args.model_name_or_path) if args.model_name_or_path else None
        options: dict[str, Any] = {"column": args.column, "content": encoder and encoder.content}
        sources = [search.ImageSource.of(args.source, args.split, **options)]
        content = options["content"] = sources[0].content
        if args.other or args.other_split:
            sources.append(search.ImageSource.of(args.other or args.source, args.other_split, **options))
        if len({(source.name, source.split) for source in sources}) < len(sources):
            raise ValueError(f"--other is {args.source} itself. Name another part, or leave it out.")
        encoder = encoder or (ThumbnailEncoder() if content == "image" else VectorEncoder())
        sources = [source.with_columns(args.id_column, args.columns or ()) for source in sources]
        names = [source.read_groups(args.label_column, "labels") for source in sources if args.label_column]
        skip: dict[str, Any] = {"skip_invalid": args.skip_invalid}
        kept: Any = {"groups": args.group_column, "columns": args.columns or ()}
        index = search.ImageIndex.build(encoder, sources[0], **kept, **skip)
        for source in sources[1:]:  # whose ids may be the same
            index.add(source, **skip)
        at = [*zip(index.images["source"], index.images["row"], strict=True)]
        ids = [(sources[n].ids or [])[row] for n, row in at] if args.id_column else None
        columns = {"row": index.images["row"]} if ids is None else {"id": ids}
        labels = [names[n][row] for n, row in at] if names else None
        has_files = content == "image"
        if (column := sources[0].column) is not None and args.column is None:
            print(f"vectors   column {column} of {args.source}", file=sys.stderr)
    here, cells, parts = f"{Path.cwd()}/", index.images.get("columns"), index.images.get("source", [])
    if "text" in index.images:
        columns["text"] = index.images["text"]
    elif has_files:
        columns["file"] = [index.path(row).removeprefix(here) for row in range(len(index))]
    columns |= {name: [row[name] for row in cells] for name in cells[0]} if cells else {}
    named = [" ".join(filter(None, source)).removeprefix(here) for source in index.sources]
    columns |= {"part": [named[n] for n in parts]} if len({*parts}) > 1 else {}
    return columns | ({"label": labels} if labels else {}), index.space, index
