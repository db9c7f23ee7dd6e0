import re
import subprocess
import sys


def test_the_python_example_runs_as_written(root, tmp_path):
    example = re.search(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL).group(1)
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"test accuracy (\d\.\d+)", result.stdout).group(1)) > 0.8
    assert (tmp_path / "digits-spherized" / "model.safetensors").is_file()


def test_the_optimiser_example_prints_what_its_comment_says(root):
    example = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)[1]
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == re.search(r"summary\(\)\)  # (.+)", example).group(1)


def test_every_link_leads_to_a_file(root):
    pages = [*root.glob("*.md"), *(root / "recipes").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_no_page_has_a_gap_that_was_to_be_filled(root):
    pages = [*root.glob("*.md"), *(root / "recipes").rglob("*.md"), *(root / "hub_cards").glob("*.md")]
    assert [page.name for page in pages if "@@" in page.read_text()] == []


def test_the_test_command_is_what_continuous_integration_runs(root):
    readme = re.search(r"```shell\n(.*?)```", (root / "README.md").read_text(), re.DOTALL).group(1)
    assert "make test" in readme
    assert "make test" in (root / ".ci" / "run").read_text().splitlines()


def test_the_prototype_example_prints_what_its_comment_says(root):
    example = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)[2]
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shown = [line.removeprefix("# ") for line in example.splitlines() if line.startswith("# ")]
    seconds = r", \d+\.\d\d s$"  # differ from run to run
    assert [re.sub(seconds, "", line) for line in result.stdout.splitlines()] == [
        re.sub(seconds, "", line) for line in shown
    ]


def test_the_distribution_example_prints_what_its_comments_say(root):
    example = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)[3]
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == re.findall(r"# (.+)", example)


def test_the_example_of_hyperplanes_says_in_words_whether_they_are_biased(root):
    examples = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    (example,) = (text for text in examples if "projection_statistics" in text)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "layer1.0.conv1" in result.stdout
    assert re.search(r"^(No bias|The arrangement)", result.stdout, re.MULTILINE)
