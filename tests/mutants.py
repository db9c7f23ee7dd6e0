"""Change lines of logic of `hf_sphere` one at a time, run the tests that reach them, and print what no test noticed.

python tests/mutants.py --number 100 --seed 0

It is faster with the lines that each test reaches, from `pytest -n auto --cov=hf_sphere --cov-context=test` with
pytest-cov, and `--coverage .coverage`: then only these tests run.

Lines and changes are drawn at random, and made in a temporary copy of the repository. Imports, messages and type hints
are left alone. Tests that name what the file defines run first, then those of its package, of others that name it, and
of trainings if trainings use it. A survivor is a missing test, or a change that changes no result, which only a reader
can tell. A later call adds to the same results.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

import pytest
import transformers  # noqa: F401  (before the tests are forked, which then need not import it)
from mutations import mutants

ROOT = Path(__file__).parents[1]
TESTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
NOTICED = "noticed"
LEFT_OUT = {"benchmarks", "browser", "devices", "docs", "peers"}
OF_TRAININGS = {"commands", "data", "training"}


def stages(file: Path) -> Iterator[list[str]]:
    """Yield the test files that reach a file, the nearest first: those that name what few others name."""
    package, tree = file.relative_to(ROOT).parts[1], ast.parse(file.read_text(encoding="utf-8"))
    words = {re.escape(node.name) for node in tree.body if getattr(node, "name", "_")[0] != "_"}
    nearness: Counter[Path] = Counter()
    for word in {*words, rf"{file.parent.name}\.{file.stem}"}:
        named = [path for path, text in TESTS.items() if re.search(rf"\b{word}\b", text)]
        nearness.update({path: 1 / len(named) for path in named})
    nearness.update({path: 1 for path in TESTS if path.stem.startswith(f"test_{file.stem}")})
    own = {path for path in TESTS if path.parent.name == package}
    others = {path for path in nearness.keys() - own if path.parent.name not in LEFT_OUT}
    runs = {path for path in TESTS if path.parent.name in ("training", "recipes") and package in OF_TRAININGS}
    for stage in (own & nearness.keys(), own - nearness.keys(), others, runs - own - others):
        if stage:
            yield [str(path.relative_to(ROOT)) for path in sorted(stage, key=lambda path: (-nearness[path], path))]


def reaching(data: Any, file: Path, line: int) -> list[str]:
    """Return the cases that reach a line, those of its package first, then those of files that few others reach."""
    contexts = data.contexts_by_lineno(str(file)) if data else {}
    first = next((number for number in range(line, line - 8, -1) if number in contexts), 0)  # of the statement
    cases = {context.partition("|")[0] for context in contexts.get(first, []) if context}
    package = f"tests/{file.relative_to(ROOT).parts[1]}/"
    files = Counter(case.partition("::")[0] for case in cases)
    rounds: Counter[str] = Counter()  # one case of each file, then a second one
    order: dict[str, tuple[bool, int, int, str]] = {}
    for case in sorted(cases):
        name = case.partition("::")[0]
        order[case] = (not case.startswith(package), rounds[name], files[name], case)
        rounds[name] += 1
    return sorted(cases, key=lambda case: order[case])


def run_tests(home: Path, *args: str, seconds: float) -> tuple[int, list[str]]:
    """Run pytest in the copy; return its exit code, negative if it took too long, and the tests that failed."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.alarm(max(1, round(seconds)))
        os.chdir(home / "tree")
        os.dup2(os.open(home / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.environ["PYTHONPATH"] = sys.path[0] = str(home / "tree")
        options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", f"--basetemp={home / 'files'}"]
        os._exit(pytest.main([*options, *args]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):  # what the tests started
        os.killpg(pid, signal.SIGKILL)
    printed = (home / "output").read_text(encoding="utf-8", errors="replace")
    return code, re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", printed, re.MULTILINE)


def judge(home: Path, file: Path, text: str, cases: list[str], args: argparse.Namespace) -> str:
    """Return which test notices the text of a file, or that none does; `cases` reach what is changed."""
    copied, end = home / "tree" / file.relative_to(ROOT), time.monotonic() + args.limit
    copied.write_text(text, encoding="utf-8")
    verdict, failed = "survived", []
    for stage in [*([cases] if cases else []), *stages(file)]:  # what processes of a test reach is not in the coverage
        given = ["--all-cases"] if stage is cases else args.cases
        code, failed = run_tests(home, "-x", *given, *stage, seconds=end - time.monotonic())
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            verdict = "out of time" if code == -signal.SIGALRM else f"{NOTICED}: {' '.join(failed)}"
            break
    shutil.copy(file, copied)
    # A file that could not be imported is imported again, a test is run again, with time for a slow start.
    again = "--all-cases" if all("::" in name for name in failed) else "--collect-only"
    if failed and run_tests(home, again, *failed, seconds=3 * args.limit)[0]:
        return f"failed without a change, too: {failed[0]}"
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="number of lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="hf_sphere", help="folder")
    parser.add_argument("--all-cases", dest="cases", action="store_const", const=["--all-cases"], default=[])
    parser.add_argument("--coverage", type=Path, help="file with the lines that each case reaches")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a line")
    parser.add_argument("--results", type=Path, default="mutants.jsonl", help="file that results are added to")
    args = parser.parse_args()
    lines: dict[str, list[tuple[Path, str, str, str]]] = {}
    for file in sorted((ROOT / args.under).rglob("*.py")):
        for line, *change in mutants(file):
            lines.setdefault(f"{file.relative_to(ROOT)}:{line}", []).append((file, *change))
    places = random.Random(args.seed).sample(list(lines), len(lines))[: args.number]
    args.results.touch()
    rows = [json.loads(line) for line in args.results.read_text(encoding="utf-8").splitlines()]
    known = {(row["place"], row["after"]): row["verdict"] for row in rows}
    verdicts: Counter[str] = Counter()
    data = None
    if args.coverage:
        from coverage import CoverageData

        data = CoverageData(str(args.coverage))
        data.read()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shutil.copytree(ROOT, home / "tree", ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        (home / "shared").symlink_to(ROOT.parent / "shared")
        for place in places:
            file, before, after, text = random.Random(f"{args.seed} {place}").choice(lines[place])
            verdict = known.get((place, after))
            if verdict is None:
                verdict = judge(home, file, text, reaching(data, file, int(place.rpartition(":")[2])), args)
                row = {"place": place, "before": before, "after": after, "verdict": verdict}
                with args.results.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
            kind, _, _ = verdict.partition(": ")
            verdicts[kind] += 1
            if kind != NOTICED:
                print(f"{place}: {verdict}\n  - {before}\n  + {after}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in verdicts.items()))


if __name__ == "__main__":
    main()
