"""Evaluation of a model with some of its tensors replaced, without changing the model, and reuse of its activations."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model (not copies) by all their names in its state dict."""
    return {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


class _Evaluation(nn.Module):
    """Wraps an evaluation of a model as a forward pass, for `functional_call`."""

    def __init__(self, model: nn.Module, evaluate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.evaluate = evaluate

    def forward(self) -> Any:
        return self.evaluate(self.model)


def evaluate_with(model: nn.Module, evaluate: Callable[[Any], Any], values: Mapping[str, Tensor]) -> Any:
    """Return `evaluate(model)` with other tensors in the model, of the same shape, dtype and device.

    The replacements are given by their names in the state dict. A tied tensor is replaced everywhere, whichever of its
    names is given.
    """
    state = named_tensors(model)
    new = {id(state[name]): value.detach() for name, value in values.items()}
    # Each place once: with tie_weights=True, functional_call would not restore a module that has two names.
    replaced = {
        f"model.{path}.{key}" if path else f"model.{key}": new[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in new
    }
    return functional_call(_Evaluation(model, evaluate), replaced, (), tie_weights=False)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Switch a model to evaluation mode, and restore its modes, buffers and attributes at the end.

    The model works with copies of its buffers and of the tensors among its attributes, so a forward pass that updates
    statistics or stores features has no side effects. They are also restored after an exception.

    Yields:
        A function that returns whether a buffer or an attribute has changed since then, as in a stateful module.
    """
    places: list[dict[str, Any]] = [place for module in model.modules() for place in (module._buffers, vars(module))]
    before = [dict(place) for place in places]
    copies: dict[int, Tensor] = {}
    try:
        for place in places:
            for key, value in place.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    place[key] = copies.setdefault(id(value), value.detach().clone())
        model.eval()
        inside = [dict(place) for place in places]

        def changed() -> bool:
            return any(
                place.keys() - {"forward"} != start.keys() - {"forward"}  # set by ActivationReuse
                or any(place[key] is not value for key, value in start.items() if key != "forward")
                for place, start in zip(places, inside, strict=True)
            ) or any(
                not torch.equal(place[key], value)
                for place, start in zip(places, before, strict=True)
                for key, value in start.items()
                if id(value) in copies
            )

        yield changed
    finally:
        for place, kept in zip(places, before, strict=True):
            place.clear()
            place.update(kept)


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules compiled by `torch.compile`, whose hooks are not called as in eager mode."""
    compiled = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod")]
    return {inner for outer in compiled for inner in outer.modules()}


@contextlib.contextmanager
def observed_batch_norms(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[str]]]:
    """Find the batch norms that follow layers, given by their paths, directly while the model is used.

    Yields:
        For the path of each layer that ran, the paths of the batch norms whose input was the tensor object that the
        layer returned, unless another module received it first, such as an in-place activation. Filled while the model
        runs.
    """
    found: dict[str, list[str]] = {}
    outputs: dict[str, weakref.ref[Tensor]] = {}

    def received(norm: str | None, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for layer, output in list(outputs.items()):
            if any(output() is tensor for tensor in tensors):
                if norm is None:
                    del outputs[layer]
                elif norm not in found[layer]:
                    found[layer].append(norm)

    def returned(layer: str, module: nn.Module, args: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            found.setdefault(layer, [])
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
        yield found


@dataclass
class _Entry:
    """Result of one call of an `nn.Sequential`."""

    given: Tensor  # its input
    position: int  # number of modules applied to the input
    reached: Tensor  # their output


class ActivationReuse:
    """Makes each `nn.Sequential` of a model start at its first module with changed tensors.

    A recording pass stores the input of every call. If a later call has an equal input, the modules before the first
    changed one would repeat their output, so only the modules from there on run. This is exact by definition of
    `nn.Sequential`; the forward methods of all other modules are not modified. Calls with another input, or whose input
    exceeds the memory limit, run in full.

    This requires modules whose output depends only on their input and their tensors. Modules that sample random
    numbers, subclasses with another forward method, and modules with hooks are excluded. A model whose forward pass
    changes attributes or buffers must not be reused; see `evaluation_mode`.

    Args:
        model: Any module.
        max_cached_bytes: Memory for inputs and activations.
    """

    def __init__(self, model: nn.Module, max_cached_bytes: int) -> None:
        self._tensors = {
            sequential: [{id(tensor) for tensor in (*step.parameters(), *step.buffers())} for step in sequential]
            for sequential in model.modules()
            if _is_plain(sequential)
        }
        self._free = max_cached_bytes
        self._entries: dict[tuple[nn.Module, int], _Entry] = {}
        self._starts: dict[nn.Module, int] = {}
        self._calls: Counter[nn.Module] = Counter()
        self._recording = False

    def install(self, changed: Iterable[Tensor], *, record: bool = False) -> None:
        """Set the forward methods for one evaluation; `evaluation_mode` removes them.

        `changed` are the parameters and buffers of the model that will be replaced. With `record` the inputs are
        recorded instead; no tensor may be replaced then.
        """
        changed_ids = {id(tensor) for tensor in changed}
        self._recording = record
        self._calls.clear()
        for sequential, tensors in self._tensors.items():
            first = (position for position, ids in enumerate(tensors) if ids & changed_ids)
            self._starts[sequential] = next(first, len(tensors))
            vars(sequential)["forward"] = MethodType(self._forward, sequential)  # deep copies get a separate one

    def clear(self) -> None:
        """Delete all activations."""
        self._entries.clear()

    def _forward(self, sequential: nn.Sequential, given: Any) -> Any:
        is_tensor = isinstance(given, Tensor) and given.layout is torch.strided
        if torch.compiler.is_compiling() or sequential not in self._starts or not is_tensor:
            return nn.Sequential.forward(sequential, given)
        key = (sequential, self._calls[sequential])
        self._calls[sequential] += 1
        if self._recording:
            return self._record(key, given)
        entry = self._entries.get(key)
        if entry is None or entry.given.dtype != given.dtype or not torch.equal(entry.given, given):
            return nn.Sequential.forward(sequential, given)
        modules, start = list(sequential), self._starts[sequential]
        position, output = (entry.position, entry.reached) if entry.position <= start else (0, entry.given)
        output = output.clone()  # modules may write into their input
        for module in modules[position:start]:
            output = module(output)
        if start > entry.position and isinstance(output, Tensor):
            self._advance(entry, start, output)
        for module in modules[start:]:
            output = module(output)
        return output

    def _record(self, key: tuple[nn.Sequential, int], given: Tensor) -> Any:
        fits = given.nbytes <= self._free
        copy = given.detach().clone() if fits else given
        random_state = _random_state(given.device)
        output = nn.Sequential.forward(key[0], given)
        if fits and torch.equal(random_state, _random_state(given.device)):
            self._entries[key] = _Entry(copy, 0, copy)
            self._free -= copy.nbytes
        return output

    def _advance(self, entry: _Entry, position: int, reached: Tensor) -> None:
        """Replace the stored activation with one at a later position."""
        room = self._free + (entry.reached.nbytes if entry.position else 0)
        if reached.nbytes <= room:
            self._free = room - reached.nbytes
            entry.position, entry.reached = position, reached.detach().clone()


def _is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a module is a `nn.Sequential` with its original forward method and no hooks."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and not any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())
    )


def _random_state(device: torch.device) -> Tensor:
    states = [torch.random.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)
