"""The structure of the library: which package imports which, and which names moved."""

import ast
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "hf_sphere").rglob("*.py"))
}
PACKAGES = sorted({name.split(".")[1] for name in SOURCES if "." in name})


def imports(module: str) -> Iterator[str]:
    """Yield the modules of the library that one imports, also within functions and for annotations."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_sphere"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in SOURCES else str(node.module) for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)


def allowed() -> dict[str, set[str]]:
    """Return the allowed imports by package, as CONTRIBUTING.md states them."""
    rows = re.findall(r"^\| `hf_sphere/(\w+)(?:\.py)?` \|.*\| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return {name: set(text.split(", ")) - {"none of these"} for name, text in rows}


def test_contributing_lists_every_package():
    assert sorted(allowed()) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_contributing_says(package):
    modules = [name for name in SOURCES if name.split(".")[1:2] == [package]]
    found = {target.split(".")[1] for module in modules for target in imports(module) if "." in target}
    assert found - {package, "utils"} == allowed()[package]


def test_imports_of_packages_run_one_way():
    order: list[str] = []
    rest = allowed()
    while free := sorted(name for name, needs in rest.items() if needs <= set(order)):
        order += free
        rest = {name: needs for name, needs in rest.items() if name not in free}
    assert not rest


def test_modules_do_not_import_each_other_in_a_circle():
    rest = {module: set(imports(module)) - {module} for module in SOURCES}
    while free := {module for module, needs in rest.items() if not needs & set(rest)}:
        rest = {module: needs for module, needs in rest.items() if module not in free}
    assert not rest


def test_public_names_are_importable():
    names = [line.rpartition(".") for line in (ROOT / "tests" / "golden" / "public_names.txt").read_text().splitlines()]
    missing = [f"{module}.{name}" for module, _, name in names if not hasattr(importlib.import_module(module), name)]
    assert not missing


FOLDERS = ("hf_sphere", "docs", "tests", "benchmarks", "examples", "analogy", "recipes", "evaluate_modules")
PATH = re.compile(rf"(?<![\w./<>-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|md|yaml|ipynb|json)\b")


def test_paths_that_code_and_pages_name_exist():
    files = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.[pm][yd]"))]
    missing = []
    for file in files:
        bases = (ROOT, file.parent, ROOT / "tests", ROOT / "benchmarks")  # pages of the site are relative
        named = [] if file.name == "CHANGELOG.md" or ROOT / "tests" in file.parents else PATH.findall(file.read_text())
        missing += [
            f"{file.relative_to(ROOT)}: {path}" for path in named if not any((b / path).exists() for b in bases)
        ]
    assert missing == []


def test_a_name_of_a_class_occurs_once():
    trees = (ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES.values())
    names = sorted(node.name for nodes in trees for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, other in itertools.pairwise(names) if name == other] == []
