"""Which model is it? A digest of all that its scores depend on."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Entries of a configuration that change with where it lies and who saved it; the weights tell their own dtype."""


def fingerprint_model(model: Any, tokenizer: Any) -> str:
    """Digest of weights, their dtype, configuration and tokenizer.

    Args:
        model: Model of transformers.
        tokenizer: Its tokenizer.

    Returns:
        64 hexadecimal digits.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    digest = hashlib.sha256(_as_bytes([type(model).__name__, config, _describe_tokenizer(tokenizer)]))
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        place = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride())
        first = seen.setdefault(place, name)  # a tied tensor is large and need not be read twice
        digest.update(_as_bytes([name, first, str(tensor.dtype), list(tensor.shape)]))
        if first == name:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def read_versions(model: Any) -> list[tuple[int, int]]:
    """Place of every tensor and how often it was changed in place there: equal as long as nothing was."""
    return [(tensor.data_ptr(), _version(tensor)) for tensor in model.state_dict(keep_vars=True).values()]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count


def _describe_tokenizer(tokenizer: Any) -> Any:
    """All that decides about tokens; padding and truncation do not, they are set anew by every call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        details: Any = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        details = json.loads(backend.to_str())
        details.pop("padding", None)
        details.pop("truncation", None)
    return [details, tokenizer.special_tokens_map]


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
