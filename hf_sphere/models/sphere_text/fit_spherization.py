# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Fit the spherized layers of a text encoder to the plain encoder it was initialized from, by ridge regression."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_sphere.models.sphere_text.modeling_sphere_text import SpherizedOutput

RIDGES = tuple(10.0**exponent for exponent in range(-9, 1))
"""Candidate ridges, relative to the mean square of each coordinate."""
HELD_OUT = 5
"""Every fifth text is held out, to choose the ridge and to evaluate the fit."""


@dataclass(frozen=True)
class SpherizationFit:
    """How well one spherized layer reproduces the plain one.

    Attributes:
        layer: Index of the encoder layer.
        explained_variance: Fraction of the variance of the plain layer's output, after its norm, on held-out texts; 1
            is perfect, and 0 no better than the mean.
        ridge: The ridge, relative to the mean square of each coordinate.
        num_tokens: Number of tokens the layer was fitted to, including held-out ones.
    """

    layer: int
    explained_variance: float
    ridge: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {100 * self.explained_variance:.2f} % of the variance explained on held-out text "
            f"({self.num_tokens} tokens, ridge {self.ridge:g})"
        )


@torch.no_grad()
def calibrate_spherization(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    texts: Iterable[str] | Iterable[Mapping[str, Tensor]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int = 8192,
    max_length: int = 128,
    batch_size: int = 16,
    ridge: float | None = None,
    progress: bool = False,
) -> list[SpherizationFit]:
    r"""Initialize a spherized encoder close to the plain one it was loaded from, instead of randomly.

    A spherized layer takes its first linear map from the plain checkpoint; only the map after the spherization, from
    intermediate_size + 1 to hidden_size without bias, is new. It is set to the least-squares solution for the output of
    the plain layer, by ridge regression on the layer's actual inputs, with normal equations accumulated in float64.
    Layers are fitted in order, and each one compensates for the errors of those before it.

    Save the fitted model before training an adapter on it: the checkpoint of an adapter contains only the adapter.

    Args:
        model: A model with spherized layers loaded from `reference`, with any head or none; its output layers are
            overwritten in place. Runs in eval mode; the mode is restored afterwards.
        reference: The plain model.
        texts: Texts, or batches of model inputs (`input_ids`, `attention_mask`, ...). Reading stops at `max_tokens`.
        tokenizer: Tokenizer of the texts; that of the reference's checkpoint if None.
        max_tokens: Number of tokens to read, rounded up to full batches. A fifth of the texts is held out.
        max_length: Maximum number of tokens per text, further limited by the tokenizer.
        batch_size: Number of texts per batch.
        ridge: The ridge, relative to the mean square of each coordinate; chosen on the held-out texts if None.
        progress: Whether to show a progress bar.

    Returns:
        One `SpherizationFit` per spherized layer, in order.

    Raises:
        ValueError: If the model has no spherized layer, the reference does not match it, there are too few texts (fewer
            than five, or fewer tokens than the inputs of the map, intermediate_size + 1), or the ridge is negative or
            too small for texts with little variation.

    Example:
        >>> model = SphereBertForMaskedLM.from_pretrained("bert-base-cased")
        >>> reference = BertForMaskedLM.from_pretrained("bert-base-cased")
        >>> print(*calibrate_spherization(model, reference, wikitext["text"]), sep="\n")
    """
    layers, plain_layers = _encoder_layers(model), _encoder_layers(reference)
    spherized = [index for index, layer in enumerate(layers) if _is_spherized(layer)]
    _check_reference(model, reference, spherized, plain_layers)
    if ridge is not None and not ridge >= 0:
        raise ValueError(f"ridge must not be negative; got {ridge}.")
    batches = _collect(texts, reference, tokenizer, max_tokens, max_length, batch_size)
    least = model.config.intermediate_size + 1
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    num_texts = sum(int(batch["attention_mask"].any(dim=1).sum()) for batch in batches)
    if num_tokens < least or num_texts < HELD_OUT:
        raise ValueError(
            f"too few tokens to fit a map of {least} inputs: got {num_tokens} tokens in {num_texts} texts; at least "
            f"{least} tokens in {HELD_OUT} texts are required, and several thousand are better. Pass more texts, or "
            f"increase max_tokens ({max_tokens})."
        )
    fits = []
    parts = _split(batches)
    bar = tqdm(total=len(spherized) * sum(map(len, parts)), unit="batch", desc="Fitting", disable=not progress)
    with bar, _in_eval_mode(model, reference):
        for index in spherized:
            layer, plain = layers[index], plain_layers[index]
            train, held_out = (_NormalEquations(), _NormalEquations())
            for equations, part in zip((train, held_out), parts, strict=True):
                for points, targets in _layer_pairs(model, reference, layer, plain, part):
                    equations.add(points, targets)
                    bar.update()
            candidates = [
                (held_out.squared_error(weight), candidate)
                for candidate in (RIDGES if ridge is None else (ridge,))
                if (weight := train.solve(candidate)) is not None
            ]
            if not candidates:
                raise ValueError(
                    f"the equations of layer {index} have no unique solution with ridge {ridge}: the texts do not vary "
                    "enough, or produce values that are not finite. Use a larger ridge or other texts."
                )
            _, best = min(candidates)
            linear = layer.output.spherical.linear
            linear.weight.copy_(train.solve(best))
            explained = _explained_variance(model, reference, layer, plain, parts[1])
            train.merge(held_out)
            linear.weight.copy_(train.solve(best))
            fits.append(SpherizationFit(index, explained, best, train.count))
    return fits


class _NormalEquations:
    """Normal equations of a linear map, accumulated over tokens in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.gram: Any = 0.0
        self.cross: Any = 0.0
        self.target_square = 0.0

    def add(self, points: Tensor, targets: Tensor) -> None:
        """Add tokens: points (T, n + 1) and targets (T, H)."""
        self.count += len(points)
        self.gram = self.gram + points.T @ points
        self.cross = self.cross + points.T @ targets
        self.target_square += targets.square().sum().item()

    def merge(self, other: "_NormalEquations") -> None:
        """Add the tokens of other equations."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def solve(self, ridge: float) -> Tensor | None:
        """Return the map (H, n + 1), or None where the equations are singular to working precision."""
        mean_squares = self.gram.diagonal() / self.count
        system = self.gram + torch.diag(ridge * self.count * mean_squares)
        factor, failed = torch.linalg.cholesky_ex(system)
        return None if failed else torch.cholesky_solve(self.cross, factor).T

    def squared_error(self, weight: Tensor) -> float:
        """Return the sum of squared errors of the map on these tokens."""
        error = self.target_square - 2 * (weight.T * self.cross).sum() + ((weight @ self.gram) * weight).sum()
        return float(error)


def _split(batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Split batches into texts to fit to and every fifth text, which is held out."""
    parts: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    seen = 0
    for batch in batches:
        has_tokens = batch["attention_mask"].any(dim=1).cpu()  # rows of padding are not texts
        number = seen + has_tokens.cumsum(0)
        is_held_out = number % HELD_OUT == 0
        for part, chosen in zip(parts, (has_tokens & ~is_held_out, has_tokens & is_held_out), strict=True):
            if chosen.any():
                part.append({name: value[chosen] for name, value in batch.items()})
        seen += int(has_tokens.sum())
    return parts


def _layer_pairs(
    model: Any, reference: Any, layer: Any, plain: Any, batches: Sequence[Mapping[str, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs (T, n + 1) and targets (T, H) of the new map for the tokens of each batch."""
    for batch in batches:
        with _record(layer.output) as spherized, _record(plain.output) as original:
            _run(model, batch)
            _run(reference, batch)
        values, residual = (torch.cat(parts, dim=1) for parts in zip(*(inputs for inputs, _ in spherized), strict=True))
        activations, plain_residual = (
            torch.cat(parts, dim=1) for parts in zip(*(inputs for inputs, _ in original), strict=True)
        )
        kept = batch["attention_mask"].bool()
        # If layers before this one are spherized, the residuals differ, and the map compensates for this.
        target = plain.output.dense(activations) + plain_residual - residual.to(plain_residual)
        points = layer.output.spherical.spherization(values)
        yield (
            _to_float64(points[kept.to(points.device)]),
            _to_float64(target[kept.to(target.device)]).to(_solver_device(points)),
        )


def _explained_variance(
    model: Any, reference: Any, layer: Any, plain: Any, batches: Sequence[Mapping[str, Tensor]]
) -> float:
    """Return the fraction of the variance of a plain layer's output that the spherized layer explains.

    Outputs are compared after the norm: before it, a few coordinates with most of the variance would dominate.
    """
    count, error, total, square = 0, 0.0, torch.zeros(()), 0.0
    for batch in batches:
        with _record(layer) as spherized, _record(plain) as original:
            _run(model, batch)
            _run(reference, batch)
        kept = batch["attention_mask"].bool()
        outputs = (calls[0][1] for calls in (spherized, original))
        fitted, target = (_to_float64(output[kept.to(output.device)]).cpu() for output in outputs)
        count += len(target)
        error += float((fitted - target).square().sum())
        total = total + target.sum(0)
        square += float(target.square().sum())
    return 1 - error / (square - float(total.square().sum()) / count)


def _run(model: Any, batch: Mapping[str, Tensor]) -> None:
    encoder = model.base_model
    encoder(**{name: value.to(encoder.device) for name, value in batch.items()})


@contextmanager
def _record(module: nn.Module) -> Iterator[list[tuple[tuple[Tensor, ...], Tensor]]]:
    """Record inputs and output of every call of a module; a chunked feed-forward calls it several times."""
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
    hook = module.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    try:
        yield calls
    finally:
        hook.remove()


@contextmanager
def _in_eval_mode(*models: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # individually, since some may be frozen in eval mode
            module.training = mode


def _solver_device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device  # Metal has no float64


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.to(_solver_device(tensor)).double()


def _encoder_layers(model: Any) -> Sequence[Any]:
    return getattr(getattr(model.base_model, "encoder", None), "layer", ())


def _is_spherized(layer: Any) -> bool:
    return isinstance(getattr(layer, "output", None), SpherizedOutput)


def _check_reference(model: Any, reference: Any, spherized: Sequence[int], plain_layers: Sequence[Any]) -> None:
    """Check that the model has spherized layers and that the reference is its plain encoder."""
    if not spherized:
        raise ValueError(f"{type(model).__name__} has no spherized layer to fit; set spherized_layers.")
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
        own, other = getattr(model.config, name), getattr(reference.config, name, None)
        if own != other:
            raise ValueError(
                f"the reference does not match the model: {name} is {own} in the model and {other} in the reference."
            )
    for index in spherized:
        if _is_spherized(plain_layers[index]):
            raise ValueError(
                f"layer {index} of the reference is spherized; it must be the plain model that the spherized one was "
                "loaded from."
            )


def _collect(
    texts: Iterable[Any],
    reference: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    max_tokens: int,
    max_length: int,
    batch_size: int,
) -> list[dict[str, Tensor]]:
    """Collect batches of model inputs with an attention mask until they have `max_tokens` tokens."""
    if isinstance(texts, (str, Mapping)):  # which are iterable as well
        raise ValueError(
            f"texts must be an iterable of texts or batches, for instance a list; got one {type(texts).__name__}."
        )
    batches: list[dict[str, Tensor]] = []
    pending: list[str] = []
    count = 0

    def encode() -> dict[str, Tensor]:
        nonlocal tokenizer
        if tokenizer is None and not reference.config.name_or_path:
            raise ValueError("the reference was not loaded from a checkpoint with a tokenizer; pass a tokenizer.")
        name = reference.config.name_or_path
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        longest = min(max_length, tokenizer.model_max_length)
        encoded = tokenizer(pending, truncation=True, max_length=longest, padding=True, return_tensors="pt")
        pending.clear()
        return dict(encoded)

    def add(batch: Mapping[str, Tensor]) -> None:
        nonlocal count
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            what = f"the columns {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ValueError(
                f"texts must be strings, or batches with input_ids; got {what}. Pass a column of a data set, for "
                "instance dataset['text']."
            )
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        batches.append(inputs)
        count += int(inputs["attention_mask"].sum())

    for text in texts:
        if not isinstance(text, str):
            add(text)
        elif text.strip():
            pending.append(text)
            if len(pending) == batch_size:
                add(encode())
        if count >= max_tokens:
            return batches
    if pending:
        add(encode())
    return batches
