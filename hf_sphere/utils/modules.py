"""Modules: evaluation mode, digests of weights, and the sizes of inputs that models support."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_sphere.utils.checks import error_text


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode, and restore the mode of each of their modules, since some may be frozen."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def digest_weights(model: nn.Module | Mapping[str, Any], about: Any = None, *, is_widened: bool = False) -> str:
    """Compute the SHA-256 digest, 64 hexadecimal digits, of a model's or a state's tensors, whatever their device.

    It covers their names, dtypes and shapes, and the JSON-serializable value `about`; but not the `rejection` of a
    model, which is fitted to the others. If it `is_widened`, numbers in half precision count as in float32.
    """
    digest = hashlib.sha256(_as_bytes(about))
    seen: dict[tuple[Any, ...], str] = {}
    state = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in sorted(state.items()):
        if name.startswith("rejection."):
            continue
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of FSDP
        memory = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride())
        first = seen.setdefault(memory, name)  # tied tensors are hashed once
        tensor = tensor.float() if is_widened and tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        digest.update(_as_bytes([name, first, str(tensor.dtype), list(tensor.shape)]))
        if first == name:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def shared_tensors(model: nn.Module) -> dict[str, str]:
    """Return the further names of the parameters and buffers that a model has by several names, each with the first."""
    saved, first = model.state_dict(keep_vars=True), dict[int, str]()
    return {name: first[id(t)] for name, t in saved.items() if first.setdefault(id(t), name) != name}


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


UNLIMITED = 10**6
"""A tokenizer whose `model_max_length` is at least this has no known limit."""


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Return the maximum input of a text model in tokens, including special tokens; None if there is none.

    It is the smaller limit of the tokenizer and the position embeddings.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < UNLIMITED else []
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # DeBERTa has -1 for no limit
        # RoBERTa and similar models count positions from padding_idx + 1; earlier rows are never used.
        tables = [table for path, table in model.named_modules() if path.endswith("position_embeddings")]
        unused = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
        limits.append(positions - max((index + 1 for index in unused), default=0))
    return min(limits, default=None)


@torch.no_grad()
def check_input_shape(model: nn.Module, shape: Sequence[int]) -> None:
    """Raise an error, with the reason, if a model cannot process images (channels, height, width), by trying it."""
    parameter = next(model.parameters())
    try:
        with eval_mode(model):
            model(torch.zeros(1, *shape, device=parameter.device, dtype=parameter.dtype))
    except (RuntimeError, ValueError) as error:
        size = " x ".join(map(str, shape))
        raise ValueError(f"the model does not support images of {size}: {error_text(error)}") from error
