import re


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
