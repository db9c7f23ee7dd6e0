"""Evaluation of a model with some of its tensors replaced, without changing the model."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model (not copies) by all their names in its state dict."""
    return {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


class Evaluation(nn.Module):
    """Wraps an evaluation of a model as a forward pass, for `functional_call`."""

    def __init__(self, model: nn.Module, evaluate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.evaluate = evaluate

    def forward(self) -> Any:
        """Return the result of the evaluation."""
        return self.evaluate(self.model)


def evaluate_with(model: nn.Module, evaluate: Callable[[Any], Any], values: Mapping[str, Tensor]) -> Any:
    """Return `evaluate(model)` with other tensors in the model, of the same shape, dtype and device.

    The replacements are given by their names in the state dict. A tied tensor is replaced everywhere, whichever of its
    names is given.
    """
    state = named_tensors(model)
    new = {id(state[name]): value.detach() for name, value in values.items()}
    # Each once: with tie_weights=True, functional_call would not restore a module that has two names.
    replaced = {
        f"model.{path}.{key}" if path else f"model.{key}": new[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in new
    }
    return functional_call(Evaluation(model, evaluate), replaced, (), tie_weights=False)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode, and restore its modes, buffers and attributes at the end.

    The model works with copies of its buffers and of the tensors among its attributes, so a forward pass that updates
    statistics or stores features has no side effects. They are also restored after an exception.
    """
    scopes: list[dict[str, Any]] = [scope for module in model.modules() for scope in (module._buffers, vars(module))]
    before = [dict(scope) for scope in scopes]
    copies: dict[int, Tensor] = {}
    try:
        for scope in scopes:
            for key, value in scope.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    scope[key] = copies.setdefault(id(value), value.detach().clone())
        model.eval()
        yield
    finally:
        for scope, original in zip(scopes, before, strict=True):
            scope.clear()
            scope.update(original)


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules compiled by `torch.compile`, whose hooks are not called as in eager mode."""
    compiled = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod")]
    return {inner for outer in compiled for inner in outer.modules()}


@contextlib.contextmanager
def observed_batch_norms(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[str]]]:
    """Find the batch norms that follow layers, given by their paths, directly while the model is used.

    Yields for the path of each layer that ran, filled meanwhile, the paths of the batch norms whose input was the
    tensor object that the layer returned, unless another module, such as an in-place activation, received it first.
    """
    norms_by_layer: dict[str, list[str]] = {}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def received(norm: str | None, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for layer, output in list(outputs.items()):
            if any(output() is tensor for tensor in tensors):
                if norm is None:
                    del outputs[layer]
                elif norm not in norms_by_layer[layer]:
                    norms_by_layer[layer].append(norm)

    def returned(layer: str, module: nn.Module, args: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            norms_by_layer.setdefault(layer, [])
            if isinstance(output, Tensor):
                outputs[layer] = weakref.ref(output)

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            norm = path if isinstance(module, _BatchNorm) else None
            is_leaf = not isinstance(module, nn.Identity) and not list(module.children())
            if norm is not None or is_leaf or path in layers:
                hook = partial(received, norm)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if path in layers:
                hooks.callback(module.register_forward_hook(partial(returned, path)).remove)
        yield norms_by_layer
