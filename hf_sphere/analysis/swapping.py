"""Tensors and forward methods of a model, put in the place of others for a while and always taken out again."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_sphere.analysis.tensor_trees import copied

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
    others: dict[int, Tensor] = {}
    for name, value in values.items():
        is_parameter = isinstance(named[name], nn.Parameter)
        others[id(named[name])] = nn.Parameter(value.detach(), False) if is_parameter else value.detach()
    taken: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                for key, tensor in place.items():
                    if tensor is not None and id(tensor) in others:
                        taken.append((place, key, tensor))
                        place[key] = others[id(tensor)]
        yield
    finally:
        for place, key, tensor in taken:
            place[key] = tensor


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Keep what a model computes from changing it, such as running statistics, counters and features that it keeps.

    The model works with copies of its buffers and of the tensors among its attributes; what was tied stays tied. At the
    end all buffers and attributes of its modules are the objects that they were, also after an exception.

    Args:
        model: Any module.
    """
    before = [(place, dict(place)) for module in model.modules() for place in (module._buffers, vars(module))]
    own = [
        {key: value for key, value in kept.items() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)}
        for _, kept in before
    ]
    try:
        for (place, _), copies in zip(before, copied(own), strict=True):
            place.update(copies)
        yield
    finally:
        for place, kept in before:
            place.update(kept)
            for key in place.keys() - kept.keys():
                del place[key]


@contextlib.contextmanager
def patched_forwards(replacements: Mapping[nn.Module, Patch]) -> Iterator[None]:
    """Let modules compute something else; hooks of theirs stay as they are.

    Args:
        replacements: Modules, and what makes the new forward method out of the one that there is.
    """
    before = {module: module.__dict__.get("forward") for module in replacements}
    try:
        for module, replace in replacements.items():
            module.__dict__["forward"] = _PutIn(module, before[module], replace(module.forward))
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:  # accelerate, for one, sets it on instances too
                module.__dict__["forward"] = forward


class _PutIn:
    """A forward method in the place of another, which torch.compile goes on to see.

    A deep copy of the module gets the other one too, bound to the copy: what is put in belongs to the model.
    """

    def __init__(self, module: nn.Module, own: Forward | None, replacement: Forward) -> None:
        self._module = module
        self._own = own  # the method that was set on the instance
        self._replacement = replacement
        self.__wrapped__ = module.forward  # inspect.signature asks for it by this name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        twin = memo[id(self._module)]
        return MethodType(type(twin).forward, twin)


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return what torch.compile made in a model; forward methods that are put in do not run in there."""
    return [
        module
        for module in model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    ]


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
        Path of each layer that ran to those of the batch norms whose input was the very tensor that the layer gave, and
        that no other module took before, such as an activation that writes into it; filled as the model runs.
    """
    found: dict[str, list[str]] = {}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def givers(given: Sequence[Any]) -> list[str]:
        values = [value for value in given if isinstance(value, Tensor)]
        return [name for name, output in outputs.items() if any(output() is value for value in values)]

    def take(forward: Forward) -> Forward:
        def observed(*args: Any, **kwargs: Any) -> Any:
            for name in givers([*args, *kwargs.values()]):
                del outputs[name]
            return forward(*args, **kwargs)

        return observed

    def leave(name: str, forward: Forward) -> Forward:
        def observed(*args: Any, **kwargs: Any) -> Any:
            output = take(forward)(*args, **kwargs)
            found.setdefault(name, [])
            if isinstance(output, Tensor):
                outputs[name] = weakref.ref(output)
            return output

        return observed

    def enter(norm: str, forward: Forward) -> Forward:
        def observed(*args: Any, **kwargs: Any) -> Any:
            for name in givers([*args, *kwargs.values()][:1]):
                if norm not in found[name]:
                    found[name].append(norm)
            return forward(*args, **kwargs)

        return observed

    patches: dict[nn.Module, Patch] = {}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            patches[module] = partial(enter, name)
        elif not (list(module.children()) or isinstance(module, nn.Identity)):
            patches[module] = take
    patches |= {module: partial(leave, name) for name, module in layers.items()}
    with patched_forwards(patches):
        yield found
