"""Report what is wrong with vectors, and which remedies help.

hf-sphere report vectors.parquet --column embedding --group_column article --figure report.png
hf-sphere report outputs/index --json report.json
hf-sphere report outputs/index --compare_with new.parquet
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search, visualization
from hf_sphere.utils.arguments import Arguments, argument, command_arguments, named_first
from hf_sphere.utils.files import check_writable, write_json


@dataclass
class ReportArguments(Arguments):
    """Vectors and output."""

    source: str = argument(help="File or dataset of vectors, or folder of an index. It can be the first argument.")
    column: str | None = argument(None, "Column of the vectors; one of the usual names if not set.")
    group_column: str | None = argument(None, "Column of the groups, or `label` for the class: rows that match.")
    compare_with: str | None = argument(None, "Another source of vectors, with the same columns: whether they differ.")
    figure: str | None = argument(None, "PNG file for a figure.")
    json: str | None = argument(None, "JSON file for the numbers.")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the vectors, print the report and write it."""
    (args,) = command_arguments((ReportArguments,), named_first("source", argv), __doc__)
    for output in (args.figure, args.json):
        if output is not None:
            check_writable(output, is_folder=False)
    if args.figure is not None:
        visualization.check_matplotlib()
    source, comparison = read_source(args.source, args), None
    if args.compare_with is not None:
        other = as_space(args.compare_with, read_source(args.compare_with, args))
        comparison = as_space(args.source, source).compare(other)
    elif isinstance(source, search.EmbeddingSpace) and (args.column is not None or args.group_column is not None):
        raise ValueError(f"{args.source} is an index, which has its groups; leave out --column and --group_column.")
    report = source.report() if isinstance(source, search.EmbeddingSpace) else search.report_vectors(*source)
    print(report)
    values = report.to_dict()
    if comparison is not None:
        print(f"compared with {args.compare_with}: {comparison}")
        cells = vars(comparison).items()
        values["comparison"] = {name: cell.tolist() if hasattr(cell, "tolist") else cell for name, cell in cells}
    if args.json is not None:
        write_json(args.json, values)
    if args.figure is not None:
        visualization.plot_report(report, title=args.source, path=args.figure)


def read_source(name: str, args: ReportArguments) -> Any:
    """Read the space of an index, or the vectors and groups of a file or a dataset."""
    from hf_sphere.search.index_files import ABOUT_FILE, CODES_FILE

    if any((Path(name) / file).is_file() for file in (ABOUT_FILE, CODES_FILE)):
        return search.EmbeddingSpace.load(name)
    source = search.ImageSource.of(name, column=args.column, content="vector")
    return source.encoded, None if args.group_column is None else source.read_groups(args.group_column)


def as_space(name: str, source: Any) -> "search.EmbeddingSpace":
    """Return the space, or make one of vectors and groups."""
    from hf_sphere.search.vectors import unit_vectors

    is_space = isinstance(source, search.EmbeddingSpace)
    return source if is_space else search.EmbeddingSpace(unit_vectors(f"vectors of {name}", source[0]), source[1])
