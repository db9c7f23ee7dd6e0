import re
from itertools import takewhile

import pytest
from code_blocks import read_page

from hf_sphere.commands import JOBS

FOR_USERS = {"README.md": 110, "AGENTS.md": 120, "docs/llms.txt": 120}


def test_every_link_points_to_a_file(root):
    pages = [*root.glob("*.md"), *(root / "recipes").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_no_page_has_an_unfilled_placeholder(root):
    pages = [*root.glob("*.md"), *(root / "recipes").rglob("*.md"), *(root / "hub_cards").glob("*.md")]
    assert [page.name for page in pages if "@@" in page.read_text()] == []


def test_test_command_matches_continuous_integration(root):
    assert "make test" in (root / "README.md").read_text()
    assert "make test" in (root / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("name", FOR_USERS)
def test_a_first_page_is_short(root, name):
    assert len((root / name).read_text().splitlines()) <= FOR_USERS[name]


def test_the_first_python_block_of_the_readme_has_at_most_six_lines_and_an_output(root):
    blocks = list(takewhile(lambda block: block.language != "text", read_page(root / "README.md")[1]))
    assert (blocks[-1].language, sum(map(bool, blocks[-1].code.splitlines())) <= 6) == ("python", True)


@pytest.mark.parametrize("name", [*FOR_USERS, "docs/weights.md", "docs/index.md"])
def test_jobs_and_imports_in_the_text_exist(root, name):
    text = (root / name).read_text()
    assert set(re.findall(r"`hf-sphere ([a-z][\w-]*)", text)) - {*JOBS} == set()
    for statement in re.findall(r"`(from hf_sphere[\w.]* import [^`]*)`", text):
        exec(statement, {})


def test_llms_lists_every_page_of_the_site(root):
    pages = re.findall(r": (\S+\.md)$", (root / "mkdocs.yml").read_text(), re.M)
    listed = re.findall(r"^- \[.*\]\((\S+\.md)\): \S", (root / "docs" / "llms.txt").read_text(), re.M)
    assert sorted(listed) == sorted({*pages} - {"index.md", "changelog.md"})
    assert [page for page in listed if not (root / "docs" / page).exists()] == []
