"""Modules and devices: evaluation mode, digests of weights, supported inputs, and dtypes of devices."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hf_sphere.utils.checks import error_text

F = TypeVar("F", bound=Callable[..., Any])


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


@contextmanager
def full_precision(*kinds: str) -> Iterator[None]:
    """Compute in full float32, whatever is allowed for training, and without autocast on some kinds of devices."""
    backends: Any = torch.backends
    cudnn, matmuls = backends.cudnn, (backends.cuda.matmul, backends.mkldnn.matmul)
    with ExitStack() as stack:
        for operation in (*matmuls, cudnn.conv, cudnn.rnn):
            before = operation.fp32_precision if operation.fp32_precision != backends.fp32_precision else "none"
            stack.callback(setattr, operation, "fp32_precision", before)
        stack.callback(setattr, cudnn, "allow_tf32", cudnn.conv.fp32_precision == "tf32")
        cudnn.allow_tf32 = False  # reading this older setting, as `cudnn.flags` does, is an error if they differ
        for operation in (*matmuls, cudnn.conv, cudnn.rnn):
            operation.fp32_precision = "ieee"
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


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


def unwrap(model: nn.Module) -> nn.Module:
    """Return a model without the wrappers of torch.compile and of training on several devices."""
    from accelerate.utils import extract_model_from_parallel

    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return model if inner is model else unwrap(inner)  # DDP may wrap a compiled model


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of a training step to a device without waiting for it, except mps, which may read freed memory."""
    return values.to(device, non_blocking=device.type != "mps")


def widest_dtype(where: Tensor | torch.device) -> torch.dtype:
    """Return float64 if a device, or the device of a tensor, supports it, else float32."""
    device = where.device if isinstance(where, Tensor) else where
    return torch.float64 if device.type in ("cpu", "cuda") or has_float64(device) else torch.float32


def assume_constant_result(function: F) -> F:
    """Mark a function as `torch.compiler.assume_constant_result` does, which imports the compiler: seconds, 150 MB."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_exporting() -> bool:
    """Whether `torch.export` traces; before torch 2.14, torch's own function is also true in `torch.compile`."""
    return torch.compiler._is_exporting_flag


@assume_constant_result
@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Metal does not, nor do some GPUs of Intel."""
    try:
        with _disable_current_modes():  # a fake tensor would not tell
            torch.ones((), dtype=torch.float64, device=device).exp()
    except (TypeError, RuntimeError) as error:
        if "64" in str(error):
            return False
        raise
    return True
