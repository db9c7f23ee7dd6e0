"""The modules of `evaluate` load from a server with the addresses of the Hub, as from their Spaces."""

import json
import os
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from doubles import QuietHandler, running
from fresh_python import run_fresh
from huggingface_hub import DatasetCardData

pytest.importorskip("evaluate")

ROOT = Path(__file__).parents[2]
SPACES = {"analogy": ROOT / "analogy"} | {path.name: path for path in (ROOT / "evaluate_modules").iterdir()}
PROGRAM = """
import json, evaluate
calibration, retrieval, analogy = (
    evaluate.load("tester/" + name) for name in ("calibration_error", "retrieval_scores", "analogy")
)
print(json.dumps([
    calibration.compute(confidences=[0.9, 0.9, 0.6, 0.6], correct=[True, True, True, False]),
    retrieval.compute(embeddings=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], labels=[0, 0, 1]),
    analogy.compute(predictions=[1, 0], references=[1, 2]),
]))
"""

TEMPLATE = """
import doctest, importlib, inspect, sys, evaluate
from evaluate import loading
module = importlib.import_module(loading.evaluation_module_factory(sys.argv[1]).module_path)
parameters = inspect.signature(loading.import_main_class(module.__name__)._compute).parameters.values()
assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters)
found = doctest.testmod(module)
assert found.attempted > 1 and not found.failed, found
"""


class Spaces(QuietHandler):
    """Serves the files of the revision `main` of the Spaces of one user."""

    def translate_path(self, path: str) -> str:
        match path.partition("?")[0].strip("/").split("/"):
            case ["spaces", "tester", name, "resolve", "main", file] if name in SPACES:
                return str(SPACES[name] / file)
        return str(ROOT / "none")

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{hash(self.path)}"')
        super().end_headers()


def test_modules_load_and_compute_from_a_server_as_from_the_hub(tmp_path):
    own = {"HF_HUB_OFFLINE": "0", "HF_EVALUATE_OFFLINE": "0", "NO_PROXY": "*", "HF_HOME": str(tmp_path)}
    own |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Spaces)) as address:
        options = {"cwd": tmp_path, "env": os.environ | own | {"HF_ENDPOINT": address}, "hugging_face": False}
        ended = run_fresh([sys.executable, "-c", PROGRAM], capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stderr
    calibration, retrieval, analogy = json.loads(ended.stdout.splitlines()[-1])
    assert calibration["calibration_error_equal_width_l1"] == pytest.approx(0.1)
    assert retrieval["recall_at_1"] == 1.0
    assert analogy["accuracy"] == 0.5


@pytest.mark.parametrize("name", SPACES)
def test_a_module_passes_the_template_test_of_evaluate(name, tmp_path):
    own = {"HF_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    command, folder = [sys.executable, "-c", TEMPLATE, name], SPACES[name].parent  # in which its name is its path
    options = {"cwd": folder, "env": os.environ | own, "hugging_face": False}
    ended = run_fresh(command, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", SPACES)
def test_a_folder_has_the_files_and_the_card_of_a_space(name):
    folder = SPACES[name]
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(front)
    assert card["sdk"] == "gradio"
    assert (folder / card["app_file"]).is_file()
    assert {"evaluate", "metric"} <= set(card["tags"])
    assert DatasetCardData(**card).license == "apache-2.0"
    assert "hf_sphere" in (folder / "requirements.txt").read_text().splitlines()
    assert (folder / f"{name}.py").is_file()
    for heading in ("Inputs", "Values", "Limitations", "Citation"):
        assert f"\n## {heading}\n" in text


@pytest.mark.parametrize(
    ("name", "given", "key"),
    [
        ("calibration_error", ("0.9, 1\n0.6, 0\n",), "calibration_error_equal_width_l1"),
        ("retrieval_scores", ("0, 1.0, 0.0\n0, 1.0, 0.1\n1, 0.0, 1.0\n", "cosine"), "recall_at_1"),
    ],
)
def test_pages_compute_and_report_a_table_that_cannot_be_read(name, given, key):
    gradio = pytest.importorskip("gradio")
    namespace: dict[str, Any] = {"__name__": name}
    exec((SPACES[name] / "app.py").read_text(), namespace)
    assert key in namespace["compute"](*given)
    assert namespace["build_page"]().title
    with pytest.raises(gradio.Error, match="expected lines"):
        namespace["compute"]("a, b", *given[1:])


def test_the_page_of_retrieval_scores_refuses_fractions_as_labels():
    gradio = pytest.importorskip("gradio")
    namespace: dict[str, Any] = {"__name__": "page"}
    exec((SPACES["retrieval_scores"] / "app.py").read_text(), namespace)
    with pytest.raises(gradio.Error, match="must be integers"):
        namespace["compute"]("0.2, 1.0, 0.0\n0.7, 1.0, 0.1\n1, 0.0, 1.0\n", "cosine")
