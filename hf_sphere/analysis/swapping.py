"""Tensors and forward methods of a model, put in the place of others for a while and always taken out again."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Forward = Callable[..., Any]
Patch = Callable[[Forward], Forward]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, the objects themselves, by all their names in its state dict."""
    return {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


@contextlib.contextmanager
def swapped_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a model compute with other parameters and buffers.

    Nothing is written into the model's own tensors: they are taken out, and the same objects are put back at the end,
    also after an exception. A tied parameter is replaced everywhere.

    Args:
        model: Any module.
        values: Tensors by their names in the state dict, of the shape, dtype and device of those they stand for.
    """
    named = named_tensors(model)
    others = {id(named[name]): value for name, value in values.items()}
    taken: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                for key, tensor in place.items():
                    if tensor is not None and id(tensor) in others:
                        taken.append((place, key, tensor))
                        value = others[id(tensor)].detach()
                        place[key] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        yield
    finally:
        for place, key, tensor in taken:
            place[key] = tensor


@contextlib.contextmanager
def patched_forwards(replacements: Mapping[nn.Module, Patch]) -> Iterator[None]:
    """Let modules compute something else; hooks of theirs stay as they are.

    Args:
        replacements: Modules, and what makes the new forward method out of the one that there is.
    """
    before = {module: module.__dict__.get("forward") for module in replacements}
    try:
        for module, replace in replacements.items():
            module.__dict__["forward"] = _unless_compiling(module.forward, replace(module.forward))
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:  # accelerate, for one, sets it on instances too
                module.__dict__["forward"] = forward


def _unless_compiling(original: Forward, replacement: Forward) -> Forward:
    """Keep a replacement out of what torch.compile makes of a model."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return replacement(*args, **kwargs)

    return forward


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation, and each of its modules back into the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def observed_batch_norms(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[str]]]:
    """Find the batch norms that take the output of layers, while the model is used.

    Args:
        model: Any module.
        layers: Some of its modules by their paths.

    Yields:
        Path of each layer that ran to those of the batch norms whose input was the very tensor that the layer gave;
        filled as the model runs.
    """
    found: dict[str, list[str]] = {}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def leave(name: str, forward: Forward) -> Forward:
        def observed(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            found.setdefault(name, [])
            if isinstance(output, Tensor):
                outputs[name] = weakref.ref(output)
            return output

        return observed

    def enter(norm: str, forward: Forward) -> Forward:
        def observed(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            for name, output in outputs.items():
                if output() is not None and output() is given[0] and norm not in found[name]:
                    found[name].append(norm)
            return forward(*args, **kwargs)

        return observed

    patches: dict[nn.Module, Patch] = {module: partial(leave, name) for name, module in layers.items()}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            patches[module] = partial(enter, name)
    with patched_forwards(patches):
        yield found
