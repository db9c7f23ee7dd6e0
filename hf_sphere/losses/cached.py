"""Gradients of the loss of a large batch, whose examples are encoded in chunks: gradient caching."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_sphere.utils.checks import check_integer


def cached_step(
    model: Callable[..., Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: tuple[Tensor | Mapping[str, Tensor], Tensor],
    chunk_size: int = 64,
) -> Tensor:
    """Fill the gradients of model and loss like one large batch, in the memory of a chunk; return the loss, detached.

    Examples are encoded twice: for the loss of all embeddings, in the order of the batch, and for the gradients of the
    model, with the same random numbers of torch, such as dropout masks. `DistributedDataParallel` averages once. With a
    `GradScaler`, pass a loss that scales its value.

    Args:
        model: Called with a chunk, or its tensors by name; returns embeddings (B, d), or an output that has them.
        loss: Called with the embeddings and labels of all examples; returns a scalar.
        batch: Inputs (B, ...), a tensor or a mapping of tensors, and labels (B,).
        chunk_size: Number of examples to encode at once.

    Raises:
        ValueError: If lengths differ, the model does not return one embedding per example, or the loss does not depend
            on the embeddings.

    Reference:
        Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", RepL4NLP 2021.

    Example:
        >>> cached_step(network.eval(), SupConLoss(), (images, labels[:8]), chunk_size=4).shape
        torch.Size([])
    """
    inputs, labels = batch
    parts = dict(inputs) if isinstance(inputs, Mapping) else {"the inputs": inputs}
    if {*map(len, parts.values())} != {len(labels)}:
        raise ValueError("inputs and labels must have the same number of examples.")
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model  # the first pass sends nothing
    warn_of_batch_norm(inner)

    def encode(chunk: Sequence[Tensor]) -> Tensor:
        call = model if torch.is_grad_enabled() else inner
        output = call(**dict(zip(parts, chunk, strict=True))) if isinstance(inputs, Mapping) else call(*chunk)
        embeddings: Tensor = getattr(output, "embeddings", output)
        if len(embeddings) != len(chunk[0]):  # the order would depend on the chunks
            raise ValueError(f"the model must return one embedding per example; got {len(embeddings)}.")
        return embeddings

    size = check_integer("chunk_size", chunk_size, 1)
    chunks = list(zip(*(value.split(size) for value in parts.values()), strict=True))
    return step_in_chunks(encode, lambda embeddings: loss(embeddings, labels), chunks, getattr(model, "no_sync", None))


def warn_of_batch_norm(model: Any) -> None:
    """Warn if a model has batch norm in training."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in modules):
        problem = "Batch norm in training has the statistics of chunks, so gradients differ from the whole batch"
        warnings.warn(f"{problem}; set it to eval mode, or use another norm.", stacklevel=3)


def step_in_chunks(
    encode: Callable[[Any], Tensor],
    loss: Callable[[Tensor], Tensor],
    chunks: Sequence[Any],
    no_sync: Callable[[], Any] | None = None,
) -> Tensor:
    """Return the loss of the embeddings of all chunks; gradients of all but the last are in the context `no_sync`."""
    encoded, states = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(_random_states())
            encoded.append(encode(chunk))
    torch.clear_autocast_cache()  # in older versions of torch, it has casts of weights without gradients
    embeddings = torch.cat(encoded).requires_grad_()
    value = loss(embeddings)
    value.backward()
    assert embeddings.grad is not None
    gradients, last = embeddings.grad.split([len(part) for part in encoded]), _random_states()
    for index, (chunk, state, gradient) in enumerate(zip(chunks, states, gradients, strict=True), 1):
        _set_random_states(state)
        with no_sync() if no_sync and index < len(chunks) else nullcontext():
            again = encode(chunk)
            if again.requires_grad:  # not of a frozen model
                again.backward(gradient)
    _set_random_states(last)
    return value.detach()


def _random_states() -> list[tuple[Any, Tensor]]:
    """Return the random states of the CPU and of the current accelerator, after the module that sets them."""
    device = torch.accelerator.current_accelerator(check_available=True)
    modules: list[Any] = [torch] if device is None else [torch, torch.get_device_module(device)]
    return [(module, module.get_rng_state()) for module in modules]


def _set_random_states(states: list[tuple[Any, Tensor]]) -> None:
    for module, state in states:
        module.set_rng_state(state)
