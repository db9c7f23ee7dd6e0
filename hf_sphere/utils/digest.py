"""Digests of the weights of models."""

import hashlib
import json
from typing import Any

import torch
from torch import nn


def digest_weights(model: nn.Module, about: Any = None) -> str:
    """Compute the SHA-256 digest of a model's parameters and buffers, with their names, dtypes and shapes.

    Args:
        model: The model, on any device.
        about: JSON-serializable value to include in the digest.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(_as_bytes(about))
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        memory = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride())
        first = seen.setdefault(memory, name)  # tied tensors are hashed once
        digest.update(_as_bytes([name, first, str(tensor.dtype), list(tensor.shape)]))
        if first == name:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
