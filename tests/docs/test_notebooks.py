"""The notebooks are valid, without outputs, and use only public names; `make notebooks` runs them."""

import ast
import json

import pytest
from code_blocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_imports_public_names_only(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in code))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and statement.module.startswith("hf_sphere"):
            module = __import__(statement.module, fromlist=["_"])
            assert [name.name for name in statement.names if not hasattr(module, name.name)] == []


def test_there_are_five_notebooks():
    assert len(NOTEBOOKS) == 5
