"""Search for the hidden matrices of a model: the weights that Muon is meant for."""

from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_sphere.optim.groups import is_matrix
from hf_sphere.optim.invariance import fitting_example
from hf_sphere.optim.trial import call, exact, make_trial, quiet

HIDDEN = "hidden matrix"


def find_hidden_matrices(model: nn.Module, batch: Any = None) -> dict[str, str]:
    """Classify the weights of a model with two or more axes.

    Embeddings and the output layer, which is the last layer with such a weight in a forward pass, are not hidden
    matrices; nor are weights whose first two axes do not both exceed 1, such as those of depthwise convolutions.

    Args:
        model: Any module, before it is sharded.
        batch: Input of the model; generated if None. See `find_radial_weights`.

    Returns:
        Name of the weight to `HIDDEN`, or to the reason why it is not a hidden matrix.

    Raises:
        ValueError: If no input could be generated or the model cannot be copied.
    """
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    last = _last_layer(model, batch)
    found = {}
    for name, weight in model.named_parameters():
        if not is_matrix(name, weight):
            continue
        found[name] = HIDDEN
        if min(weight.shape[:2]) == 1:
            found[name] = "one of its first two axes is 1"
        if id(weight) in embedded:
            found[name] = "embedding"
        elif name.rpartition(".")[0] == last:
            found[name] = "output layer"
    return found


def _last_layer(model: nn.Module, batch: Any) -> str:
    """Return the name of the last module called in a forward pass that has a weight matrix of its own."""
    called: list[str] = []
    devices = {parameter.device for parameter in model.parameters()}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]), exact(devices), quiet():
        trial = make_trial(model)
        for name, module in trial.named_modules():
            if name and any(_is_weight(weight) for weight in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        batch = fitting_example(trial) if batch is None else batch
        called.clear()  # inputs that did not fit
        with torch.no_grad():
            call(trial, batch)
    return called[-1] if called else ""


def _is_weight(weight: Tensor) -> bool:
    return weight.ndim > 1 and min(weight.shape[:2]) > 1
