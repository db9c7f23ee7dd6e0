"""Report what is wrong with vectors, and which remedies help.

hf-sphere report vectors.parquet --column embedding --group_column article --figure report.png
hf-sphere report outputs/index --json report.json
hf-sphere report outputs/index --compare_with new.parquet
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_sphere import search, visualization
from hf_sphere.search.rows import unit_vectors
from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
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
    (args,) = parse_arguments((ReportArguments,), named_first("source", argv), "Report what is wrong with vectors.")
    for output in (args.figure, args.json):
        if output is not None:
            check_writable(output, is_folder=False)
    if args.figure is not None:
        visualization.check_matplotlib()
    other = None if args.compare_with is None else read_space(args.compare_with, args)
    if (Path(args.source) / "index.json").is_file():
        if args.compare_with is None and (args.column is not None or args.group_column is not None):
            raise ValueError(f"{args.source} is an index, which has its groups; leave out --column and --group_column.")
        report = search.EmbeddingSpace.load(args.source).report()
    else:
        source = search.ImageSource.of(args.source, column=args.column, content="vector")
        groups = None if args.group_column is None else source.read_groups(args.group_column)
        report = search.report_vectors(source.encoded, groups)
    print(report)
    if other is not None:
        print(f"compared with {args.compare_with}: {read_space(args.source, args).compare(other)}")
    if args.json is not None:
        write_json(args.json, report.to_dict())
    if args.figure is not None:
        visualization.plot_report(report, title=args.source, path=args.figure)


def read_space(name: str, args: ReportArguments) -> "search.EmbeddingSpace":
    """Read the vectors and groups of an index, a file or a dataset."""
    if (Path(name) / "index.json").is_file():
        return search.EmbeddingSpace.load(name)
    source = search.ImageSource.of(name, column=args.column, content="vector")
    groups = None if args.group_column is None else source.read_groups(args.group_column)
    return search.EmbeddingSpace(unit_vectors(f"vectors of {name}", source.encoded), groups)
