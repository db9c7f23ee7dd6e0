"""The claims of SECURITY.md on what is never executed."""

import ast
import builtins
import functools
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_sphere import SphereVisionConfig, SphereVisionModel
from hf_sphere.analogies import LanguageModel
from hf_sphere.analysis.model_sources import load_classifier
from hf_sphere.embeddings.extract import load_embedding_model
from hf_sphere.prototypes import embed_class_names
from hf_sphere.training.tasks.masked_lm import TextModelArguments, build_language_model, load_tokenizer
from hf_sphere.utils.arguments import Options

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("hf_sphere", "recipes", "analogy", "evaluate_modules")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TINY_BERT = ROOT / "tests" / "golden" / "analogy" / "tiny-bert"


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in the sources: where, the called name, and the call."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_no_source_evaluates_text_or_unpickles():
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "yaml.unsafe_load", "yaml.full_load"}
    found = [where for where, name, _ in calls() if name in forbidden or name.split(".")[0] in ("pickle", "joblib")]
    assert found == []


def test_torch_files_are_read_with_weights_only():
    found = [
        where for where, name, call in calls() if name == "torch.load" and "weights_only=True" not in ast.unparse(call)
    ]
    assert found == []


def test_yaml_is_read_with_a_safe_loader():
    found = [ast.unparse(call) for _, name, call in calls() if name.startswith("yaml.load")]
    assert found
    assert all(call.endswith("_YamlLoader)") for call in found)
    with pytest.raises(Exception, match="expected a mapping"):
        Options("{a: !!python/object/apply:os.getcwd []}")


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Path.touch, (self.path,)


def test_a_pickled_checkpoint_of_a_model_is_not_executed(tmp_path):
    config = SphereVisionConfig(backbone="linear_embedding", num_channels=1, image_size=6)
    config.save_pretrained(tmp_path)
    torch.save({"weight": Marker(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only|pickle"):
        SphereVisionModel.from_pretrained(tmp_path)
    assert not (tmp_path / "executed").exists()


# Models with custom code


@pytest.fixture
def with_code(tmp_path, monkeypatch) -> Path:
    """A model whose folder has Python code for all of its parts; the user would agree to run it."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_BERT, folder)
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n")
    names = ["AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForImageClassification"]
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "with_code", "auto_map": {name: "code.Anything" for name in names}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Anything", "auto_map": {"AutoTokenizer": ["code.Anything", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return folder


USES: dict[str, Callable[[str], Any]] = {
    "training": lambda name: build_language_model(TextModelArguments(model_name_or_path=name), None),
    "tokenizer": lambda name: load_tokenizer(TextModelArguments(model_name_or_path=name)),
    "analogies": LanguageModel.load,
    "embeddings": load_embedding_model,
    "projections": load_classifier,
    "prototypes": lambda name: embed_class_names(["a", "b"], name),
}


def test_custom_code_would_be_run_by_transformers_if_the_user_agreed(with_code, tmp_path):
    with pytest.raises(Exception, match="Anything"):
        AutoConfig.from_pretrained(with_code)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("use", USES)
def test_custom_code_of_a_model_is_not_run(use, with_code, tmp_path):
    with suppress(ValueError, OSError):
        USES[use](str(with_code))
    assert not (tmp_path / "executed").exists()


def test_every_automatic_class_is_told_not_to_run_custom_code():
    loads = [
        (where, ast.unparse(call)) for where, name, call in calls() if re.search(r"Auto\w*\.from_pretrained$", name)
    ]
    assert loads
    assert [where for where, call in loads if "trust_remote_code=False" not in call] == []
