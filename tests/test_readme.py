import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def example(root: Path) -> Callable[[str], str]:
    """Return the Python block of the README after the marker `<!-- example: name -->`."""

    def find(name: str) -> str:
        pattern = rf"<!-- example: {name} -->\n```python\n(.*?)```"
        (block,) = re.findall(pattern, (root / "README.md").read_text(), re.DOTALL)
        return block

    return find


def run(code: str, folder: Path) -> str:
    """Run code as a script in a folder, with its own names, and return what it prints."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    return printed.getvalue().strip()


def test_training_example_reaches_a_good_accuracy_and_saves_its_model(example, tmp_path):
    output = run(example("train"), tmp_path)
    assert float(re.search(r"test accuracy (\d\.\d+)", output).group(1)) > 0.8
    assert (tmp_path / "digits-spherized" / "model.safetensors").is_file()


def test_optimizer_example_prints_its_comment(example, tmp_path):
    code = example("optimizers")
    assert run(code, tmp_path) == re.search(r"summary\(\)\)  # (.+)", code).group(1)


def test_prototype_example_prints_its_comments(example, tmp_path):
    code = example("prototypes")
    shown = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    seconds = r", \d+\.\d\d s$"  # varies between runs
    printed = run(code, tmp_path).splitlines()
    assert [re.sub(seconds, "", line) for line in printed] == [re.sub(seconds, "", line) for line in shown]


@pytest.mark.parametrize("name", ["distributions", "clustering", "geometry", "ood"])
def test_examples_print_their_comments(example, tmp_path, name):
    code = example(name)
    assert run(code, tmp_path).splitlines() == re.findall(r"# (.+)", code)


def test_projection_example_states_whether_the_arrangement_is_biased(example, tmp_path):
    output = run(example("projections"), tmp_path)
    assert "layer1.0.conv1" in output
    assert re.search(r"^(No significant bias|The arrangement is)", output, re.MULTILINE)


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
