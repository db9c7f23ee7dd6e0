"""Write the tables of every README and `RESULTS.md` from the files of `results/runs` and `results/published`.

python benchmarks/report.py
python benchmarks/report.py --check

Tables are defined in `results/tables.yaml` and stand between `<!-- table: <name> -->` and `<!-- end of table -->`.
`--check` writes nothing and fails if a table is not what the files say.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from reproduction.entries import ROOT, read_queue
from reproduction.results import Results
from reproduction.tables import Source, Table, read_tables, render

from hf_sphere.utils.files import write_text

INTRODUCTION = """# Results

Written by `python benchmarks/report.py` from the files of `results/runs`, which `python benchmarks/reproduce.py`
measures, and those of `results/published`.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Render all files, and write or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the files with what would be written")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "results" / "runs", help="results files")
    args = parser.parse_args(argv)
    results = Results.read(args.results_dir)
    for problem in results.problems:
        print(f"Warning: {problem}", file=sys.stderr)
    try:
        entries = read_queue(ROOT / "benchmarks" / "queue.yaml")
        source = Source.read(results, entries)
        if stale := results.stale(entries):
            print(f"Warning: not reported, of other settings or of no entry: {', '.join(stale)}.", file=sys.stderr)
        files = render_files(read_tables(ROOT / "results" / "tables.yaml"), source)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    outdated = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    if args.check and outdated:
        names = ", ".join(str(path.relative_to(ROOT)) for path in outdated)
        sys.exit(f"{names}: the tables are not those of the results files; run python benchmarks/report.py.")
    for path in outdated:
        write_text(path, files[path])
        print(path.relative_to(ROOT))


def render_files(tables: list[Table], source: Source) -> dict[Path, str]:
    """Return the new text of every README with tables, and of `RESULTS.md`."""
    files: dict[Path, str] = {}
    parts = [INTRODUCTION]
    for table in tables:
        text = render(table, source)
        path = ROOT / table.readme
        files[path] = insert(files.get(path) or path.read_text("utf-8"), table.table, text, path)
        parts.append(f"## {table.title}\n\n{text}\n")
    files[ROOT / "RESULTS.md"] = "\n".join(parts)
    return files


def insert(page: str, name: str, text: str, path: Path) -> str:
    """Replace the table of this name in a page.

    Raises:
        ValueError: If the page does not have exactly one pair of markers for it.
    """
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end of table -->)", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{path} needs the markers `<!-- table: {name} -->` and `<!-- end of table -->` once.")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


if __name__ == "__main__":
    main()
