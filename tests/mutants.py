"""Change lines of logic of `hf_sphere` one at a time, run the tests that reach them, and print what no test noticed.

python tests/mutants.py --number 100 --seed 0

Lines and changes are drawn at random, and made in a temporary copy of the repository. Imports, messages and type hints
are left alone. Tests that name what the file defines run first, then those of its package, of others that name it, and
of trainings if trainings use it. A survivor is a missing test, or a change that changes no result, which only a reader
can tell.
"""

import argparse
import ast
import contextlib
import copy
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

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

import pytest
import transformers  # noqa: F401  (before the tests are forked, which then need not import it)

ROOT = Path(__file__).parents[1]
TESTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
LEFT_OUT = {"benchmarks", "browser", "devices", "docs", "peers"}
OF_TRAININGS = {"commands", "data", "training"}
SECONDS = 120
"""Time for the tests of a line."""

PAIRS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
PAIRS |= {ast.And: ast.Or, ast.Add: ast.Sub, ast.Mult: ast.Div}
SWAPS = PAIRS | {second: first for first, second in PAIRS.items()}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = {"warn", "warning", "warning_once", "info", "debug", "print", "argument", "add_argument", "cast", "TypeVar"}


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


def changed(node: ast.AST) -> ast.AST:
    """Return a copy of a node with one thing changed if there is something to change."""
    new = copy.copy(node)
    if isinstance(node, ast.Compare):
        new.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        new.op = SWAPS.get(type(node.op), type(node.op))()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        new.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Name):
        new.id = NAMES.get(node.id, node.id)
    elif isinstance(node, ast.Attribute):
        new.attr = NAMES.get(node.attr, node.attr)
    elif isinstance(node, ast.Return | ast.Expr) and node.value:
        new.value = ast.Constant(None)
    return new


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes of logic, each with what it is changed to."""
    call = getattr(node, "value", node) if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in MESSAGES:
            return
    elif isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Expr):
        return
    if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Raise):  # makes a message
        return
    if isinstance(node, ast.If | ast.IfExp):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.expr | ast.stmt) and ast.unparse(changed(node)) != ast.unparse(node):
        yield node, changed(node)
    for key, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and key not in ("annotation", "returns"):
                yield from changes(child)


def mutants(file: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield the line, what it was, what it becomes, and the text of the file, of each change of a file."""
    lines = [b"", *file.read_bytes().splitlines(keepends=True)]
    for node, new in changes(ast.parse(b"".join(lines))):
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        before, last = lines[node.lineno], lines[node.end_lineno]
        after = before[: node.col_offset] + text.encode() + last[node.end_col_offset :]
        whole = [*lines[: node.lineno], after, *lines[node.end_lineno + 1 :]]
        yield node.lineno, before.decode().strip(), after.decode().strip(), b"".join(whole).decode()


def judge(home: Path, file: Path, text: str) -> str:
    """Return whether a test notices the text of a file."""
    copied, end = home / "tree" / file.relative_to(ROOT), time.monotonic() + SECONDS
    copied.write_text(text, encoding="utf-8")
    verdict, failed = "survived", []
    for stage in stages(file):
        code, failed = run_tests(home, "-x", *stage, seconds=end - time.monotonic())
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            verdict = "out of time" if code == -signal.SIGALRM else "noticed"
            break
    shutil.copy(file, copied)
    # A file that could not be imported is imported again, a test is run again, with time for a slow start.
    again = "--all-cases" if all("::" in name for name in failed) else "--collect-only"
    if failed and run_tests(home, again, *failed, seconds=3 * SECONDS)[0]:
        return f"failed without a change, too: {failed[0]}"
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="number of lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="hf_sphere", help="folder")
    args = parser.parse_args()
    lines: dict[str, list[tuple[Path, str, str, str]]] = {}
    for file in sorted((ROOT / args.under).rglob("*.py")):
        for line, *change in mutants(file):
            lines.setdefault(f"{file.relative_to(ROOT)}:{line}", []).append((file, *change))
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shutil.copytree(ROOT, home / "tree", ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        (home / "shared").symlink_to(ROOT.parent / "shared")
        for place in random.Random(args.seed).sample(list(lines), len(lines))[: args.number]:
            file, before, after, text = random.Random(f"{args.seed} {place}").choice(lines[place])
            verdict = judge(home, file, text)
            verdicts[verdict.partition(": ")[0]] += 1
            if verdict != "noticed":
                print(f"{place}: {verdict}\n  - {before}\n  + {after}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in verdicts.items()))


if __name__ == "__main__":
    main()
