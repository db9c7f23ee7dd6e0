"""The code blocks of the documentation run, its links lead somewhere, and failures name page and block."""

import contextlib
import importlib
import re
from unittest import mock

import check_links
import check_numbers
import code_blocks
import hooks
import pytest
from case_selection import each

from hf_sphere.models.sphere_encoder import ENCODERS
from hf_sphere.nn import HEADS
from hf_sphere.optim.optimizers import OWN_OPTIMIZERS
from hf_sphere.prototypes import METHODS
from hf_sphere.training.tasks import OWN_TASKS

PAGES = {str(page.relative_to(code_blocks.ROOT)): page for page in code_blocks.pages()}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.filterwarnings("ignore")  # of the libraries that the pages use together
def test_code_blocks_of_a_page_run_and_print_what_it_shows(name):
    try:
        with contextlib.ExitStack() as stack:
            for parts in (HEADS, METHODS, OWN_OPTIMIZERS, OWN_TASKS):  # which a page may extend
                stack.enter_context(mock.patch.dict(parts))
            code_blocks.check_page(PAGES[name])
    except code_blocks.MissingModuleError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```python\nx = 1\nraise KeyError('x')\n```\n", r"page\.md, block 2 \(line 6\): KeyError: 'x'"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", r"page\.md, block 3 .*the page shows\n2\n"),
        (
            "```bash\npython recipes/train_few_shot.py --output_dir a --num_clases 3\n```\n",
            r"block 2 .*unknown argument '--num_clases'",
        ),
        ("```bash\nhf-sphere plaice --dim 3\n```\n", r"block 2 .*there is no job plaice"),
        ("```bash\npython recipes/missing.py\n```\n", r"block 2 .*there is no script recipes/missing\.py"),
        ("```bash\nmake coffee\n```\n", r"block 2 .*the Makefile has no such target"),
        ('```bash\npip install -e ".[plost]"\n```\n', r"block 2 .*unknown extras: plost"),
        ("```bash\nmake test\n```\n\n```text\n1 passed\n```\n", r"block 3 .*the front matter needs `not_run`"),
    ],
)
def test_a_block_that_fails_is_named_with_its_page(tmp_path, block, message):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nvalue = 2\n```\n\n{block}")
    with pytest.raises(code_blocks.BlockError, match=f"(?s){message}"):
        code_blocks.check_page(page)


def test_links_to_missing_files_and_anchors_and_loads_from_the_network_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a> <a href="b.html#not">2</a> <a href="c.html">3</a> <a href="https://x.org">4</a>'
        '<script src="https://cdn.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    count, broken = check_links.broken_links(tmp_path)
    assert count == 5
    assert broken == ["a.html: no anchor b.html#not", "a.html: no file c.html", "a.html: loads https://cdn.org/x.js"]


def test_every_page_is_in_the_navigation(root):
    listed = (root / "mkdocs.yml").read_text()
    pages = [name.removeprefix("docs/") for name in PAGES if re.match(r"docs/.*\.md$", name)]
    assert [name for name in pages if name not in listed] == []


WITH_STUBS = sorted(path.parent.name for path in (code_blocks.ROOT / "hf_sphere").glob("*/__init__.pyi"))


@pytest.mark.parametrize("package", WITH_STUBS)
def test_public_names_stand_in_a_page_or_a_command(root, package):
    patterns = ("*.md", "docs/**/*.md", "hf_sphere/commands/*.py", "examples/*.py")
    files = [path for pattern in patterns for path in root.glob(pattern)]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in files if path.stem != "CHANGELOG")))
    names = set(importlib.import_module(f"hf_sphere.{package}").__all__)
    encoders = tuple(f"Sphere{prefix}" for prefix in ENCODERS.values())  # a page names them by a pattern
    assert {name for name in names - words if not name.startswith(encoders)} == set()


@pytest.mark.parametrize("package", ["", *WITH_STUBS])
def test_every_public_name_has_an_entry_in_the_reference(package):
    pages = {name: hooks.api_page(name) for name in hooks.packages()}
    text = pages[package] if package else "\n".join(pages.values())
    module = importlib.import_module(f"hf_sphere.{package}".rstrip("."))
    names = {name for name in module.__all__ if not (name.startswith("_") or name in pages)}
    entries = set(re.findall(r"^::: .*?(\w+)$", text, re.M)) | set(
        re.findall(r"`(\w+)`", text.rpartition("Classes with")[2])
    )
    assert names - entries == set()


MEASURED = [name for name in PAGES if re.match("docs/(results|tasks)/", name) and name != "docs/results/rules.md"]


@each("name")
@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_numbers_in_the_text_of_a_page_are_in_a_table_or_a_file(name):
    assert list(check_numbers.unknown_numbers(PAGES[name])) == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("It has 12.35 %.", []),  # rounds to the number of the table
        ("It has 12.36 %, or 7.5 % more.", ["12.36", "7.5"]),
        ("It is 1.25 points above (0.52 to 1.98).", ["1.25", "0.52", "1.98"]),
        ("It is 2.5 points above. <!-- numbers: 2.5 -->", []),
        ("It takes 3.25 times as long, or 4.5 ms.", ["3.25", "4.5"]),
        ("It has 84.63 %. <!-- numbers: calibration -->", []),
        ("It has 84.64 %. <!-- numbers: calibration -->", ["84.64"]),
        ("It has 99.99 %. <!-- numbers: printed above -->", []),
        ("| a | 0.123 |", ["0.123"]),
        ("A rate of 0.123 and `99.99 %`.", []),
    ],
)
def test_numbers_that_are_in_no_table_and_no_file_are_found(tmp_path, monkeypatch, text, unknown):
    monkeypatch.setattr(check_numbers, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table: a -->\n\n| 12.345 |\n\n<!-- end of table -->\n\n{text}\n")
    assert [line.split()[1] for line in check_numbers.unknown_numbers(page)] == unknown
