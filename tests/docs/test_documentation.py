"""The code blocks of the documentation run, its links lead somewhere, and failures name page and block."""

import contextlib
import importlib
import re
from unittest import mock

import check_links
import code_blocks
import pytest

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
            "```bash\npython recipes/place_prototypes.py --dim 3 --num_clases 3\n```\n",
            r"block 2 .*unknown argument '--num_clases'",
        ),
        ("```bash\nhf-sphere place --dim 3 --num_clases 3\n```\n", r"block 2 .*unknown argument '--num_clases'"),
        ("```bash\nhf-sphere plaice --dim 3\n```\n", r"block 2 .*there is no job plaice"),
        (
            "```bash\naccelerate launch -m hf_sphere.commands.train few-shot --output_dir a --seeds 1\n```\n",
            r"block 2 .*unknown argument '--seeds'",
        ),
        ("```bash\npython recipes/missing.py\n```\n", r"block 2 .*there is no script recipes/missing\.py"),
        ("```bash\nmake coffee\n```\n", r"block 2 .*the Makefile has no such target"),
        ('```bash\npip install -e ".[plost]"\n```\n', r"block 2 .*unknown extras: plost"),
        ("```bash\nrm -r outputs\n```\n", r"block 2 .*unknown kind of command"),
        ("```rust\n```\n", r"block 2 .*the language is 'rust'"),
        ("```bash\nmake test\n```\n\n```text\n1 passed\n```\n", r"block 3 .*the front matter needs `not_run`"),
    ],
)
def test_a_block_that_fails_is_named_with_its_page(tmp_path, block, message):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nvalue = 2\n```\n\n{block}")
    with pytest.raises(code_blocks.BlockError, match=f"(?s){message}"):
        code_blocks.check_page(page)


def test_a_failing_block_stops_the_build(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\n1 / 0\n```\n")
    monkeypatch.setattr("sys.argv", ["code_blocks.py", str(page)])
    with pytest.raises(SystemExit, match="1 of 1 pages"):
        code_blocks.main()
    assert "page.md, block 1 (line 2): ZeroDivisionError" in capsys.readouterr().err


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
