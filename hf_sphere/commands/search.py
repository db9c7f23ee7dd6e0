"""Find the most similar images or texts of an index, print a table and draw a contact sheet.

hf-sphere search --index outputs/index --query bird.jpg --top_k 5 --contact_sheet found.png
hf-sphere search --index outputs/index --query photos --table found.csv --false_accept 0.05
hf-sphere search --index outputs/clip-index --text "a red bird"

`hf-sphere index` builds the index.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.files import atomic_file, check_writable
from hf_sphere.utils.texts import write_csv

CELL, TEXT, FONT = 160, 48, 12
"""Side of an image of the contact sheet, height of the text below it and size of its font, pixels."""

MOST_QUERIES = 50
"""Rows of the contact sheet."""

MOST_ROWS = 20
"""Rows of a table that are printed."""


@dataclass
class SearchArguments(Arguments):
    """Index, query and output."""

    index: str = argument(help="Folder of the index.")
    query: str | None = argument(None, "Image file, folder of images, name of a dataset, or file of texts or vectors.")
    column: str | None = argument(None, "Column of the queries; a usual name if not set, or the only one with vectors.")
    id_column: str | None = argument(None, "Column of ids of the queries, which name them.", only_with=["query"])
    columns: list[str] | None = argument(None, "Columns of the queries that the table repeats.", only_with=["query"])
    text: str | None = argument(None, "Instead, a text, for a model such as CLIP, or an index of texts.")
    top_k: int = argument(5, "Number of neighbors; a query that is in the index is one of them.", ge=1)
    false_accept: float | None = argument(
        None, "Mark matches: chance to accept anything for a query whose group is not in the index.", gt=0, lt=1
    )
    leave_out_query: bool = argument(False, "Leave out a neighbor that is the same file or row.", only_with=["query"])
    classes: list[str] | None = argument(
        None, "Find only images of these classes; that of an image without a label is its prediction, shown with a '?'."
    )
    model_name_or_path: str | None = argument(None, "Model of the index, if it was moved.")
    table: str | None = argument(None, "CSV file for the table; up to 20 rows are printed if not set.")
    contact_sheet: str | None = argument(None, "PNG file for the images of up to 50 queries with their neighbors.")
    skip_invalid: bool = argument(False, "Leave out unreadable queries, and vectors that are zero or not finite.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.query is None) == (self.text is None):
            raise ValueError("give either --query or --text.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and search."""
    (args,) = parse_arguments((SearchArguments,), argv, __doc__)
    for output in filter(None, (args.table, args.contact_sheet)):
        check_writable(output, is_folder=False)
    index = search.ImageIndex.load(args.index, args.model_name_or_path)
    if args.leave_out_query and args.false_accept is not None and index.space.score == "margin":
        hint = "build the index with --score cosine, or read what hf-sphere index expects to find"
        raise ValueError(f"--leave_out_query has no level by margins, where a query counts for its group; {hint}.")
    source = None
    count = sum(name in args.classes for name in index.classes()) if args.classes else len(index)
    if 0 < count < args.top_k:
        raise ValueError(f"--top_k must be at most {count:,}, the number of images to find; got {args.top_k}.")
    if args.contact_sheet is not None and index.encoder.content != "image":
        raise ValueError(f"--contact_sheet shows images; this is an index of {index.encoder.content}s. Leave it out.")
    options: dict[str, Any] = {"classes": args.classes, "false_accept": args.false_accept}
    if args.text is not None:
        neighbors = index.search_texts([args.text], args.top_k, **options)
    else:
        source = search.ImageSource.of(args.query, column=args.column, content=index.encoder.content)
        source = source.with_columns(args.id_column, args.columns or ())
        options |= {"skip_invalid": args.skip_invalid, "progress": len(source) > 500}
        top_k = min(args.top_k + args.leave_out_query, count)
        neighbors = index.search(source, top_k, **options)
        if args.leave_out_query:
            neighbors = leave_out_queries(index, neighbors, source, args.top_k)
    rows = make_table(index, neighbors)
    if not rows:
        raise ValueError("no image is left to find; leave out --leave_out_query.")
    if args.table is not None or len(rows) <= MOST_ROWS:
        write_table(rows, args.table)
    else:
        nearest, size = [row for row in rows if row["rank"] == 1][:10], f"{len(index):,} rows"
        width = min(40, max(len(str(row["query"])) for row in nearest))
        print(f"searched  {len(neighbors.rows):,} queries among {size}; the nearest rows of the first {len(nearest)}:")
        for row in nearest:
            decision = {"true": ", match", "false": ", no match"}.get(row.get("accepted", ""), "")
            name = f"{row['file']}{row['class'] and ' (' + row['class'] + ')'}"
            print(f"          {str(row['query'])[-width:]:<{width}}  {name}, distance {row['distance']}{decision}")
        print(f"next step --table found.csv writes all {len(rows):,} rows")
    if (known := neighbors.queries.get("known")) is not None:  # on stderr, since stdout may be the table
        unknown = f"{len(known) - sum(map(bool, known)):,} of {len(known):,} queries"
        print(f"unknown   {unknown}, at the level of the model", file=sys.stderr)
    if neighbors.accepted is not None:
        matched = f"{int(neighbors.accepted.any(dim=1).sum()):,} of {len(neighbors.rows):,} queries have a match"
        print(f"matches   {matched} at {100 * args.false_accept:.3g} % false accepts", file=sys.stderr)
    if args.contact_sheet is not None:
        queries = [source.open(row) if source else None for row in neighbors.queries.get("row", [0])[:MOST_QUERIES]]
        sheet = draw_contact_sheet(index, neighbors, queries)
        with atomic_file(args.contact_sheet) as unfinished:
            sheet.save(unfinished, "PNG")
        print(f"wrote     {args.contact_sheet}: {len(queries)} of {len(neighbors.rows)} queries")


def leave_out_queries(index: "search.ImageIndex", neighbors: Any, source: Any, top_k: int) -> "search.Matches":
    """Return the neighbors of queries, from top_k + 1 each, without the queries themselves."""
    queries = [str(Path(source.name) / name) for name in neighbors.queries["file"]]
    pairs = zip(neighbors.rows.tolist(), queries, strict=True)
    same = neighbors.rows.new_tensor([[row >= 0 and index.path(row) == query for row in rows] for rows, query in pairs])
    order = same.argsort(dim=1, stable=True)[:, :top_k]  # queries are moved to the end
    columns = {"rows": neighbors.rows.masked_fill(same > 0, -1), "scores": neighbors.scores}
    columns["distances"] = neighbors.distances
    if neighbors.accepted is not None:
        columns |= {"p_values": neighbors.p_values, "accepted": neighbors.accepted & (same == 0)}
    columns = {name: column.gather(1, order) for name, column in columns.items()}
    return replace(neighbors, ids=index.space._ids_of(columns["rows"]), **columns)


def make_table(index: "search.ImageIndex", neighbors: Any) -> list[dict[str, Any]]:
    """Return one row per neighbor: query, rank, id, file, class, distance, and the certainty of query and neighbor.

    A query with an id is named by it, and columns that index and queries keep are at the end. Paths below the working
    directory are relative to it. A class with a question mark is a prediction, and of a query there is one if its model
    can reject it. Rejected neighbors are in the table: a query has no match if none of its rows is accepted.
    """
    from hf_sphere.search.indexed_images import predicted_class

    classes, rows, here, queries = index.classes(mark="?"), [], f"{Path.cwd()}/", neighbors.queries
    for query, pairs in enumerate(zip(neighbors.rows.tolist(), neighbors.distances.tolist(), strict=True)):
        name = queries.get("id", queries["file"])[query]
        for rank, (row, distance) in enumerate(zip(*pairs, strict=True), start=1):
            if row < 0:
                continue
            cells = {"query": name.removeprefix(here) if isinstance(name, str) else name, "rank": rank}
            cells["id"] = neighbors.ids[query][rank - 1]
            cells |= {"file": index.path(row).removeprefix(here), "class": classes[row]}
            if "text" in index.images:
                cells["text"] = index.images["text"][row]
            if "known" in queries:
                cells["query_class"] = predicted_class(queries, query, "?")
            cells["distance"] = f"{round(distance, 6):.6g}"
            if neighbors.accepted is not None:
                cells["p_value"] = f"{neighbors.p_values[query, rank - 1]:.4g}"
                cells["accepted"] = str(bool(neighbors.accepted[query, rank - 1])).lower()
            for certain in (each for each in ("confidence", "concentration") if each in queries):
                certainty = index.images.get(certain, {row: None})[row]
                cells[f"query_{certain}"] = f"{queries[certain][query]:.4g}"
                cells[certain] = "" if certainty is None else f"{certainty:.4g}"
            cells |= index.images.get("columns", {row: {}})[row] or dict.fromkeys(index.extra)
            of_query = queries.get("columns", {query: {}})[query]
            rows.append(cells | {f"query_{column}": cell for column, cell in of_query.items()})
    return rows


def write_table(rows: Sequence[Any], path: str | None) -> None:
    """Write rows to a CSV file, or print them."""
    if path is None:
        write_csv(rows, sys.stdout)
        return
    with atomic_file(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        write_csv(rows, file)
    print(f"wrote     {path}: {len(rows):,} rows")


def draw_contact_sheet(index: "search.ImageIndex", neighbors: Any, queries: Sequence[Any]) -> Any:
    """Draw a row of images per query: the query, and its neighbors with distance, file and class ("?": predicted).

    The image of a query that is a text is None. Rejected neighbors are faded, and a query without a match is marked.
    """
    from PIL import Image, ImageDraw, ImageOps

    classes = index.classes(mark="?")
    sheet = Image.new("RGB", ((neighbors.rows.shape[1] + 1) * CELL, len(queries) * (CELL + TEXT)), "white")
    draw = ImageDraw.Draw(sheet)

    def place(column: int, line: int, image: Any, text: str) -> None:
        left, top = column * CELL, line * (CELL + TEXT)
        if image is not None:
            image = ImageOps.contain(image.convert("RGB"), (CELL - 6, CELL - 6))
            is_rejected = "rejected" in text.split("\n")[0]
            sheet.paste(image.point(lambda value: 170 + value // 3) if is_rejected else image, (left + 3, top + 3))
        draw.multiline_text((left + 3, top + CELL), fit(text), fill="black", font_size=FONT, spacing=1)

    def fit(text: str) -> str:
        """Shorten each line to the width of a cell; the "?" at its end is kept."""
        lines = []
        for line in text.split("\n"):
            name, mark = line.removesuffix("?"), "?" * line.endswith("?")
            while draw.textlength(name + mark, font_size=FONT) > CELL - 6:
                name = name[:-1]
            lines.append(name + mark)
        return "\n".join(lines)

    for line, image in enumerate(queries):
        mark = "query" if neighbors.accepted is None or neighbors.accepted[line].any() else "query: no match"
        if not neighbors.queries.get("known", {line: True})[line]:
            mark = f"{mark}, unknown"
        place(0, line, image, f"{mark}\n{Path(neighbors.queries['file'][line]).name}")
        for column, row in enumerate(neighbors.rows[line].tolist(), start=1):
            if row < 0:
                continue
            try:
                neighbor, note = index.open_image(row), classes[row]
            except (ValueError, OSError):
                neighbor, note = None, "(missing or changed)"
            at, text = (line, column - 1), ""
            if neighbors.accepted is not None:
                text = f"{'match' if neighbors.accepted[at] else 'rejected'}, p {neighbors.p_values[at]:.2g}\n"
            text += f"distance {round(float(neighbors.distances[at]), 4):.4g}\n"
            place(column, line, neighbor, text + " ".join(filter(None, (Path(index.path(row)).name, note))))
    return sheet
