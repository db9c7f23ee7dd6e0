"""Reuse of activations in `nn.Sequential` when one layer of a model changes at a time."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


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

        Args:
            changed: The parameters and buffers of the model that will be replaced.
            record: Record the inputs instead; no tensor may be replaced then.
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
