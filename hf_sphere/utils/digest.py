"""Which weights are they? A digest of a model's tensors, to know it again."""

import hashlib
import json
from typing import Any

import torch
from torch import nn


def digest_weights(model: nn.Module, about: Any = None) -> str:
    """Digest the parameters and buffers of a model, with their names, dtypes and shapes.

    Args:
        model: On any device.
        about: What else is to make a difference; anything that JSON can write.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(_as_bytes(about))
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        place = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride())
        first = seen.setdefault(place, name)  # a tied tensor is large and need not be read twice
        digest.update(_as_bytes([name, first, str(tensor.dtype), list(tensor.shape)]))
        if first == name:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
