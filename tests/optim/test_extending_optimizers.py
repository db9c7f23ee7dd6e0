"""A new optimizer is one file in `hf_sphere/optim/optimizers`, or a class with a name in another module."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh_python import run_fresh

from hf_sphere.optim import SGDMRT, AdamS, SphereOptimizer, optimizers
from hf_sphere.optim.optimizers import OWN_OPTIMIZERS
from hf_sphere.optim.optimizers.adam_s import adam_s

TOY = '''
from hf_sphere.optim.optimizers.adam_s import AdamS


class ToyAdam(AdamS):
    """Adam-S by another name."""
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a toy optimizer, added to the package of optimizers."""
    (tmp_path / "toy_adam.py").write_text(TOY)
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("hf_sphere.optim.optimizers.toy_adam", None)


def test_names_are_listed_without_importing_torch():
    code = "import sys; from hf_sphere.optim.optimizers import optimizer_names as names; "
    code += "print(len(names()), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["7", "False"]


# Classes of other modules, and new files

OWN = """
import json, sys
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from transformers import Trainer, TrainingArguments

def define(factor):
    from hf_sphere.optim import SGDMRT

    class Mine(SGDMRT):
        name = "my_sgd"

        def rule(self, x, g, m, v, t, group):
            return factor * x, m, v

    return Mine

define(1)  # after the libraries have been imported
again = define(2)  # as in a notebook
from hf_sphere.optim import build_optimizer
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
args = TrainingArguments(output_dir=sys.argv[1], optim="my_sgd", optim_args="momentum=0.5", report_to=[])
trainer = Trainer(model, args).create_optimizer()
kinds = [type(build_optimizer(model, "my_sgd")), type(create_optimizer_v2(model, "mysgd")), type(trainer)]
print(json.dumps([[kind is again for kind in kinds], trainer.param_groups[0]["momentum"]]))
if len(sys.argv) > 2:
    of_trainer = Trainer(model, TrainingArguments(sys.argv[1], optim="toy_adam", report_to=[])).create_optimizer()
    print(type(of_trainer).__name__, type(create_optimizer_v2(model, "toyadam")).__name__)
    print(dict(list_optimizers(with_description=True))["toyadam"])
"""
FIRST = "import sys\nfrom hf_sphere.optim import optimizers\noptimizers.__path__.append(sys.argv[2])\n"


@pytest.mark.parametrize("first", [FIRST, ""], ids=["hf_sphere", "the others"])
def test_named_classes_and_new_files_are_available_everywhere_whatever_is_imported_first(first, folder, tmp_path):
    command = [sys.executable, "-c", first + OWN, str(tmp_path / "run"), *([folder] if first else [])]
    options = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "hugging_face": not first}
    printed = run_fresh(command, capture_output=True, text=True, check=True, **options).stdout.splitlines()
    assert json.loads(printed[0]) == [[True, True, True], 0.5]
    assert printed[1:] == (["ToyAdam ToyAdam", "Adam-S by another name."] if first else [])


@pytest.mark.parametrize("name", ["adam", "adam_s"])
def test_a_name_of_torch_or_the_library_is_taken(name):
    with pytest.raises(ValueError, match=f"cannot define the optimizer '{name}': hf_sphere has this name"):
        type("Mine", (AdamS,), {"name": name})
    assert name not in OWN_OPTIMIZERS


class ByRule(AdamS):
    """Adam-S by its rule in plain torch."""

    def rule(self, x, g, m, v, t, group):
        return adam_s(x, g, m, v, t, group["lr"], betas=group["betas"], eps=group["eps"])


def train(kind: type[SphereOptimizer], **options: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 3, 3, generator=generator).requires_grad_()
    optimizer = kind([{"params": [x], "channel_dims": [0]}], lr=0.1, **options)
    for _ in range(4):
        x.grad = torch.randn(x.shape, generator=generator)
        optimizer.step()
    return x.detach()


def test_a_class_must_update_parameters_that_are_not_scale_invariant():
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    own = {"_step_of_torch": SphereOptimizer._step_of_torch, "form_groups": SphereOptimizer.form_groups}
    with pytest.raises(NotImplementedError):
        type("Without", (AdamS,), own)([weight]).step()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_an_overridden_rule_replaces_the_step_of_the_base(options):
    torch.testing.assert_close(train(ByRule, **options), train(AdamS, **options), rtol=1e-5, atol=1e-6)


def test_a_rule_leaves_weights_of_norm_0_and_must_return_tensors_of_their_shapes():
    x = torch.zeros(2, 3).requires_grad_()
    x.grad = torch.ones(2, 3)
    optimizer = ByRule([{"params": [x], "channel_dims": [0]}])
    optimizer.step()
    assert not x.any()

    class Wrong(SGDMRT):
        def rule(self, x, g, m, v, t, group):
            return x, m.norm(dim=1), v

    with pytest.raises(ValueError, match=r"rule of Wrong must return x, m and v of shapes .*\(6, 27\).*; got .*\(6,\)"):
        train(Wrong)
