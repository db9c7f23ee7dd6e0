"""Which model is it? A digest of all that its scores depend on."""

import json
from typing import Any

import torch
from torch import Tensor

from hf_sphere.utils.digest import digest_weights

VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Entries of a configuration that change with where it lies and who saved it; the weights tell their own dtype."""


def fingerprint_model(model: Any, tokenizer: Any) -> str:
    """Digest of weights, their dtype, configuration, adapters and tokenizer.

    Args:
        model: Model of transformers.
        tokenizer: Its tokenizer.

    Returns:
        64 hexadecimal digits.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    basis = [type(model).__name__, config, _describe_tokenizer(tokenizer), *_describe_adapters(model)]
    return digest_weights(model, basis)


def read_state(model: Any, tokenizer: Any) -> list[Any]:
    """What differs once the model or the tokenizer was changed, at a small part of the cost of the digest.

    How often a tensor was changed in place is not enough: fused optimizers, such as the Trainer's default one, and all
    that writes into `.data` do not count. So the bits of every tensor are summed.
    """
    tensors = list(model.state_dict(keep_vars=True).values())
    sums = [_sum_bits(tensor.detach()) for tensor in tensors]
    places = [(tensor.data_ptr(), tensor.dtype, _version(tensor)) for tensor in tensors]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    words = [tokenizer, len(tokenizer), tokenizer.special_tokens_map, *(step and step.__getstate__() for step in steps)]
    return [places, torch.stack([one.cpu() for one in sums]).tolist(), words, _describe_adapters(model)]


def _sum_bits(tensor: Tensor) -> Tensor:
    """Sum of a tensor's memory as 64-bit numbers: in narrower ones, a factor of two could go unseen."""
    memory = tensor.flatten().view(torch.uint8)
    if memory.storage_offset() % 8:  # wider numbers must not begin in between
        memory = memory.clone()
    whole = len(memory) // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum(dtype=torch.int64)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count


def _describe_adapters(model: Any) -> list[Any]:
    """Of adapters: which are on, and how strong; their weights are among the model's."""
    return [
        [str(module.active_adapters), module.disable_adapters, str(getattr(module, "scaling", None))]
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)  # as layers of peft have it
    ]


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
