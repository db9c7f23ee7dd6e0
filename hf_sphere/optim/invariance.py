"""Finds the radially invariant weights of any model: by its structure, then by proof."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from hf_sphere.optim.channels import ChannelDims
from hf_sphere.optim.examples import example_inputs
from hf_sphere.optim.homogeneity import HomogeneityMode

Loss = Callable[[Any, Any], Tensor]

# The proof is made at enlarged weights: then the epsilon of a norm, which breaks the invariance a little, is too small
# beside their variance to be taken for a dependence on the scale.
_ENLARGED = 1024.0


@dataclass
class RadialWeights:
    """What was found; prints as a table.

    Attributes:
        channel_dims: Name of each radially invariant weight to the axes that number its groups: `(0,)` where each
            filter is a group, `()` where the whole tensor is one.
        deviations: Name to the largest |<w, dL/dw>| / (|w| |dL/dw|) over its groups, 0 in exact arithmetic.
        rejected: Name of every other weight matrix or kernel to the reason why it is not.
        num_weights: Name to how many numbers the weight has.
    """

    channel_dims: dict[str, ChannelDims] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    num_weights: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line a weight."""
        width = max(map(len, self.num_weights), default=0)
        lines = [self.summary()]
        for name in self.num_weights:
            if name in self.channel_dims:
                found = f"channel_dims {list(self.channel_dims[name])}, deviation {self.deviations[name]:.1e}"
            else:
                found = f"not radial: {self.rejected[name]}"
            lines.append(f"  {name:<{width}}  {found}")
        return "\n".join(lines)

    def summary(self) -> str:
        """How many there are, in one line."""
        radial = sum(self.num_weights[name] for name in self.channel_dims)
        share = 100 * radial / max(1, sum(self.num_weights.values()))
        return (
            f"{len(self.channel_dims)} of {len(self.num_weights)} weight tensors are radially invariant "
            f"({share:.4g} % of their numbers)"
        )


def find_radial_weights(
    model: nn.Module, batch: Any = None, loss: Loss | None = None, *, tolerance: float = 1e-3
) -> RadialWeights:
    """Find the weights whose scale the model's output does not depend on.

    Structure proposes: a forward pass is followed, and a weight is a candidate if on every path it stays homogeneous
    (no bias, activation or residual sum that its scale would show in) until a normalisation takes the scale away:
    batch, group, instance, layer and RMS norm, weight normalisation, `F.normalize`. Then the candidates are proved. A
    function is radially invariant in w exactly where <w, dL/dw> = 0 (Euler), so a backward pass tells, group by group.
    It is made at weights, norms and biases that are moved at random off their initial values (zeros and ones hide
    dependences), in training mode. The model itself is left as it is: weights, buffers, modes and random numbers.

    Args:
        model: Any module, before it is sharded.
        batch: Keywords (a mapping), arguments (a tuple or list) or the one argument of the model; made up if None,
            from what a transformers or timm model says of itself, or from the first layer.
        loss: Loss of the model's output and the batch; the output's own `loss` if it has one, else a random linear
            function of the output (the invariance holds for any).
        tolerance: Largest |<w, dL/dw>| / (|w| |dL/dw|) of a group that counts as zero.

    Raises:
        ValueError: If the model is sharded or on the meta device, if tolerance is not in (0, 1), or if no input could
            be made up for it.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1; got {tolerance}.")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    _check_parameters(model)
    with _training_mode(model), torch.random.fork_rng(devices=_devices(model)):
        torch.manual_seed(0)
        parameters = {name: _moved(p) for name, p in model.named_parameters()}
        mode, batch = _follow(model, parameters, batch)
        candidates = [name for name in mode.normalized if name not in mode.broken]
        found = RadialWeights(num_weights={n: p.numel() for n, p in model.named_parameters() if p.ndim > 1})
        gradients = _gradients(model, parameters, candidates, batch, loss) if candidates else {}
    for name in found.num_weights:
        if name not in candidates:
            reached = "no normalisation" if name not in mode.normalized else "something else than normalisations"
            found.rejected[name] = mode.broken.get(name, f"its scale meets {reached}")
            continue
        dims, deviation = _finest_groups(parameters[name], gradients[name], tolerance)
        if dims is None:
            found.rejected[name] = f"<w, dL/dw> is {deviation:.1e} of |w| |dL/dw|, and its groups would have to have 0"
        else:
            found.channel_dims[name], found.deviations[name] = dims, deviation
    return found


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded; find the groups before the model is sharded.")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; the proof needs real weights.")


@contextlib.contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """As the optimiser will meet the model: a model in evaluation is switched, one in training stays as it is."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def _moved(parameter: Tensor) -> Tensor:
    """A float32 copy moved off zeros and ones, at which a dependence on the scale may not show."""
    value = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
    spread = value.square().mean().sqrt() if value.numel() else value.sum()
    return value + 0.1 * torch.where(spread > 0, spread, 1.0) * torch.randn_like(value)


def _follow(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any) -> tuple[HomogeneityMode, Any]:
    """Follow the weights through a forward pass of the batch, or of the first made-up input that the model takes."""
    weights = {name: parameters[name] for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad}
    inputs = example_inputs(model) if batch is None else [batch]
    failure = "nothing is known of its inputs"
    for example in inputs:
        mode = HomogeneityMode(weights)
        try:
            with torch.no_grad(), mode.watch(model):
                output = _call(model, parameters, example)
        except Exception as error:
            if batch is not None:
                raise
            failure = f"{type(error).__name__}: {error}"
            continue
        mode.finish(output)
        return mode, example
    raise ValueError(f"no input could be made up for {type(model).__name__} ({failure}); pass a batch.")


def _call(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any) -> Any:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dtypes = {p.dtype for p in model.parameters()}

    def cast(leaf: Any) -> Any:
        low = isinstance(leaf, Tensor) and leaf.dtype in dtypes
        return leaf.to(torch.promote_types(leaf.dtype, torch.float32)) if low else leaf

    batch = tree_map(cast, batch)
    state = {**parameters, **tree_map(cast, buffers)}
    if isinstance(batch, Mapping):
        return functional_call(model, state, (), dict(batch))
    return functional_call(model, state, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))


def _gradients(
    model: nn.Module, parameters: dict[str, Tensor], names: list[str], batch: Any, loss: Loss | None
) -> dict[str, Tensor]:
    enlarged = {name: (_ENLARGED * parameters[name]).requires_grad_() for name in names}
    with torch.enable_grad():
        output = _call(model, {**parameters, **enlarged}, batch)
        value = loss(output, batch) if loss is not None else getattr(output, "loss", None)
        if value is None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            value = torch.stack([(leaf * torch.randn_like(leaf)).sum() for leaf in leaves]).sum()
        gradients = torch.autograd.grad(value, list(enlarged.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameters[name]) if gradient is None else gradient
        for name, gradient in zip(names, gradients, strict=True)
    }


def _finest_groups(weight: Tensor, gradient: Tensor, tolerance: float) -> tuple[ChannelDims | None, float]:
    """The finest invariant groups: along the first axis, the second (transposed convolutions), or the whole tensor."""
    deviation = math.inf
    for dims in ((0,), (1,), ()):
        rest = [axis for axis in range(weight.ndim) if axis not in dims]
        if any(weight.shape[axis] < 2 for axis in dims) or math.prod(weight.shape[axis] for axis in rest) < 2:
            continue
        along = (weight.double() * gradient.double()).sum(rest)
        lengths = weight.double().square().sum(rest).sqrt() * gradient.double().square().sum(rest).sqrt()
        if not lengths.any() or not lengths.isfinite().all():
            return None, math.nan
        deviation = (along.abs() / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)).max().item()
        if deviation <= tolerance:
            return dims, deviation
    return None, deviation


def radial_parameter_groups(
    model: nn.Module, batch: Any = None, loss: Loss | None = None, *, tolerance: float = 1e-3
) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters into groups for the optimisers of this library.

    Radially invariant weights come with the `channel_dims` of their groups; other weights are ordinary; norms, biases,
    temperatures and other parameters of one axis or none are ordinary and do not decay. The groups hold named
    parameters. Parameters that the model names in a method `parameter_options() -> {name: settings}` get a group of
    their own with those settings.

    Args:
        model: See `find_radial_weights`, as for the other arguments.
        batch: A batch of real data makes the proof stronger.
        loss: Loss of the model's output and the batch.
        tolerance: Largest deviation that counts as zero.

    Returns:
        Parameter groups; the radial ones first.

    Raises:
        ValueError: See `find_radial_weights`.

    Warns:
        UserWarning: If no weight is radially invariant, or if the batch proves wrong what the structure says.

    Example:
        >>> optimizer = AdamSRT(radial_parameter_groups(model), lr=1e-3)
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    found = find_radial_weights(model, batch, loss, tolerance=tolerance)
    wrong = {name: reason for name, reason in found.rejected.items() if reason.startswith("<w")}
    if wrong:
        listed = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
        warnings.warn(
            f"The structure of the model says that these weights are radially invariant, the batch proves they are "
            f"not; they are treated as ordinary ones. {listed}",
            stacklevel=2,
        )
    if not found.channel_dims:
        warnings.warn(
            f"{type(model).__name__} has no radially invariant weight, so the optimiser will be the ordinary one. "
            f"Looked at:\n{found}",
            stacklevel=2,
        )
    return parameter_groups(model, found.channel_dims)


def parameter_groups(model: nn.Module, channel_dims: Mapping[str, ChannelDims] | None = None) -> list[dict[str, Any]]:
    """Sort trainable parameters into radial ones, other weights, those that do not decay, and those with own settings.

    Args:
        model: Any module; its method `parameter_options`, if it has one, names parameters with settings of their own.
        channel_dims: Radially invariant weights.

    Raises:
        ValueError: If `parameter_options` names a parameter that the model lacks.
    """
    channel_dims = channel_dims or {}
    own: Mapping[str, Mapping[str, Any]] = getattr(model, "parameter_options", dict)()
    missing = set(own) - {name for name, _ in model.named_parameters()}
    if missing:
        raise ValueError(f"settings are given for parameters that the model lacks: {', '.join(sorted(missing))}.")
    radial: dict[ChannelDims, dict[str, Any]] = {}
    weights: dict[str, Any] = {"params": []}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    special = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in own:
            special.append({"params": [(name, parameter)], "weight_decay": 0.0, **own[name]})
        elif name in channel_dims:
            dims = channel_dims[name]
            radial.setdefault(dims, {"params": [], "channel_dims": dims})["params"].append((name, parameter))
        else:
            (weights if parameter.ndim > 1 else plain)["params"].append((name, parameter))
    ordered = [radial[dims] for dims in sorted(radial, reverse=True)]
    return [group for group in (*ordered, weights, plain, *special) if group["params"]]
