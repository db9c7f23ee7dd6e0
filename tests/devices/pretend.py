"""A PyTorch device named `pretend`: its tensors compute on the CPU, but are kept apart from the tensors of the CPU.

It shows without an accelerator what an accelerator would refuse or spend: tensors left on the CPU, values read by the
host, and kernels. Importing the module registers the device, for the whole process and for good: `torch.accelerator`
and Accelerate then choose it. Hence only tests/devices and programs of their own import it.

    import pretend, torch

    layer = torch.nn.Linear(4, 3).to("pretend")
    pretend.reset()
    layer(torch.randn(2, 4, device="pretend")).sum().backward()
    pretend.kernels()  # number of kernels since the reset
    pretend.synchronizations()  # operations for which the host waited since the reset, with their source lines

    with pretend.recorded_kernels() as kernels: ...  # a list of `Kernel`, to compare the sequences of two steps
    with pretend.capturable(): ...  # an operation for which the host waits raises an error, as in a CUDA graph
    with pretend.without_float64(): ...  # float64 raises an error, as on Metal
    with pretend.without_operations("aten::cumsum"): ...  # these operations are missing

A kernel is a dispatched operation that is neither a view nor an allocation; a foreach operation is one. The host waits
for values and data-dependent shapes, and for blocking copies in either direction (`non_blocking=True` to the device
does not wait). For steps of thirteen heads, an NVIDIA H200 launched up to 17 kernels more than are counted.

Limits: one stream, no memory limit, no generators of its own; autocast lowers products only; random numbers are those
of the CPU; `torch.load` with it as `map_location` moves only tensors that were saved from it;
a module that an autograd graph still uses cannot be moved to it.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
ROOT = Path(__file__).resolve().parents[2]
ALLOCATIONS = frozenset([
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view",
    "resize_", "set_", "is_same_size", "_reshape_alias", "lift_fresh", "_fused_sdp_choice",
    "_has_compatible_shallow_copy_type",
])  # fmt: skip
WAITS = frozenset([
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "_linalg_check_errors",
])  # fmt: skip
"""Operations whose result or shape the host reads."""
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"])
"""Operations on tensors of the device whose indices may be on the CPU."""
MIXES = frozenset(["_to_copy", "copy_", "set_", "_copy_from", "_copy_from_and_resize"])
"""Operations on tensors of two devices."""


class Kernel(NamedTuple):
    """An operation on the device: its name, the shapes of its tensors and the line of the project that called it."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    line: str


class Synchronization(NamedTuple):
    """An operation for which the host waited, and the line of the project that called it."""

    operation: str
    line: str


class _State:
    def __init__(self) -> None:
        self.kernels = 0
        self.synchronizations: list[Synchronization] = []
        self.records: list[Kernel] | None = None
        self.is_capturing = False
        self.has_float64 = True
        self.missing: frozenset[str] = frozenset()


_state = _State()


def reset() -> None:
    """Forget the kernels and synchronizations counted so far."""
    _state.kernels = 0
    _state.synchronizations.clear()


def kernels() -> int:
    """Return the number of kernels since the last reset."""
    return _state.kernels


def synchronizations() -> list[Synchronization]:
    """Return the operations for which the host waited since the last reset."""
    return list(_state.synchronizations)


@contextlib.contextmanager
def _set(**values: Any) -> Iterator[None]:
    before = {name: getattr(_state, name) for name in values}
    vars(_state).update(values)
    try:
        yield
    finally:
        vars(_state).update(before)


def capturable() -> contextlib.AbstractContextManager[None]:
    """Refuse operations for which the host waits, with an error that names the line."""
    return _set(is_capturing=True)


def without_float64() -> contextlib.AbstractContextManager[None]:
    """Refuse results in float64."""
    return _set(has_float64=False)


def without_operations(*names: str) -> contextlib.AbstractContextManager[None]:
    """Refuse operations, such as "aten::cumsum", with the error that torch raises where a device has no kernel."""
    return _set(missing=frozenset(names))


@contextlib.contextmanager
def recorded_kernels() -> Iterator[list[Kernel]]:
    """Record the kernels in order."""
    records: list[Kernel] = []
    with _set(records=records):
        yield records


class PretendTensor(torch.Tensor):
    """A tensor of the device; `raw` is the tensor on the CPU that has its values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "PretendTensor":
        """Wrap a tensor on the CPU."""
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "layout": raw.layout}
        device = torch.device(NAME, 0)
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device=device, **layout)
        tensor.raw = raw
        return tensor

    def __init__(self, raw: torch.Tensor) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.raw})"

    def __reduce_ex__(self, protocol: int) -> tuple:
        # as torch saves tensors of devices without storage; `map_location` applies when they are loaded
        arguments = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments

    def tolist(self) -> Any:  # torch refuses it for tensors without storage
        return self.detach().cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def untyped_storage(self) -> torch.UntypedStorage:  # identifies tensors that share memory
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # torch would copy a storage of the device
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            copied = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
            memo[id(self)] = copied if is_parameter else copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors of the CPU, if a device could run it, and wrap the results."""
    name = func._schema.name
    base = name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if name in _state.missing:
        raise NotImplementedError(
            f"The operator '{name}' is not currently implemented for the {NAME} device. At {_line()}."
        )
    if base not in MIXES:
        _check_devices(func, base, args, kwargs, tensors, on_device=bool(ours) or target == NAME)
    if reason := _wait(base, args, kwargs, ours, target):
        if _state.is_capturing:
            raise RuntimeError(f"A step that waits for the device cannot be captured: {reason} at {_line()}.")
        _state.synchronizations.append(Synchronization(reason, _line()))
    if (ours or target == NAME) and _is_kernel(func):
        _state.kernels += 1
        if _state.records is not None:
            _state.records.append(Kernel(name, tuple(tuple(tensor.shape) for tensor in ours), _line()))

    replaced = {"device": torch.device("cpu")} if target is not None else {}
    replaced |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
    with torch._C.DisableTorchFunctionSubclass():
        out = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs | replaced))
    if base == "copy_":
        is_result_ours = isinstance(args[0], PretendTensor)
    else:
        is_result_ours = target == NAME if target is not None else bool(ours)
    if base == "_local_scalar_dense" or not is_result_ours:
        return args[0] if base == "copy_" else out
    is_mutable = func._schema.is_mutable
    changed = [tensor for tensor in ours if is_mutable and _layout(tensor) != _layout(tensor.raw)]
    is_view_of_inference = (
        ours[0].is_inference() if ours and not _is_kernel(func) else torch.is_inference_mode_enabled()
    )
    with torch.inference_mode(is_view_of_inference):
        wrapped = tree_map(_wrap, out)
    if not changed:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)
    for tensor in changed:  # resized, transposed in place and the like
        tensor.data = _wrap(tensor.raw)
    originals = {id(tensor.raw): tensor for tensor in ours}
    return tree_map(lambda raw: originals.get(id(raw), raw) if isinstance(raw, torch.Tensor) else raw, out)


def _check_devices(
    func: Any, base: str, args: tuple, kwargs: dict[str, Any], tensors: list[torch.Tensor], on_device: bool
) -> None:
    """Refuse tensors of the CPU, except single numbers and indices, and generators of the CPU."""
    others = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)]
    if base in INDEXING:
        others = [other for other in others if not any(other is index for index in args[1])]
    is_joined = base in ("cat", "stack")
    if on_device and any(other.dim() or is_joined for other in others):
        message = f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu"
        raise RuntimeError(f"{message}: {func} at {_line()}.")
    generator = kwargs.get("generator")
    if on_device and generator is not None and generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu': {func} at {_line()}.")


def _wait(base: str, args: tuple, kwargs: dict[str, Any], ours: list[PretendTensor], target: str | None) -> str:
    """Return for what the host waits, or nothing."""
    if (base in WAITS and ours) or (base == "repeat_interleave" and ours and kwargs.get("output_size") is None):
        return base
    if base in INDEXING and ours and any(isinstance(i, torch.Tensor) and i.device.type == "cpu" for i in args[1]):
        return "copy of an index to the device"
    if base == "index" and ours and any(_is_mask(index) for index in args[1]):
        return "index of a mask"
    if base in ("index_put", "index_put_") and ours and any(map(_is_mask, args[1])) and args[2].numel() != 1:
        return "assignment to a mask"
    source, on_device = None, False
    if base == "copy_":
        source, on_device, is_asynchronous = args[1], isinstance(args[0], PretendTensor), (*args[2:], False)[0]
    elif base == "_to_copy" and target is not None:
        source, on_device, is_asynchronous = args[0], target == NAME, kwargs.get("non_blocking", False)
    if source is None or isinstance(source, PretendTensor) == on_device or source.numel() == 0:
        return ""
    if on_device:
        return "" if is_asynchronous else "copy to the device"
    return "copy to the CPU"


def _is_mask(index: Any) -> bool:
    return isinstance(index, PretendTensor) and index.dtype in (torch.bool, torch.uint8)


@functools.cache
def _is_kernel(func: Any) -> bool:
    if func._schema.name.removeprefix("aten::") in ALLOCATIONS or torch.Tag.inplace_view in func.tags:
        return False
    returns = func._schema.returns
    return not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _layout(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, PretendTensor) else value


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, PretendTensor):
        return value
    if value.dtype == torch.float64 and not _state.has_float64:
        raise TypeError(f"Cannot convert a tensor to float64: the device {NAME} does not support it. At {_line()}.")
    return PretendTensor(value)


def _line() -> str:
    """Return the innermost line of the project; there is none in the thread of a backward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and "site-packages" not in path and path != __file__:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class _Device(backend_registration._DummyBackendModule):
    """The functions that torch expects in the module of a device, `torch.pretend`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


def _autocast(operation: Any) -> Any:
    """Return a kernel that casts floating-point arguments as `torch.autocast` does on a GPU for products."""

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.get_autocast_dtype(NAME)) if is_floating else value

    def run(*args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
_foreach_supported_types.append(PretendTensor)
torch.serialization.register_package(
    5, lambda storage: None, lambda storage, location: storage if location.startswith(NAME) else None
)
torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as on a GPU
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")  # of torch.tensor(..., device="pretend"), below the class
for _name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d", "scaled_dot_product_attention"):
    _aten.impl(_name, _autocast(getattr(torch.ops.aten, _name).default), "AutocastPrivateUse1")
