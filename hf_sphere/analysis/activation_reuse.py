"""What a model computes before a layer that changes, computed once and used for all its changes."""

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.analysis.cuts import CutFinder, Entry, recorded, replayed
from hf_sphere.analysis.swapping import Forward, compiled_modules, left_as_it_was, patched_forwards
from hf_sphere.analysis.tensor_trees import close, taken_apart, tensors

INPUT_TOLERANCE = 1e-4
"""Up to this part of the largest projection in a batch its projections may differ: the order of sums, no more."""

LARGEST_INPUT = 1e6
"""Numbers beyond it, as masks hold them, count as this one in projections."""

Run = Callable[[int, Forward, tuple, dict], Any]
"""Makes a call of the model: its number in the evaluation, the forward method, arguments and keywords."""


class ActivationReuse:
    """Evaluates a model with a layer changed, without what comes before that layer where this is proved to be right.

    `baseline` evaluates the untouched model, finds the cuts and records their inputs; it brings `layers` into the order
    in which they are to be taken up. `enter` takes up a layer, the model still being untouched, and `evaluate` is for
    the changed model.

    Args:
        model: The model, in evaluation mode.
        evaluation: Runs a model over its batches, the same in the same order each time.
        layers: Paths of the layers that will be changed.
        changes: Names of the tensors that change with a layer, asked for once the model ran.
        max_cached_bytes: Room for recorded inputs. Cuts that do not fit are recorded by a later pass, which begins at
            the cut before; of a cut that does not even fit alone the first batches are recorded, the others run whole.
        enabled: Whether to reuse anything; otherwise each evaluation runs whole, and nothing is put into the model.

    Attributes:
        layers: The paths.
        cuts: Path of a layer to the module at which a pass may begin when the layer changes.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluation: Callable[[nn.Module], Any],
        layers: Collection[str],
        changes: Callable[[str], Collection[str]],
        max_cached_bytes: int,
        enabled: bool = True,
    ) -> None:
        self.layers = list(layers)
        self.cuts: dict[str, nn.Module] = {}
        self._model = model
        self._evaluation = evaluation
        self._changes = changes
        self._enabled = enabled and not compiled_modules(model)
        self._room = self._free = max_cached_bytes
        self._order: list[nn.Module] = []
        self._written: set[nn.Module] = set()  # cuts that need copies
        self._entries: dict[nn.Module, dict[int, Entry]] = {}  # by the number of the model's call; in order
        self._sizes: dict[nn.Module, dict[int, int]] = {}
        self._inputs: list[_Given] | None = None

    def baseline(self) -> Any:
        """Evaluate the untouched model, find the cuts and record their inputs, as many as there is room for."""
        if not self._enabled:
            return self._evaluation(self._model)

        def run(number: int, forward: Forward, args: tuple, kwargs: dict) -> Any:
            if number == 0:
                self._find_cuts(forward, args, kwargs)
            with recorded(self._model, self._order, partial(self._record, number)):
                return forward(*args, **kwargs)

        return self._evaluate(run)

    def enter(self, layer: str, num_evaluations: int) -> None:
        """Take up a layer: see to it that the input of its cut is there, and forget those before.

        Args:
            layer: Path of the layer.
            num_evaluations: How many are coming; a pass that only records must pay.
        """
        if layer not in self.cuts:
            return
        cut = self.cuts[layer]
        place = self._order.index(cut)
        needed = sum(self._sizes[cut].values())
        if cut not in self._entries and num_evaluations * min(self._room, needed) >= 2 * needed:
            source = self._latest(cut)
            self._entries.update({later: {} for later in self._order[place:]})

            def run(number: int, forward: Forward, args: tuple, kwargs: dict) -> Any:
                entry = self._take(source, number)  # makes room
                record = recorded(self._model, self._order[place:], partial(self._record, number))
                with self._begun(source, entry), record:
                    return forward(*args, **kwargs)

            self._evaluate(run)
        if cut in self._entries:
            for earlier in self._order[:place]:
                self._forget(earlier)

    def evaluate(self, layer: str) -> Any:
        """Evaluate the model, in which this layer is changed."""
        cut = self._latest(self.cuts.get(layer))
        if cut is None:
            return self._evaluation(self._model)

        def run(number: int, forward: Forward, args: tuple, kwargs: dict) -> Any:
            with self._begun(cut, self._entries[cut].get(number)):
                return forward(*args, **kwargs)

        return self._evaluate(run)

    def _find_cuts(self, forward: Forward, args: tuple, kwargs: dict) -> None:
        """Find the cuts of all layers, in the middle of the model's first call."""
        enabled = torch.is_grad_enabled()
        devices = {tensor.device for tensor in [*self._model.parameters(), *self._model.buffers()]}
        with (
            torch.inference_mode(False),  # inference tensors do not count writes
            torch.set_grad_enabled(enabled),
            torch.random.fork_rng([device for device in devices if device.type == "cuda"]),
            left_as_it_was(self._model),
        ):
            finder = CutFinder(self._model, forward, args, kwargs)
            for layer in self.layers:
                found = finder.find(layer, self._changes(layer))
                if found is not None:
                    self.cuts[layer], written = found
                    self._written |= {self.cuts[layer]} if written else set()
        # A pass that begins at a cut comes by those after it, also by a module inside it, but not by one around it.
        places = {module: place for place, module in enumerate(finder.order)}
        self.layers.sort(key=lambda layer: places[self.cuts[layer]] if layer in self.cuts else -1)
        self._order = list(dict.fromkeys(self.cuts[layer] for layer in self.layers if layer in self.cuts))
        self._entries = {cut: {} for cut in self._order}
        self._sizes = {cut: {} for cut in self._order}

    def _latest(self, cut: nn.Module | None) -> nn.Module | None:
        """Return the last cut up to this one whose inputs are there; it will do for all that change after it."""
        before = self._order[: self._order.index(cut) + 1] if cut is not None else []
        return next((module for module in reversed(before) if self._entries.get(module)), None)

    def _begun(self, cut: nn.Module | None, entry: Entry | None) -> contextlib.AbstractContextManager[None]:
        """Let a call of the model begin at a cut, or at the beginning if nothing was recorded."""
        if cut is None or entry is None:
            return contextlib.nullcontext()
        return replayed(cut, entry, cut in self._written)

    def _record(self, number: int, cut: nn.Module, entry: Entry) -> None:
        """Keep the input of a cut if there is room; the last cuts make room for it."""
        if not entry.is_transparent():
            return
        size = sum({id(tensor): tensor.nbytes for tensor in tensors(entry.given)}.values())
        self._sizes[cut][number] = size
        while cut in self._entries and size > self._free and (last := next(reversed(self._entries))) is not cut:
            self._forget(last)
        if cut in self._entries and size <= self._free:
            self._entries[cut][number] = entry.copied()
            self._free -= size

    def _take(self, cut: nn.Module | None, number: int) -> Entry | None:
        if cut is None or number not in self._entries[cut]:
            return None
        self._free += self._sizes[cut][number]
        return self._entries[cut].pop(number)

    def _forget(self, cut: nn.Module) -> None:
        for number in self._entries.pop(cut, {}):
            self._free += self._sizes[cut][number]

    def _evaluate(self, run: Run) -> Any:
        """Evaluate with other calls of the model, and check that it is given what it was given the first time.

        A call that is given something else than the first one, a keyword more for instance, may take another way than
        the one that the cuts were tried on; it runs whole.
        """
        seen: list[_Given] = []
        before = self._inputs

        def call(forward: Forward) -> Forward:
            def called(*args: Any, **kwargs: Any) -> Any:
                given = self._seen(args, kwargs)
                if given is None:
                    return forward(*args, **kwargs)
                number = len(seen)
                seen.append(given)
                if before is not None and (number >= len(before) or not given.has_form_of(before[number])):
                    raise ValueError(_other_inputs(number))
                if given.structure != seen[0].structure:
                    return forward(*args, **kwargs)
                return run(number, forward, args, kwargs)

            return called

        with patched_forwards({self._model: call}):
            result = self._evaluation(self._model)
        if before is None:
            self._inputs = seen
            return result
        # Only now is the device waited for.
        for number, (new, old) in enumerate(zip(seen, before, strict=False)):
            if not new.is_close_to(old):
                raise ValueError(_other_inputs(number))
        if len(seen) < len(before) and self._enabled:
            raise ValueError(_other_inputs(len(seen)))
        return result

    def _seen(self, args: tuple, kwargs: dict) -> "_Given | None":
        """Look at what the model is given; where that cannot be done, nothing is reused from now on."""
        if self._enabled:
            try:
                return _Given.of((args, kwargs))
            except Exception:  # an object with tensors inside, a sparse tensor; it may be another one the next time
                self._enabled = False
                self.cuts.clear()
                self._entries.clear()
        return None


@dataclass(frozen=True)
class _Given:
    """What a call of the model was given, as much of it as tells it from another.

    Attributes:
        structure: All but the tensors.
        shapes: Of the tensors.
        projections: Of the tensors.
    """

    structure: tuple
    shapes: list[torch.Size]
    projections: list[Tensor]

    @classmethod
    def of(cls, given: Any) -> "_Given":
        found, structure = taken_apart(given)
        projections = [projection for tensor in found for projection in _projections(tensor)]
        return cls(structure, [tensor.shape for tensor in found], projections)

    def has_form_of(self, other: "_Given") -> bool:
        return self.structure == other.structure and self.shapes == other.shapes

    def is_close_to(self, other: "_Given") -> bool:
        pairs = zip(self.projections, other.projections, strict=True)
        return all(close(new, old, INPUT_TOLERANCE) for new, old in pairs)


def _projections(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Project the examples of a batch.

    Returns:
        Of the first example, (1,), and of what each differs from the first by, (B,): what is large in all of them alike
        does not hide that they changed places.

    Raises:
        TypeError: If it has no rows that can be projected.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} is not compared.")
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    values = values.float().nan_to_num(0.0).clamp(-LARGEST_INPUT, LARGEST_INPUT)
    rows = values.reshape(1, 1) if not values.ndim else values.reshape(len(values), math.prod(values.shape[1:]))
    direction = _direction(rows.shape[1]).to(rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        return rows[:1] @ direction, (rows - rows[:1]) @ direction


@lru_cache(maxsize=8)
def _direction(length: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.randn(length, generator=torch.Generator().manual_seed(0))


def _other_inputs(number: int) -> str:
    return (
        f"evaluate did not give the model the same as the first time (from its call {number + 1} on), so that what was "
        "computed then cannot be reused. Give the same batches in the same order each time, without shuffling and "
        "random augmentation, or pass reuse_activations=False."
    )
