"""Write `RESULTS.md` and the pages of results, all tables, the model cards and the comparisons of runs.

python benchmarks/report.py
python benchmarks/report.py --check

The results are in `results/runs`, `results/published` and `benchmarks/results`. Tables are defined in `tables.yaml`,
`claims.yaml` and `measured.yaml` of `results` and in `benchmarks/reproduction/benchmark_tables.py`, and stand between
`<!-- table: <name> -->` and `<!-- end of table -->`. `RESULTS.md` is an overview; `docs/results` has a page per system,
and `docs/results/appendix` all other tables. Model cards are in `hub_cards`, one per configuration with results; others
are removed. `--check` writes nothing and fails if a file is not what the results say, if a page breaks a rule of
`benchmarks/reproduction/rules.py`, or if a comparison breaks one without a reason in the queue; the reasons are listed.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from reproduction.benchmark_tables import render_benchmarks
from reproduction.cards import CARDS, find_weights, read_limits, read_papers, render_cards
from reproduction.claims import PAPERS, Claim, claim_rows, compare_all, render_claims, render_overview, render_page
from reproduction.comparisons import RULES
from reproduction.entries import ROOT, read_queue
from reproduction.results import Results
from reproduction.rules import check_pages, check_rules
from reproduction.summaries import Benchmarks, Measurement, render_front, render_gpu, render_measured, render_missed
from reproduction.tables import Source, Table, compare_rows, read_rows, render

from hf_sphere.utils.files import write_text

INTRODUCTION = """# Results

Written by `python benchmarks/report.py` from the files of `results/runs`, which `python benchmarks/reproduce.py`
measures, and those of `results/published` and `benchmarks/results`. "Not run" stands where there is no result.
"""
FOLDER = ROOT / "docs" / "results"
PAGES = {**PAPERS, "losses": "Margin and proxy losses", "rules": "How runs are compared"}
"""Titles of the pages in `docs/results`."""
APPENDIX = {
    **PAPERS,
    "few_shot": "Few-shot learning",
    "angular": "Angular operators",
    "language": "Language models",
    "visualization": "Two and three dimensions",
    "missed": "Goals that were missed",
    "gpu": "Runs that need a GPU",
}
"""Titles of the pages in `docs/results/appendix`, of which the last two are written as a whole."""

COMPARISONS = ROOT / "results" / "comparisons.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Render all files, and write or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the files with what would be written")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "results" / "runs", help="results files")
    args = parser.parse_args(argv)
    results, benchmarks = Results.read(args.results_dir), Benchmarks()
    try:
        source = Source.read(results, read_queue(ROOT / "benchmarks" / "queue.yaml"))
        files = render_files(source, benchmarks)
        stale = results.stale(source.entries)
        broken, exceptions = check_rules(*read_tables(), source)
        pages = check_pages(files)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    for problem in (*results.problems, *benchmarks.problems):
        print(f"Warning: {problem}", file=sys.stderr)
    if stale:
        print(f"Warning: not reported, of other settings or of no entry: {', '.join(stale)}.", file=sys.stderr)
    for message in broken:
        print(f"Rule of comparisons: {message}", file=sys.stderr)
    for message in pages:
        print(f"Rule of pages: {message}", file=sys.stderr)
    outdated = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    obsolete = [path for path in sorted(CARDS.glob("*/README.md")) if path not in files]
    if args.check and (outdated or obsolete):
        names = ", ".join(str(path.relative_to(ROOT)) for path in (*outdated, *obsolete))
        sys.exit(f"{names}: not what the results files say; run python benchmarks/report.py.")
    if args.check:
        print("\n".join(f"Known exception: {text}" for text in exceptions))
        if broken or pages:
            sys.exit("A comparison or a page breaks a rule, see above.")
    for path in outdated:
        path.parent.mkdir(exist_ok=True)
        write_text(path, files[path])
        print(path.relative_to(ROOT))
    for path in obsolete:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        print(f"{path.relative_to(ROOT)} removed: there are no results")


def read_tables() -> tuple[list[Table], list[Claim]]:
    """Read the definitions of the tables and the claims."""
    folder = ROOT / "results"
    return read_rows(folder / "tables.yaml", Table), read_rows(folder / "claims.yaml", Claim)


def render_files(source: Source, benchmarks: Benchmarks) -> dict[Path, str]:
    """Return the new texts of all files that this program writes."""
    folder = ROOT / "results"
    tables, claims = read_tables()
    rows, readme = read_rows(folder / "measured.yaml", Measurement), ROOT / "README.md"
    measured = render_measured(rows, source, benchmarks, tables)
    front = render_front(rows, source, benchmarks, tables)
    files = {readme: insert(readme.read_text("utf-8"), "front", front, readme)}
    texts = {table.table: render(table, source) for table in tables}
    for table in tables:
        text = texts[table.table]
        path = ROOT / table.page
        files[path] = insert(files.get(path) or path.read_text("utf-8"), table.table, text, path)
    claimed = claim_rows(claims, tables, source, benchmarks)
    for name in PAPERS:
        for page, shown in (("", render_page(claimed, name)), ("appendix/", render_claims(claimed, name))):
            path = FOLDER / f"{page}{page_name(name)}"
            files[path] = insert(files.get(path) or path.read_text("utf-8"), "claims", shown, path)
    files |= render_results(measured, render_overview(claimed), render_gpu(source))
    shorter = {table.table: render(table, source, only_measured=True) for table in tables}
    of_benchmarks = render_benchmarks(benchmarks) | {"missed": render_missed(benchmarks)}
    files |= fill_pages(texts, shorter, of_benchmarks, files)
    found = compare_all(claims, tables, source)
    found += [row for table in tables for row in compare_rows(table, source, post_hoc=True)]
    files[COMPARISONS] = json.dumps([comparison.record() for comparison in found], indent=1) + "\n"
    papers, limits = read_papers(folder / "papers.yaml"), read_limits(folder / "limits.yaml")
    return files | render_cards(source, papers, limits, find_weights())


def render_results(measured: str, claims: str, gpu: str) -> dict[Path, str]:
    """Return the overview, once for the repository and once for the documentation, and the pages that are generated.

    Args:
        measured: Table of the measurements.
        claims: Table of all claims.
        gpu: Table of the runs that need a GPU.
    """
    missed = "<!-- table: missed -->\n<!-- end of table -->"
    pages = {"rules": RULES, "appendix/missed": missed, "appendix/gpu": gpu}
    titles = {**APPENDIX, **PAGES}
    files = {
        FOLDER / f"{name}.md": as_page(f"# {titles[name.rpartition('/')[2]]}\n\n{text}\n")
        for name, text in pages.items()
    }
    links = [f"- [{title}](docs/results/{page_name(name)})" for name, title in PAGES.items()]
    further = [f"[{title}](docs/results/appendix/{page_name(name)})" for name, title in APPENDIX.items()]
    overview = "\n".join(
        [
            INTRODUCTION,
            f"## Pages\n\n{chr(10).join(links)}\n- Appendix, all tables: {', '.join(further)}\n",
            f"## In short\n\n{measured}\n",
            f"## Comparisons\n\n{claims}\n",
        ]
    ).replace("](rules.md", "](docs/results/rules.md")
    return {**files, ROOT / "RESULTS.md": overview, ROOT / "docs" / "results.md": as_page(overview)}


def page_name(system: str) -> str:
    """Return the file name of a page of results."""
    return f"{system.replace('_', '-')}.md"


def as_page(text: str) -> str:
    """Return a text of the root of the repository for the documentation, whose links can only be to its own pages."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\[[^\]]*\]\((?!results/[\w/-]+\.md|http)([^)]*)\)", r"`\1`", text)


def fill_pages(
    tables: Mapping[str, str], shorter: Mapping[str, str], benchmarks: Mapping[str, str], files: Mapping[Path, str]
) -> dict[Path, str]:
    """Return the pages of the documentation and the recipes with their tables.

    Args:
        tables: Tables of runs by name, for the pages of results.
        shorter: The same without the rows that have no result, for other pages.
        benchmarks: Tables of benchmarks by name.
        files: Texts of pages that are already changed.
    """
    pages = {}
    for folder in ("docs", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.md")):
            page = files.get(path) or path.read_text("utf-8")
            for name in re.findall("<!-- table: (.*) -->", page):
                if name == "claims":
                    continue
                if name not in tables and name not in benchmarks:
                    raise ValueError(f"{path}: there is no table {name!r} in results/tables.yaml or of a benchmark.")
                text = benchmarks.get(name) or (tables if FOLDER in path.parents else shorter)[name]
                pages[path] = page = insert(page, name, text, path)
    return pages


def insert(page: str, name: str, text: str, path: Path) -> str:
    """Replace the table of this name in a page.

    Raises:
        ValueError: If the page does not have exactly one pair of markers for it.
    """
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end of table -->)", re.DOTALL)
    text = text.replace("](rules.md", f"]({os.path.relpath(FOLDER / 'rules.md', path.parent)}")
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{path} needs the markers `<!-- table: {name} -->` and `<!-- end of table -->` once.")
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


if __name__ == "__main__":
    main()
