"""Evaluation of a model with other values in some of its tensors, which are restored afterwards."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

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
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    tensors = [state[name] for name in values]
    tensors += [buffer for _, of_module in buffers for buffer in of_module.values() if buffer is not None]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with eval_mode(model):
            with torch.no_grad():
                for name, value in values.items():
                    state[name].copy_(value)
            yield
    finally:
        for of_module, original in buffers:
            of_module.clear()
            of_module.update(original)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether `torch.compile` was applied to a part of a model, whose hooks are not called as in eager mode."""
    return any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())


@contextlib.contextmanager
def observed_batch_norms(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[str]]]:
    """Find the batch norms that follow layers, given by their paths, directly while the model is used.

    Yields for the path of each layer that ran, filled meanwhile, the paths of the batch norms whose input was the
    tensor object that the layer returned, unless another module, such as an in-place activation, received it first.
    """
    norms_by_layer: dict[str, list[str]] = {}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def received(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for layer in [layer for layer, output in outputs.items() if any(output() is tensor for tensor in tensors)]:
            if not isinstance(module, _BatchNorm):
                del outputs[layer]
            elif path not in norms_by_layer[layer]:
                norms_by_layer[layer].append(path)

    def returned(layer: str, module: nn.Module, args: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            norms_by_layer.setdefault(layer, [])
            if isinstance(output, Tensor):
                outputs[layer] = weakref.ref(output)

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            is_leaf = not isinstance(module, nn.Identity) and not list(module.children())
            if is_leaf or isinstance(module, _BatchNorm) or path in layers:
                hook = partial(received, path)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if path in layers:
                hooks.callback(module.register_forward_hook(partial(returned, path)).remove)
        yield norms_by_layer
