"""Evaluation of a model with other values in some of its tensors, which are restored afterwards."""

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_sphere.utils.modules import eval_mode


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model (not copies) by all their names in its state dict."""
    return {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


@contextlib.contextmanager
def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put a model into eval mode with other values in some tensors, and restore modes, values and buffers at the end.

    The values are given by the names of their tensors in the state dict. Every buffer is restored, since the forward
    pass of a model may change it.
    """
    state = named_tensors(model)
    tensors = [*(state[name] for name in values), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with eval_mode(model):
            with torch.no_grad():
                for name, value in values.items():
                    state[name].copy_(value)
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


@contextlib.contextmanager
def observed_batch_norms(model: nn.Module, layers: Collection[str]) -> Iterator[dict[str, list[str]]]:
    """Find the batch norms that follow layers, given by their paths, directly while the model is used.

    Yields by layer, filled meanwhile, the paths of the batch norms that received the tensor object that the layer
    returned, unless another module, such as an in-place activation, received it first. Compiled parts run eagerly.
    """
    norms_by_layer: dict[str, list[str]] = {path: [] for path in layers}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def received(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for layer in [layer for layer, output in outputs.items() if any(output() is tensor for tensor in tensors)]:
            if not isinstance(module, _BatchNorm):
                del outputs[layer]
            elif path not in norms_by_layer[layer]:
                norms_by_layer[layer].append(path)

    def returned(layer: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        outputs[layer] = weakref.ref(output)

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for path, module in model.named_modules():
            if path in norms_by_layer:
                hooks.callback(module.register_forward_hook(partial(returned, path)).remove)
            if not isinstance(module, nn.Identity) and not list(module.children()):
                hook = partial(received, path)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield norms_by_layer
