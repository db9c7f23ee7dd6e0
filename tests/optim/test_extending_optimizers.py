"""A new optimizer is one file in `hf_sphere/optim/optimizers`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_sphere.optim import AdamS, build_optimizer, optimizers
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names

TOY = '''
from hf_sphere.optim.optimizers.adam_s import AdamS


class ToyAdam(AdamS):
    """Adam-S by another name."""
'''

TOY_SGD = """
import torch
from hf_sphere.optim.groups import NamedOptimizer


class ToySGD(NamedOptimizer, torch.optim.SGD):
    group_key = "toy"
"""

USE = """
import json, sys
from hf_sphere.optim import optimizers
optimizers.__path__.append(sys.argv[1])
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
args = TrainingArguments(output_dir=sys.argv[1], optim="toy_adam", report_to=[])
print(json.dumps({
    "Trainer": args.optim.value in _OPTIMIZER_HANDLERS,
    "timm": type(create_optimizer_v2(model, "toyadam")).__name__,
    "timm's list": dict(list_optimizers(with_description=True))["toyadam"],
}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a toy optimizer, added to the package of optimizers."""
    (tmp_path / "toy_adam.py").write_text(TOY)
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("hf_sphere.optim.optimizers.toy_adam", None)


def test_a_new_file_registers_an_optimizer_by_name(folder):
    assert "toy_adam" in optimizer_names()
    kind = optimizer_class("toy_adam")
    assert (kind.__name__, issubclass(kind, AdamS)) == ("ToyAdam", True)


def test_options_of_a_parent_in_torch_can_be_fractions(folder):
    (folder / "toy_sgd.py").write_text(TOY_SGD)
    defaults = optimizer_class("toy_sgd").option_defaults()
    assert [type(defaults[name]) for name in ("momentum", "weight_decay")] == [float, float]


def test_the_optimizer_of_a_new_file_is_available_in_trainer_and_timm(folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE, str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert json.loads(printed) == {"Trainer": True, "timm": "ToyAdam", "timm's list": "Adam-S by another name."}


def test_a_list_of_parameters_or_modules_is_refused():
    with pytest.raises(TypeError, match="model must be one module, such as of a network and its loss; got a list"):
        build_optimizer([torch.nn.Linear(2, 2)], "adam_srt")


@pytest.mark.parametrize(("name", "close"), [("AdamSRT", "adam_srt"), ("adam-srt", "adam_srt"), ("Muon", "muon")])
def test_the_error_for_a_misspelled_name_suggests_the_close_one_and_lists_all(name, close):
    names = ", ".join(optimizer_names())
    with pytest.raises(ValueError, match=f"unknown optimizer '{name}'; .* {names}. Did you mean '{close}'"):
        build_optimizer(torch.nn.Linear(2, 2), name)
    with pytest.raises(ValueError, match=f"unknown optimizer '{name}'; the optimizers are: adam_g, adam_s, "):
        optimizer_class(name)


def test_a_file_without_an_optimizer_is_rejected(folder):
    (folder / "toy_adam.py").write_text("")
    with pytest.raises(ValueError, match=r"toy_adam\.py defines no subclass of NamedOptimizer"):
        optimizer_class("toy_adam")


def test_names_are_listed_without_importing_torch():
    code = "import sys; from hf_sphere.optim.optimizers import optimizer_names as names; "
    code += "print(len(names()), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["7", "False"]
