"""Report what is wrong with vectors, and which remedies help.

hf-sphere report vectors.parquet --column embedding --group_column article --page report.html
hf-sphere report outputs/index --json report.json
hf-sphere report outputs/index --compare_with new.parquet
hf-sphere report vectors.parquet --id_column id --columns title --page report.html

The report names rows by the --id_column, else by their numbers. An index has its own ids and columns.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_sphere import search, visualization
from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.files import check_writable, write_json
from hf_sphere.utils.pages import draw_figure, draw_markdown, draw_table, escape, write_page

MOST = 1_000
"""Rows that the page shows."""


@dataclass
class ReportArguments(Arguments):
    """Vectors and output."""

    source: str = argument(help="File or dataset of vectors, or folder of an index. It can be the first argument.")
    column: str | None = argument(None, "Column of the vectors; a usual name if not set, or the only one with vectors.")
    id_column: str | None = argument(None, "Column of ids, by which the report names rows.")
    columns: list[str] | None = argument(None, "Further columns of wrong or outside rows.", only_with=["page", "json"])
    group_column: str | None = argument(None, "Column of the groups, or `label` for the class: rows that match.")
    compare_with: str | None = argument(None, "Another source of vectors, with the same columns: whether they differ.")
    page: str | None = argument(None, "HTML file for a page with the numbers, what to do, and the figure.")
    figure: str | None = argument(None, "PNG file for a figure.")
    json: str | None = argument(None, "JSON file for the numbers.")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the vectors, print the report and write it."""
    (args,) = parse_arguments((ReportArguments,), named_first("source", argv), __doc__)
    for output in filter(None, (args.figure, args.json, args.page)):
        check_writable(output, is_folder=False)
    if args.figure is not None:
        visualization.check_matplotlib()
    (make_space, make_report, ids, cells), comparison = read_source(args.source, args), None
    if args.compare_with is not None:
        make_other, _, _, others = read_source(args.compare_with, args)
        comparison = make_space().compare(make_other())
    print(report := make_report())
    values = report.to_dict()
    rows, at = list[dict[str, Any]](), {name: row for row, name in enumerate(ids or ())}
    for key, named in report.numbers.items():
        kind, _, fault = key.replace("_", " ").partition(" ")
        for name in named if kind in ("rows", "ids") and isinstance(named, list) else ():
            own = cells[at[name] if kind == "ids" else name] if cells else {}
            rows.append({"wrong": fault, kind[:-1]: name, **own})
    if comparison is not None:
        outside = zip(comparison.outside_ids, comparison.outside.tolist(), strict=True)
        rows += [{"wrong": "outside", "id": name, **(others[row] if others else {})} for name, row in outside]
        print(f"compared with {args.compare_with}: {comparison}")
        cells = vars(comparison).items()
        values["comparison"] = {name: cell.tolist() if hasattr(cell, "tolist") else cell for name, cell in cells}
    if args.json is not None:
        write_json(args.json, values | {"rows": rows})
    if args.figure is not None:
        visualization.plot_report(report, title=args.source, path=args.figure)
    if args.page is not None:
        compared = f"Compared with {args.compare_with}: {comparison}" * (comparison is not None)
        parts = [draw_markdown([*report.verdicts, compared])]
        if report.remedies:
            parts += ["<h2>Remedies, on held-out groups</h2>", draw_markdown(map(str, report.remedies))]
        with tempfile.TemporaryDirectory() as folder:
            try:
                visualization.plot_report(report, path=(file := Path(folder, "figure.png")))
                parts.append(draw_figure(file))
            except (ImportError, ValueError) as error:  # without matplotlib, or nothing to draw
                parts.append(f"<p>No figure: {escape(error)}</p>")
        parts += ["<h2>Numbers</h2>", draw_table(report.to_pandas())]
        if rows:
            from pandas import DataFrame

            more = f"<p>and {len(rows) - MOST:,} more, see --json</p>" * (len(rows) > MOST)
            parts += [f"<h2>{len(rows):,} rows</h2>", draw_table(DataFrame(rows[:MOST])), more]
        write_page(args.page, f"Report on {args.source}", parts)
        print(f"wrote     {args.page}")


def read_source(name: str, args: ReportArguments) -> tuple[Any, Any, Any, Any]:
    """Read an index, a file or a dataset: functions that return its space and its report, ids and columns, or None."""
    from hf_sphere.search.index_files import ABOUT_FILE, read_index

    if (Path(name) / ABOUT_FILE).is_file():
        if args.compare_with is None and (args.column or args.id_column or args.columns):
            hint = "leave out --column, --id_column and --columns"
            raise ValueError(f"{name} is an index, which has its vectors, ids and columns; {hint}.")
        _, images, space = read_index(search.EmbeddingSpace, name)
        cells = images.get("columns")
        if args.group_column is not None:  # also of an index that was built without groups
            rows = cells or []
            known = {"label": images.get("label")} | {key: [row[key] for row in rows] for key in (*rows, {})[0]}
            if (groups := known.get(args.group_column)) is None:
                have = ", ".join(key for key, column in known.items() if column) or "no columns"
                raise ValueError(f"{name} has {have}, not {args.group_column!r}; leave out --group_column.")
            space = search.EmbeddingSpace.fit(space.vectors, groups, ids=space.ids)
        return lambda: space, space.report, space.ids, cells
    source = search.ImageSource.of(name, column=args.column, content="vector")
    source = source.with_columns(args.id_column, args.columns or ())
    given: Any = {"vectors": source.encoded, "ids": source.ids}
    given["groups"] = args.group_column and source.read_groups(args.group_column)
    fit, report = partial(search.EmbeddingSpace.fit, **given), partial(search.report_vectors, **given)
    return fit, report, source.ids, source.cells
