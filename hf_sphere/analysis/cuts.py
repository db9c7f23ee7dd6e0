"""Modules at which a pass through a model may begin, because nothing that comes before goes past them.

A *cut* is a module whose first call in a pass is given the input that it had in a recorded one. The modules that had
finished by then do not run again, they return blanks: tensors of the right shape that hold nothing. Whether the output
stays the same is not concluded from the structure of the model but tried, with several things in the blanks. In a real
pass they hold NaN, so that who reads them all the same gets no number that looks like one.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hf_sphere.analysis.swapping import Forward, named_tensors, patched_forwards, swapped_tensors
from hf_sphere.analysis.tensor_trees import (
    close,
    copied,
    filled,
    first_examples,
    flipped,
    noise,
    other_values,
    tensors,
)

NUM_EXAMPLES = 2
"""On how many examples a cut is tried."""

FILLS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(partial(filled, value=value) for value in (torch.nan, 0.0, 1e4, -1e4)),
    noise,
)
"""What blanks hold in trials: NaN shows in sums, but not in comparisons, which large numbers and zeros decide."""


@dataclass(frozen=True)
class Entry:
    """How a module was entered in a pass.

    Attributes:
        finished: The outermost modules that had been called and had finished by then, in order, with their outputs, in
            which blanks stand for the tensors.
        given: Arguments and keywords.
    """

    finished: tuple[tuple[nn.Module, Any], ...]
    given: tuple[tuple, dict]

    def copied(self) -> "Entry":
        """Return an entry with tensors that nobody else writes into."""
        return replace(self, given=copied(self.given))

    def is_transparent(self) -> bool:
        """Tell whether all tensors in it can be seen; a cache that modules fill, for instance, hides some."""
        try:
            tensors([self.given, *[output for _, output in self.finished]])
        except TypeError:
            return False
        return True


class OtherWayError(RuntimeError):
    """A pass did not come by the modules that it came by when it was recorded."""

    def __init__(self) -> None:
        super().__init__(
            "the model took another way through its modules than in the pass whose activations were recorded, so that "
            "they cannot be reused; pass reuse_activations=False."
        )


@contextlib.contextmanager
def recorded(
    model: nn.Module, wanted: Collection[nn.Module], keep: Callable[[nn.Module, Entry], None]
) -> Iterator[None]:
    """Follow one pass.

    Args:
        model: The model.
        wanted: Modules of it.
        keep: Is called when one of them is entered for the first time; the entry holds the very tensors of the pass.
    """
    levels: list[list[tuple[nn.Module, Any]]] = [[]]  # what has finished in each of the modules that are running
    waiting = set(wanted)

    def follow(module: nn.Module, forward: Forward) -> Forward:
        def followed(*args: Any, **kwargs: Any) -> Any:
            if module in waiting:
                waiting.remove(module)
                keep(module, Entry(tuple(itertools.chain(*levels)), (args, kwargs)))
            levels.append([])
            output = forward(*args, **kwargs)
            levels.pop()
            levels[-1].append((module, tree_map_only(Tensor, partial(filled, value=torch.nan), output)))
            return output

        return followed

    followers = {module: partial(follow, module) for module in model.modules() if module is not model}
    with patched_forwards(followers if waiting else {}):
        yield


@contextlib.contextmanager
def replayed(cut: nn.Module, entry: Entry, copies: bool) -> Iterator[None]:
    """Let one pass begin at a cut.

    Args:
        cut: The module.
        entry: How it was entered when the pass was recorded.
        copies: Whether the model gets copies of the tensors, because it writes into them.

    Raises:
        OtherWayError: If the pass does not come by the same modules as the recorded one.
    """
    left = list(reversed(entry.finished))
    entered = False

    def skip(module: nn.Module, forward: Forward) -> Forward:
        def skipped(*args: Any, **kwargs: Any) -> Any:
            if not left:
                return forward(*args, **kwargs)
            expected, output = left.pop()
            if expected is not module:
                raise OtherWayError
            return copied(output) if copies else output

        return skipped

    def begin(forward: Forward) -> Forward:
        def begun(*args: Any, **kwargs: Any) -> Any:
            nonlocal entered
            if entered:
                return forward(*args, **kwargs)
            if left:
                raise OtherWayError
            entered = True
            args, kwargs = copied(entry.given) if copies else entry.given
            return forward(*args, **kwargs)

        return begun

    with patched_forwards({**{module: partial(skip, module) for module, _ in entry.finished}, cut: begin}):
        yield
    if not entered:
        raise OtherWayError


class CutFinder:
    """Tries cuts on the first few examples of a call of a model.

    Args:
        model: The model, in evaluation mode.
        forward: Its forward method.
        args: Arguments of the call.
        kwargs: Keywords of the call.

    Attributes:
        order: The modules in the order in which the model enters them.
    """

    def __init__(self, model: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> None:
        self._model = model
        self._forward = forward
        self._state = named_tensors(model)
        self._examples = first_examples(NUM_EXAMPLES, (args, kwargs))
        self._others = flipped(first_examples(NUM_EXAMPLES + 1, (args, kwargs)))
        try:
            self.order = list(self._record(list(model.modules())))
        except Exception:  # it takes no other number of examples; if that is not it, the call itself will fail too
            self._examples = copied((args, kwargs))
            self._others = flipped(self._examples)
            self.order = list(self._record(list(model.modules())))

    def find(self, layer: str, changes: Collection[str]) -> tuple[nn.Module, bool] | None:
        """Find the innermost cut for changes of a layer.

        Args:
            layer: Path of the layer.
            changes: Names of the tensors that change.

        Returns:
            The cut, and whether the model writes into tensors that come from before it; None if there is none.
        """
        parts = layer.split(".") if layer else []
        modules = [self._model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1)]
        values = {name: other_values(self._state[name]) for name in changes}
        try:
            entries = self._record(modules)
            with swapped_tensors(self._model, values):
                expected = copied(tensors(self._call(self._examples)))
            # What the model keeps in attributes, from before a cut to after it, must not be there from the last time.
            self._call(self._others)
        except Exception:  # a doubt costs speed only
            return None
        if not any(tensor.is_floating_point() for tensor in expected):  # whole numbers hide differences
            return None
        for module in modules:
            entry = entries.get(module)
            if entry is not None and entry.finished and entry.is_transparent():
                for copies in (False, True):
                    if all(self._agrees(module, entry, copies, values, expected, fill) for fill in FILLS):
                        return module, copies
        return None

    def _call(self, given: tuple[tuple, dict]) -> Any:
        args, kwargs = copied(given)
        return self._forward(*args, **kwargs)

    def _record(self, modules: Collection[nn.Module]) -> dict[nn.Module, Entry]:
        entries: dict[nn.Module, Entry] = {}
        with recorded(self._model, modules, lambda module, entry: entries.update({module: entry.copied()})):
            self._call(self._examples)
        return entries

    def _agrees(
        self,
        module: nn.Module,
        entry: Entry,
        copies: bool,
        values: Mapping[str, Tensor],
        expected: list[Tensor],
        fill: Callable[[Tensor], Tensor],
    ) -> bool:
        """Tell whether the output is right, whatever the blanks hold, and no tensor was written into but copies."""
        finished = tuple((skipped, tree_map_only(Tensor, fill, output)) for skipped, output in entry.finished)
        trial = Entry(finished, copied(entry.given))
        versions = [tensor._version for tensor in tensors(trial.given)]
        try:
            with swapped_tensors(self._model, values), replayed(module, trial, copies):
                output = tensors(self._call(self._examples))
        except Exception:  # blanks cannot be written into, nor used for whatever depends on their values
            return False
        return (
            versions == [tensor._version for tensor in tensors(trial.given)]
            and len(output) == len(expected)
            and all(close(new, old) for new, old in zip(output, expected, strict=True))
        )
