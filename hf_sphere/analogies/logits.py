"""Logits where they are read: a head costs as much as layers do, and of a masked sentence one token is asked for."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.analogies.language_model import LanguageModel

ReadLogits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From sequences (B, L) and the rows (M,) and positions (M,) of tokens in them to the tokens' logits (M, V)."""


@contextlib.contextmanager
def chosen_logits(language_model: LanguageModel) -> Iterator[ReadLogits]:
    """Yield a function that reads logits of chosen tokens.

    Heads of masked models work token by token, so a hook hands them the hidden states of the chosen tokens only, as if
    these were one sequence. Whether a model's head does so is tried on the first batch; if it answers otherwise, as a
    head that mixes tokens would, all logits are computed.

    Args:
        language_model: A masked or causal model. It is in its own mode again afterwards.
    """
    chosen = _ChosenStates()
    heads = _head_modules(language_model.model) if language_model.kind == "masked" else []
    works: bool | None = None if heads else False

    def read(ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        nonlocal works
        if works is None:
            works = _works_for_chosen(language_model, chosen, ids, rows, positions)
        if not works:
            return language_model.logits(ids)[rows, positions]
        with chosen.only(ids, rows, positions):
            return language_model.logits(ids)[0]

    with language_model.evaluating():
        hooks = [head.register_forward_pre_hook(chosen, with_kwargs=True) for head in heads]
        try:
            yield read
        finally:
            for hook in hooks:
                hook.remove()


class _ChosenStates:
    """Hook before the modules of a head: the first that is given hidden states (B, L, H) gets (1, M, H) instead."""

    def __init__(self) -> None:
        self._choice: tuple[torch.Size, Tensor, Tensor] | None = None

    @contextlib.contextmanager
    def only(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Iterator[None]:
        """Choose tokens for the next forward pass over `ids`."""
        self._choice = ids.shape, rows, positions
        try:
            yield
        finally:
            self._choice = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._cut, args)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if self._choice is None or not isinstance(value, Tensor) or value.ndim != 3:
            return value
        shape, rows, positions = self._choice
        if value.shape[:2] != shape:
            return value
        self._choice = None  # what the head's next modules are given is chosen already
        return value[rows, positions].unsqueeze(0)


def _head_modules(model: nn.Module) -> list[nn.Module]:
    """Parts of a model that run after its base; none where the base cannot be told apart."""
    base: Any = model.base_model
    return [] if base is model else [child for child in model.children() if base not in child.modules()]


def _works_for_chosen(
    language_model: LanguageModel, chosen: _ChosenStates, ids: Tensor, rows: Tensor, positions: Tensor
) -> bool:
    """Whether a head answers the same for chosen tokens alone, tried on two sequences at most."""
    few = rows < 2
    ids, rows, positions = ids[:2], rows[few], positions[few]
    full = language_model.logits(ids)[rows, positions]
    try:
        with chosen.only(ids, rows, positions):
            cut = language_model.logits(ids)
    except (RuntimeError, ValueError, IndexError):  # the head needs the shape of the batch
        return False
    if cut.shape != (1, *full.shape):
        return False
    tolerance = math.sqrt(torch.finfo(full.dtype).eps) * float(full.abs().max())
    return bool((cut[0] - full).abs().max() <= tolerance)
