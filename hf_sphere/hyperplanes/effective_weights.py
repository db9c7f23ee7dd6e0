"""The weight by which the forward pass of a layer multiplies its input, which is not always the stored one.

Weight and spectral normalization and pruning compute `weight` in a parametrization, or in a hook before the forward
pass, which leaves it outdated when a state dict is loaded. Weight standardization, as in timm's `StdConv2d`, and
angular layers compute it in the forward pass itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_sphere.hyperplanes.model_state import Evaluation, evaluation_mode, named_tensors

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {one.forward for one in (nn.Linear, Conv1D, *_CONVOLUTIONS, *_TRANSPOSED)}
_CONVOLVE = {None, *(one._conv_forward for one in (_ConvNd, *_CONVOLUTIONS))}

_LAYERS = {"linear", *(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))}
_PRODUCTS = {"matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm"}


def effective_weight(module: nn.Module, name: str) -> Tensor:
    """Return the weight that a layer uses in evaluation mode, in the layout of its class; the layer is unchanged.

    If the class has the forward pass of torch, this is its `weight`, after the hooks that compute it. Otherwise the
    forward pass is run on zeros, and the weight of its only product is returned: the stored tensor if it is equal. One
    that cannot be run alone, or does not use a single weight of the stored shape, is an error.
    """
    stored = module._parameters.get("weight")
    is_plain = "forward" not in vars(module) and type(module).forward in _FORWARDS
    has_other_forward = not is_plain or getattr(type(module), "_conv_forward", None) not in _CONVOLVE
    if stored is not None and not has_other_forward:
        return stored

    def run(layer: Any) -> list[Tensor]:
        inputs = _zeros(layer)
        for key, hook in layer._forward_pre_hooks.items():
            if key not in layer._forward_pre_hooks_with_kwargs:
                hook(layer, (inputs,))
        if not has_other_forward:
            return [layer.weight.detach()]
        with _Recorder() as recorder:
            layer.forward(inputs)
        return recorder.weights

    problem: Any = None
    # In float64 if its forward pass allows it, so that centering a filter leaves a sum of 0, and not rounding errors.
    for dtype in (torch.float64, None) if has_other_forward else (None,):
        try:
            tensors = {f"model.{key}": _copy(value, dtype) for key, value in named_tensors(module).items()}
            with evaluation_mode(module), torch.enable_grad():
                weights = functional_call(Evaluation(module, run), tensors, (), tie_weights=False)
        except Exception as error:  # anything that the code of others raises
            problem = error
            continue
        if len(weights) == 1 and (stored is None or weights[0].shape == stored.shape):
            return weights[0] if stored is None or not weights[0].to(stored.dtype).equal(stored) else stored
        problem = f"it does not multiply its input by one weight, but by {[tuple(one.shape) for one in weights]}"
    raise ValueError(
        f"{name or 'the model'}, a {type(module).__name__}, has its own forward pass or hooks, and the weight that it "
        f"uses cannot be determined: {problem}. To analyze stored weights instead, pass the state dict of the model."
    )


def _copy(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor, converted if it is floating; it requires a gradient if it is a parameter."""
    if not value.is_floating_point():
        return value
    return value.detach().to(dtype or value.dtype).requires_grad_(isinstance(value, nn.Parameter))


def _zeros(layer: Any) -> Tensor:
    """Return an input of a layer, with one position of a convolution."""
    like = next(layer.parameters())
    if isinstance(layer, _ConvNd):
        extents = [step * (size - 1) + 1 for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        return like.new_zeros(1, layer.in_channels, *extents)
    return like.new_zeros(1, layer.nx if isinstance(layer, Conv1D) else layer.in_features)


class _Recorder(TorchFunctionMode):
    """Records the operands of products that are computed from parameters, which require a gradient, outputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LAYERS | _PRODUCTS:
            for position, operand in enumerate((*args, *kwargs.values())):
                if isinstance(operand, Tensor) and operand.requires_grad and operand.ndim > 1:
                    self.weights.append(operand.detach().mT if name in _PRODUCTS and position else operand.detach())
        return func(*args, **kwargs)
