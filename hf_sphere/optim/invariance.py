"""Search for the scale-invariant weights of any model by a numerical check of their gradients."""

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_sphere.optim.layout import ChannelDims, group_size
from hf_sphere.utils.modules import full_precision, unwrap, widest_dtype

TOLERANCE = 1e-3
"""Largest |<w, dL/dw>| / (|w| |dL/dw|) of a group that is considered zero.

For groups of more than a hundred weights it decreases as 1 / sqrt(D), like the value of a weight that is not invariant.
"""
# A weight that is not invariant passes a check of a single group by chance in about 1 of 100 cases, whatever its size.
CHECKS = 3


@dataclass
class ScaleInvariantWeights:
    """The result of `find_scale_invariant_weights`; prints as a table.

    Attributes:
        channel_dims: Name of each scale-invariant weight to the axes that index its groups: `(0,)` if each filter is
            a group, `()` if the entire tensor is one.
        blocks: Name to the number of equal blocks of rows (heads) that are invariant each, of weights with groups `()`.
        deviations: Name to the largest |<w, dL/dw>| / (|w| |dL/dw|) over its groups, 0 in exact arithmetic.
        rejected: Name of every other weight matrix or kernel to the reason why it is not scale-invariant.
        num_weights: Name to the number of elements of the weight.
    """

    channel_dims: dict[str, ChannelDims] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    num_weights: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line per weight."""
        width = max(map(len, self.num_weights), default=0)
        lines = [self.summary()]
        for name in self.num_weights:
            if name in self.channel_dims:
                result = f"channel_dims {list(self.channel_dims[name])}, deviation {self.deviations[name]:.1e}"
                result += f", also each of {self.blocks[name]} blocks" if name in self.blocks else ""
            else:
                result = f"not scale-invariant: {self.rejected[name]}"
            lines.append(f"  {name:<{width}}  {result}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the number of scale-invariant weights and their fraction of the elements, in one line."""
        invariant = sum(self.num_weights[name] for name in self.channel_dims)
        share = f"{100 * invariant / max(1, sum(self.num_weights.values())):.4g} % of their elements"
        return f"{len(self.channel_dims)} of {len(self.num_weights)} weight tensors are scale-invariant ({share})"


def find_scale_invariant_weights(model: nn.Module, batch: Any = None) -> ScaleInvariantWeights:
    """Find the weights whose scale does not affect the model's output.

    A function is scale-invariant in a group of weights w exactly where <w, dL/dw> = 0 (Euler). Every weight with two
    or more axes is a candidate. Backward passes test these groupings in order: each slice along the first axis (filters
    before batch norm), each slice along the second (transposed convolutions), the entire tensor (weights before layer
    or RMS norm), and then its equal blocks (heads). The weights are perturbed at random before each pass, so that
    initial zeros and ones do not hide a dependence. A weight is scale-invariant if it passes three times.

    The check runs on a copy of the model in float32, in training mode and with the epsilons of its norms set to nearly
    zero; the model itself is not changed. The check uses gradients: a detached dependence on the scale (`y.item()`) is
    not detected, as it has no gradient in training.

    Args:
        model: Any module, before it is sharded.
        batch: Keyword arguments (a mapping), arguments (a tuple or list) or the only argument of the model. If None, an
            input is generated from the configuration of a transformers or timm model, or from the first layer. Leave
            out labels if the model does not compute its loss.

    Raises:
        ValueError: If the model is sharded, if it does not accept the batch, if none could be generated, or if the
            output contains nothing to differentiate.

    Example:
        >>> find_scale_invariant_weights(network, images).channel_dims
        {'0.weight': (0,), '2.weight': (0,)}
    """
    model = unwrap(model)
    fixed = [name for name, module in model.named_modules() if isinstance(module, _NormBase) and not module.training]
    if model.training and fixed:
        what = "is in evaluation mode, and weights before it are not scale-invariant; call model.train()"
        logging.getLogger(__name__).warning(f"batch norm {fixed[0]} {what}")
    invariant = ScaleInvariantWeights()
    deviations: dict[str, dict[ChannelDims, float]] = {}  # of the groupings that have passed so far
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            invariant.num_weights[name] = weight.numel()
            if not weight.requires_grad:
                invariant.rejected[name] = "frozen"
            elif max(weight.shape[1:]) < 2:
                invariant.rejected[name] = "its groups have a single weight each"
            else:
                # The finest groups first; a group has two weights or more.
                possible = [dims for dims in ((0,), (1,), ()) if all(weight.shape[axis] > 1 for axis in dims)]
                deviations[name] = {dims: 0.0 for dims in possible if group_size(weight, dims) > 1}
    with open_trial(model, batch) as (trial, batch), torch.enable_grad():
        weights = dict(trial.named_parameters())
        for _ in range(CHECKS):
            if not deviations:
                break
            perturb(trial)
            output = call(trial, batch)
            if (value := getattr(output, "loss", None)) is None:  # a random linear function
                value = torch.stack([(leaf * torch.randn_like(leaf)).sum() for leaf in differentiable(output)]).sum()
            found = torch.autograd.grad(value, [weights[name] for name in deviations], allow_unused=True)
            gradients = {name: g.to_dense() for name, g in zip(deviations, found, strict=True) if g is not None}
            measured = {name: _measure(weights[name], g, deviations[name]) for name, g in gradients.items()}
            least = 1e-6 * max((size for size, _ in measured.values()), default=0.0)
            for name, groups in list(deviations.items()):
                size, largest = measured.get(name, (0.0, {}))
                reason = "no gradient reaches it in this batch"
                if size <= least:
                    groups, largest = {}, {}
                for dims, deviation in largest.items():
                    groups[dims] = max(groups[dims], deviation)
                    if not deviation <= _bound(group_size(weights[name], dims)):
                        del groups[dims]
                    reason = f"<w, dL/dw> is {deviation:.1e} of |w| |dL/dw|, not 0"
                if [*groups] == [()]:
                    count = _count_blocks(weights[name], gradients[name])
                    invariant.blocks[name] = min(count, invariant.blocks.get(name, count))
                if not groups:
                    invariant.rejected[name] = reason
                    del deviations[name]
    for name, groups in deviations.items():
        invariant.channel_dims[name], invariant.deviations[name] = next(iter(groups.items()))
    invariant.blocks = {name: n for name, n in invariant.blocks.items() if n > 1 and name in invariant.channel_dims}
    return invariant


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors of an output that have a gradient; a `ValueError` is raised if there are none."""
    fields = [vars(leaf) if dataclasses.is_dataclass(leaf) else leaf for leaf in tree_leaves(output)]
    leaves = [leaf for leaf in tree_leaves(fields) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError(f"the output {type(output).__name__} contains nothing to differentiate.")
    return leaves


def _bound(size: int) -> float:
    return min(TOLERANCE, 10 * TOLERANCE / size**0.5)


def _measure(weight: Tensor, gradient: Tensor, groups: Iterable[ChannelDims]) -> tuple[float, dict[ChannelDims, float]]:
    """Return |w| |g|, and the largest |<w, g>| / (|w| |g|) over each kind of groups; infinite if it is not finite."""
    dtype = widest_dtype(weight)
    w, g = weight.detach().to(dtype), gradient.to(dtype)  # once, as new memory takes most of the time
    axes = {dims: [axis for axis in range(w.ndim) if axis not in dims] for dims in groups}
    lengths = {dims: vector_norm(w, dim=axes[dims]) * vector_norm(g, dim=axes[dims]) for dims in axes}
    size = (w.norm() * g.norm()).item()
    products = torch.mul(w, g, out=None if g is gradient else g)
    return size, {dims: _largest(products.sum(axes[dims]), lengths[dims]) for dims in axes}


def _largest(products: Tensor, lengths: Tensor) -> float:
    # Groups with almost no gradient (dead units) contain rounding errors only.
    reached = lengths > 1e-6 * lengths.max()
    if not lengths.isfinite().all() or not reached.any():
        return math.inf
    return (products.abs()[reached] / lengths[reached]).max().item()


def _count_blocks(weight: Tensor, gradient: Tensor) -> int:
    """Return the largest number of equal blocks along the first axis, less than that of its slices, that pass."""
    w, g = (tensor.detach().to(widest_dtype(weight)).flatten(1) for tensor in (weight, gradient))
    rows = (w * g).sum(1), w.norm(dim=1), g.norm(dim=1)  # computed once, as large sizes have a hundred divisors
    for count in (count for count in range(len(weight) - 1, 1, -1) if len(weight) % count == 0):
        products, lengths, slopes = (each.unflatten(0, (count, -1)) for each in rows)
        deviation = _largest(products.sum(1), lengths.norm(dim=1) * slopes.norm(dim=1))
        if deviation <= _bound(weight.numel() // count):
            return count
    return 1


_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
_SIDES = (32, 28, 64, 84, 96, 128, 224, 299, 16, 8)
_BATCH = 4  # batch norm over a 1 x 1 map has one value per image, and has no gradient for two values


@contextlib.contextmanager
def open_trial(model: nn.Module, batch: Any = None) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a copy of a model for the numerical check and an input that it accepts; random numbers have a fixed seed.

    The copy is in float32 or better and training mode, with negligible epsilons of norms. Meanwhile torch computes in
    full float32, without autocast and TF32, and models log no warnings.
    """
    kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        stack.enter_context(full_precision(*kinds))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(max(logging.root.manager.disable, logging.WARNING))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                how = "call `form_groups` of the optimizer first, then fully_shard, then build it from the shards"
                raise ValueError(f"{name} is sharded, but groups are found in whole weights: {how}.")
        attributes = (value for module in model.modules() for value in vars(module).values())
        computed = (value for value in attributes if isinstance(value, Tensor) and not value.is_leaf)
        trial = copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})  # torch refuses them
        if "_original_forward" in vars(trial):  # that of Accelerate enters autocast
            trial.forward = vars(trial)["_original_forward"]
        if not any(parameter.dtype == torch.float64 for parameter in trial.parameters()):
            trial.to(torch.float32)
        if not model.training:  # otherwise the modes of its modules are kept
            trial.train()
        for module in trial.modules():
            for name in _EPSILONS:
                if isinstance(getattr(module, name, None), float) or (name == "eps" and isinstance(module, nn.RMSNorm)):
                    setattr(module, name, 1e-20)
            for name in _CHECKPOINTING:
                if getattr(module, name, False) is True:
                    setattr(module, name, False)
        failure: Exception = ValueError("no layer determines the input shape")
        for example in example_inputs(trial) if batch is None else [batch]:
            try:
                with torch.no_grad():
                    call(trial, example)
                break
            except Exception as error:
                failure = error
        else:
            what = f"accept {'any generated input' if batch is None else 'the batch'}: {failure!r}"
            how = "Pass a batch to build_optimizer or form_groups: a mapping for model(**batch), a tuple for "
            how += "model(*batch), a tensor for model(batch), without labels if the model does not compute its loss"
            raise ValueError(f"{type(trial).__name__} does not {what}. {how}.") from failure
        yield trial, example


@torch.no_grad()
def perturb(trial: nn.Module) -> None:
    """Perturb every parameter at random by a tenth of its root mean square, or by 0.1 if it is (nearly) zero."""
    for parameter in trial.parameters():
        if parameter.is_floating_point() and parameter.numel():
            size = parameter.norm() / parameter.numel() ** 0.5
            least = 1e-4 if parameter.ndim > 1 else 1e-2
            parameter.add_(torch.randn_like(parameter).mul_(0.1 * torch.where(size > least, size, 1.0)))


def call(trial: nn.Module, batch: Any) -> Any:
    """Call a model with keyword arguments (a mapping), arguments (a tuple or list) or one argument, in its dtype."""
    dtype = next((p.dtype for p in trial.parameters() if p.is_floating_point()), torch.float32)
    batch = tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)
    if isinstance(batch, Mapping):
        return trial(**batch)
    return trial(*batch) if isinstance(batch, (tuple, list)) else trial(batch)


def example_inputs(model: nn.Module) -> Iterator[Any]:
    """Yield inputs that the model may accept, by its configuration or by its first layer with weights."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None) if config is not None else None
    if name == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        ids = torch.randint(0, getattr(text, "vocab_size", 100), (2, 16), device=device)
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids}
    elif name == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        yield {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width, device=device)}
    elif name == "input_values":
        yield {name: torch.randn(2, 16000, device=device)}
    if size := (getattr(model, "pretrained_cfg", None) or {}).get("input_size"):
        yield torch.randn(_BATCH, *size, device=device)
    kinds = (_ConvNd, nn.Linear, nn.Embedding)
    first = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if isinstance(first, nn.Embedding):
        yield torch.randint(0, first.num_embeddings, (2, 16), device=device)
    elif isinstance(first, nn.Linear):
        yield torch.randn(_BATCH, first.in_features, device=device)
        yield torch.randn(_BATCH, 5, first.in_features, device=device)
    elif first is not None:
        for side in _SIDES:
            yield torch.randn(_BATCH, first.in_channels, *[side] * len(first.kernel_size), device=device)
