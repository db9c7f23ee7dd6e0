"""The notebooks are valid, with small outputs, and use only public names; `make notebooks` runs them."""

import ast
import json

import hooks
import pytest
from case_selection import each
from code_blocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@each("path")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_small_outputs_without_errors_and_imports_public_names_only(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert len(path.read_bytes()) < 300_000, "run `python notebooks/run.py --write`"
    assert "/home/" not in path.read_text()
    assert "/tmp/" not in path.read_text()
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in code))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and statement.module.startswith("hf_sphere"):
            module = __import__(statement.module, fromlist=["_"])
            assert [name.name for name in statement.names if not hasattr(module, name.name)] == []


def test_a_notebook_is_a_page_with_its_outputs():
    text, figures = hooks.notebook_page(NOTEBOOKS[0])
    assert text.startswith("# Digits in five minutes\n\n<div class")
    assert "```text\nsoftmax" in text
    assert [png[:4] for png in figures.values()] == [b"\x89PNG"] * text.count(".png)")
    assert figures
