"""The prose of the documentation: no phrase of the list, and short sentences, cells and captions outside fold-outs."""

import re

import code_blocks
import pytest
from case_selection import each

FURTHER = ("CONTRIBUTING.md", "SECURITY.md", "recipes/**/*.md")
PAGES = [*code_blocks.pages(), *(page for name in FURTHER for page in code_blocks.ROOT.glob(name))]
AVOIDED = re.compile(
    r"\bof which\b|as they have it|\banew\b|\bcarr(y|ied) out\b|\btold apart\b|\bput back\b|\bfrom what\b|\bso many\b"
    r"|\bwish(es)?\b|\bdata sets?\b|\bstrange\b|\bforeign\b|\bhonest(ly)?\b|is not distinguished from",
    re.IGNORECASE,
)
TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
FOLDED = re.compile(r"<details.*?</details>|^\?\?\?.*\n(?:(?: {4}.*)?\n)*", re.DOTALL | re.MULTILINE)
LIST_IN_PROSE = re.compile(r"^(?! *(?:[-*]|\d+\.) ).*\w\n *\d+[.)] .*$", re.MULTILINE)
LEFT_OUT = re.compile(r"\A---\n.*?^---$|^( *)```.*?^\1```$|<style>.*?</style>|<!--.*?-->", re.DOTALL | re.MULTILINE)


def read(page, *patterns):
    """Return the text of a page without code, comments and what matches the patterns."""
    text = page.read_text("utf-8")
    for pattern in (*patterns, LEFT_OUT):
        text = pattern.sub("", text)
    return text


def words(text):
    """Return the words of a text; a link is its text, and code and formulas are one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|`[^`]*`|\$[^$]*\$", lambda found: found[1] or "x", text)
    return re.findall(r"[^\s|]*\w[^\s|]*", text)


def longer(texts, most):
    """Return the texts that have more words."""
    return [" ".join(text.split()) for text in texts if len(words(text)) > most]


@each("page")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(code_blocks.ROOT)))
def test_a_page_has_no_phrase_to_avoid_and_no_long_sentence_cell_or_caption(page):
    lines = read(page).splitlines()
    prose = "\n".join(line for line in lines if not line.lstrip().startswith("|"))
    assert [found[0] for found in AVOIDED.finditer(prose)] == []
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    assert longer((part for block in blocks for part in re.split(r"(?<=[.!?])[\"*)]*\s+", block)), 45) == []
    shown = read(page, FOLDED)
    rows = [line for line in shown.splitlines() if line.lstrip().startswith("|")]
    assert longer((cell for row in rows for cell in row.split("|")), 15) == []
    tables = [re.sub(r"^\|.*", "", table, flags=re.MULTILINE) for table in TABLE.findall(page.read_text("utf-8"))]
    captions = [part for table in tables for part in re.split(r"\n\n|\n(?=- )", FOLDED.sub("", table))]
    captions += [part for part in re.split(r"\n\s*\n", shown) if re.fullmatch(r"\s*\*[^*].*\*\s*", part, re.DOTALL)]
    assert longer(captions, 60) == []


@each("page")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(code_blocks.ROOT)))
def test_no_line_of_a_sentence_begins_with_a_number_that_makes_it_a_list(page):
    assert LIST_IN_PROSE.findall(read(page)) == []
