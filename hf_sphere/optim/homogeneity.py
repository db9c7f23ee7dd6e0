"""Follows weights through a forward pass: which of them reach nothing but normalisation layers, up to their scale?

The output of a layer without bias is homogeneous in its weight: twice the weight, twice the output. Rectifiers,
pooling, reshaping and products with other tensors keep that, and a normalisation takes the scale away. A weight is
radially invariant if on every path it stays homogeneous until it meets a normalisation. A bias is harmless only where
the normalisation subtracts the mean of each channel, which batch norm does and layer norm does not.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# By the name of the torch function, without underscores of the in-place and operator forms.
_LINEAR = {*(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3)), "linear"}
_PRODUCTS = {"mul", "multiply", "matmul", "mm", "bmm", "mv", "einsum"}
_QUOTIENTS = {"div", "divide", "true_divide", "truediv"}
_SUMS = {"add", "sub", "subtract"}
_RESHAPING = {
    *("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape", "view"),
    *("flatten", "unflatten", "squeeze", "unsqueeze", "expand", "contiguous", "clone", "detach"),
    *("to", "float", "double", "half", "bfloat16", "chunk", "split", "tensor_split", "unbind"),
    *("getitem", "narrow", "select", "index_select", "get", "embedding"),
}
_HOMOGENEOUS = {
    *("relu", "leaky_relu", "rrelu", "threshold", "neg", "abs", "mean", "sum", "amax", "amin", "max", "min", "cumsum"),
    *("norm", "linalg_norm", "linalg_vector_norm"),
    *(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg", "lp") for n in (1, 2, 3)),
    *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "interpolate", "pad", "roll", "flip"),
    *("repeat", "tile", "repeat_interleave", "unfold", "fold", "pixel_shuffle", "pixel_unshuffle", "upsample"),
}
_READING = {"item", "tolist", "numpy", "bool", "float", "int", "setitem"}
_NORM_CLASS = re.compile(r"(rms|layer|group|batch|instance)_?norm", re.IGNORECASE)
_TORCH_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Trace:
    """How a tensor depends on a weight: as a homogeneous function of degree 1.

    Attributes:
        shifted: A bias has been added, constant over each channel.
        mixed: Other channels lie beside it, which do not depend on the weight.
    """

    shifted: bool = False
    mixed: bool = False


class HomogeneityMode(TorchFunctionMode):
    """Sees every torch function of a forward pass and follows the weights through it.

    Args:
        weights: Name to tensor, as the model uses it.

    Attributes:
        normalized: Name to the normalisations that the weight has met.
        broken: Name to what ended its way: the first function that is not homogeneous in it.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.normalized: dict[str, set[str]] = {}
        self.broken: dict[str, str] = {}
        self._traces = {id(tensor): {name: Trace()} for name, tensor in weights.items()}
        self._alive: list[Any] = [*weights.values()]  # an id may not be used twice
        self._inside_norm = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and note what it does to the weights."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._inside_norm:
            self._note(func, args, kwargs, result)
        return result

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Take modules that are norms by name, but spell the formula out, for one function each."""
        handles = []
        for module in model.modules():
            if _is_norm_by_name(module):
                handles.append(module.register_forward_pre_hook(self._enter_norm, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave_norm, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, output: Any) -> None:
        """Note which weights reach the model's output."""
        for tensor in tree_leaves(output):
            self._break(self._of(tensor), "the output of the model")

    def _enter_norm(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside_norm:
            for tensor in tree_leaves((args, kwargs)):
                self._normalize(self._of(tensor), type(module).__name__, channelwise=False)
        self._inside_norm += 1

    def _leave_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside_norm -= 1
        self._alive.append(output)

    def _of(self, value: Any) -> dict[str, Trace]:
        return self._traces.get(id(value), {}) if isinstance(value, Tensor) else {}

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # Empty tensors (an empty cache, joined to the first keys) bring nothing in.
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.numel()]
        traces = [self._of(tensor) for tensor in tensors]
        name = _plain_name(func)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        first = self._of(_argument(args, kwargs, 0, "input"))
        others = _union([trace for trace in traces if trace is not first])
        if not any(traces) or name.endswith("_like") or name.startswith("new_"):
            self._set(made, {})
        elif not made:
            if name in _READING:
                self._break(_union(traces), name)
        elif name in _LINEAR:
            self._set(made, self._linear(name, args, kwargs))
        elif name.endswith("_as"):  # the other tensor only lends its shape or type
            self._set(made, first)
        elif name in _RESHAPING or (name == "cat" and _same_names(traces)):
            self._set(made, _union(traces))
        elif name == "cat":
            self._set(made, {n: replace(trace, mixed=True) for n, trace in _union(traces).items()})
        elif name in _HOMOGENEOUS and _adds_no_constant(name, args, kwargs, tensors):
            self._set(made, self._unshifted(first, name))
            self._break(others, name)
        elif name == "scaled_dot_product_attention":
            value = self._of(_argument(args, kwargs, 2, "value"))
            self._set(made, self._unshifted(value, name))
            self._break(_union([trace for trace in traces if trace is not value]), name)
        elif name in _PRODUCTS:
            self._set(made, self._product(traces, name))
        elif name in _QUOTIENTS:
            self._set(made, self._quotient(first, others, name))
        elif name in _SUMS:
            self._set(made, self._sum(traces, name))
        elif name in _NORMS:
            self._set(made, {})
            norm = _NORMS[name](*args, **kwargs)
            if norm is None:
                self._break(_union(traces), f"{name} with fixed statistics")
            else:
                self._normalize(first, *norm)
                self._break(others, name)
        else:
            self._break(_union(traces), name)
            self._set(made, {})

    def _set(self, made: list[Tensor], traces: dict[str, Trace]) -> None:
        alive = {n: trace for n, trace in traces.items() if n not in self.broken}
        for tensor in made:
            # A function that returns its argument (dropout in evaluation) has changed nothing that is not noted here.
            self._traces[id(tensor)] = alive
            self._alive.append(tensor)

    def _break(self, traces: Mapping[str, Trace], what: str) -> None:
        for name in traces:
            self.broken.setdefault(name, what)

    def _unshifted(self, traces: dict[str, Trace], what: str) -> dict[str, Trace]:
        self._break({name: trace for name, trace in traces.items() if trace.shifted}, f"{what} after a bias")
        return traces

    def _linear(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Trace]:
        x, weight = (_argument(args, kwargs, position, key) for position, key in enumerate(("input", "weight")))
        bias = _argument(args, kwargs, 2, "bias")
        self._break(self._of(bias), name)
        both = self._product([self._of(x), self._of(weight)], name)
        # Other channels of the input enter the same sum: what was mixed cannot be taken apart any more.
        self._break({n: trace for n, trace in both.items() if trace.mixed}, f"{name} over mixed channels")
        return {n: Trace(shifted=bias is not None) for n in both}

    def _product(self, traces: list[dict[str, Trace]], what: str) -> dict[str, Trace]:
        joint = {n: t for i, one in enumerate(traces) for n, t in one.items() if any(n in o for o in traces[i + 1 :])}
        self._break(joint, f"{what} with itself")
        return self._unshifted(_union(traces), what)

    def _quotient(self, numerator: dict[str, Trace], denominator: dict[str, Trace], what: str) -> dict[str, Trace]:
        both = numerator.keys() & denominator.keys()
        common = _union([{n: trace for n, trace in one.items() if n in both} for one in (numerator, denominator)])
        self._normalize(common, what, channelwise=False)
        self._break({n: trace for n, trace in denominator.items() if n not in both}, what)
        return self._unshifted({n: trace for n, trace in numerator.items() if n not in both}, what)

    def _sum(self, traces: list[dict[str, Trace]], what: str) -> dict[str, Trace]:
        together = _union(traces)
        # A number added is something else too.
        both = [n for n in together if len(traces) > 1 and all(n in one for one in traces[:2])]
        self._break({n: trace for n, trace in together.items() if n not in both}, f"{what} of something else")
        return together

    def _normalize(self, traces: Mapping[str, Trace], norm: str, channelwise: bool) -> None:
        for name, trace in traces.items():
            if (trace.shifted or trace.mixed) and not channelwise:
                self.broken.setdefault(name, f"{norm} after a {'bias' if trace.shifted else 'concatenation'}")
            else:
                self.normalized.setdefault(name, set()).add(norm)


def _is_norm_by_name(module: nn.Module) -> bool:
    """Whether a module that is not one of torch's is a norm: called so, and without weights of layers of its own."""
    named = _NORM_CLASS.search(type(module).__name__) and not isinstance(module, _TORCH_NORMS)
    return bool(named) and all(parameter.ndim < 2 for parameter in module.parameters())


def _plain_name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func)).strip("_")
    operator = re.fullmatch(r"[ir]?(add|sub|mul|matmul|truediv)", name)
    return operator.group(1) if operator else name


def _adds_no_constant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Whether a function that can bring in a number (padding, threshold, the larger of two) brings in none but 0."""
    if name == "pad":
        mode, value = _argument(args, kwargs, 2, "mode") or "constant", _argument(args, kwargs, 3, "value")
        return mode != "constant" or not value
    if name == "threshold":
        return not (_argument(args, kwargs, 1, "threshold") or _argument(args, kwargs, 2, "value"))
    return name not in ("max", "min") or len(tensors) == 1


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, key: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(key)


def _union(traces: list[dict[str, Trace]]) -> dict[str, Trace]:
    union: dict[str, Trace] = {}
    for one in traces:
        for name, trace in one.items():
            old = union.get(name, trace)
            union[name] = Trace(old.shifted or trace.shifted, old.mixed or trace.mixed)
    return union


def _same_names(traces: list[dict[str, Trace]]) -> bool:
    return all(one.keys() == traces[0].keys() for one in traces)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[str, bool] | None:
    return ("batch_norm", True) if training or running_mean is None else None


def _instance_norm(
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> tuple[str, bool] | None:
    return ("instance_norm", True) if use_input_stats else None


def _group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> tuple[str, bool]:
    return "group_norm", num_groups == input.shape[1]


# Name of a norm, and whether it subtracts the mean of each channel alone; None where it does not normalise at all.
_NORMS: dict[str, Callable[..., tuple[str, bool] | None]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": lambda *_, **__: ("layer_norm", False),
    "rms_norm": lambda *_, **__: ("rms_norm", False),
    "normalize": lambda *_, **__: ("normalize", False),
    "weight_norm": lambda *_, **__: ("weight_norm", False),
}
