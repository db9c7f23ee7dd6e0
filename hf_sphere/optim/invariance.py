"""Search for the radially invariant weights of any model by a numerical check of their gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_sphere.optim.channels import ChannelDims, Layout, group_size
from hf_sphere.optim.trial import call, exact, example_inputs, make_trial, move, quiet

Loss = Callable[[Any, Any], Tensor]

# A weight that is not invariant passes a check of a single group by chance in about 1 of 100 cases, whatever its size.
CHECKS = 3


@dataclass
class RadialWeights:
    """The result of `find_radial_weights`; prints as a table.

    Attributes:
        channel_dims: Name of each radially invariant weight to the axes that index its groups: `(0,)` if each filter is
            a group, `()` if the entire tensor is one.
        deviations: Name to the largest |<w, dL/dw>| / (|w| |dL/dw|) over its groups, 0 in exact arithmetic.
        rejected: Name of every other weight matrix or kernel to the reason why it is not radially invariant.
        num_weights: Name to the number of elements of the weight.
    """

    channel_dims: dict[str, ChannelDims] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    num_weights: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line per weight."""
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
        """Return the number of radially invariant weights and their share of the elements, in one line."""
        radial = sum(self.num_weights[name] for name in self.channel_dims)
        share = 100 * radial / max(1, sum(self.num_weights.values()))
        return (
            f"{len(self.channel_dims)} of {len(self.num_weights)} weight tensors are radially invariant "
            f"({share:.4g} % of their elements)"
        )


def find_radial_weights(
    model: nn.Module, batch: Any = None, loss: Loss | None = None, *, tolerance: float = 1e-3
) -> RadialWeights:
    """Find the weights whose scale does not affect the model's output.

    A function is radially invariant in a group of weights w exactly where <w, dL/dw> = 0 (Euler). Every weight with two
    or more axes is a candidate. Backward passes test these groupings in order: each slice along the first axis (filters
    before batch norm), each slice along the second (transposed convolutions), the entire tensor (weights before layer
    or RMS norm). The weights are perturbed at random before each pass, so that initial zeros and ones do not hide a
    dependence. A weight is radially invariant if it passes three times.

    The check runs on a copy of the model in float32, in training mode and with the epsilons of its norms set to nearly
    zero; the model itself is not changed. The check uses gradients: a detached dependence on the scale (`y.item()`) is
    not detected, as it has no gradient in training.

    Args:
        model: Any module, before it is sharded.
        batch: Keyword arguments (a mapping), arguments (a tuple or list) or the only argument of the model. If None, an
            input is generated from the configuration of a transformers or timm model, or from the first layer.
        loss: Function of the model's output and the batch. By default the output's own `loss` if it has one, else a
            random linear function of the output (the invariance holds for any loss).
        tolerance: Largest |<w, dL/dw>| / (|w| |dL/dw|) of a group that is considered zero. For groups of more than a
            hundred weights it decreases as 1 / sqrt(D), like the value of a weight that is not invariant.

    Raises:
        ValueError: If the model is sharded, on the meta device or cannot be copied, if tolerance is not in (0, 1), if
            no input could be generated, or if the output contains nothing to differentiate.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1; got {tolerance}.")
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    found, deviations = RadialWeights(), {}
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            found.num_weights[name] = weight.numel()
            if not weight.requires_grad:
                found.rejected[name] = "frozen"
            elif max(weight.shape[1:]) < 2:
                found.rejected[name] = "its groups have a single weight each"
            else:
                deviations[name] = dict.fromkeys(_possible_groups(weight), 0.0)
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=on_gpu), exact(devices), quiet():
        torch.manual_seed(0)
        trial = make_trial(model)
        batch = fitting_example(trial) if batch is None else batch
        for _ in range(CHECKS):
            move(trial)
            found.rejected |= _check(trial, deviations, batch, loss, tolerance)
    for name, groups in deviations.items():
        found.channel_dims[name], found.deviations[name] = next(iter(groups.items()))
    return found


def _possible_groups(weight: Tensor) -> list[ChannelDims]:
    """Return the axes that may index the groups, the finest groups first; a group has two weights or more."""
    possible = [dims for dims in ((0,), (1,), ()) if all(weight.shape[axis] > 1 for axis in dims)]
    return [dims for dims in possible if group_size(weight, dims) > 1]


def fitting_example(trial: nn.Module) -> Any:
    """Return the first generated input that the model accepts."""
    failure = "no layer determines the input shape"
    for example in example_inputs(trial):
        try:
            with torch.no_grad():
                call(trial, example)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        else:
            return example
    raise ValueError(
        f"no input could be generated for {type(trial).__name__} ({failure}). Pass a batch: build the optimizer from "
        "radial_parameter_groups(model, batch); for the Trainer, optimizer_cls_and_kwargs=(optimizer class, "
        '{"params": radial_parameter_groups(model, batch), "lr": ...}).'
    )


def _check(
    trial: nn.Module, deviations: dict[str, dict[ChannelDims, float]], batch: Any, loss: Loss | None, tolerance: float
) -> dict[str, str]:
    """Remove the weights and groups that fail from `deviations`.

    Returns:
        Name of each weight that failed to the reason.
    """
    if not deviations:
        return {}
    parameters = dict(trial.named_parameters())
    weights = {name: parameters[name] for name in deviations}
    gradients = _gradients(trial, weights, batch, loss)
    sizes = {name: (weights[name].double().norm() * g.double().norm()).item() for name, g in gradients.items()}
    least = 1e-6 * max(sizes.values(), default=0.0)
    rejected = {}
    for name, groups in list(deviations.items()):
        if sizes.get(name, 0.0) <= least:
            rejected[name] = "no gradient reaches it in this batch"
        else:
            for dims in list(groups):
                deviation = _deviation(weights[name], gradients[name], dims)
                groups[dims] = max(groups[dims], deviation)
                if not deviation <= min(tolerance, 10 * tolerance / group_size(weights[name], dims) ** 0.5):
                    del groups[dims]
            if not groups:
                rejected[name] = f"<w, dL/dw> is {deviation:.1e} of |w| |dL/dw|, not 0"
        if name in rejected:
            del deviations[name]
    return rejected


def _gradients(trial: nn.Module, weights: Mapping[str, Tensor], batch: Any, loss: Loss | None) -> dict[str, Tensor]:
    """Compute the gradients of the weights that have one."""
    with torch.enable_grad():
        output = call(trial, batch)
        value = loss(output, batch) if loss is not None else getattr(output, "loss", None)
        if value is None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not leaves:
                raise ValueError(
                    f"the output of {type(trial).__name__}, a {type(output).__name__}, contains nothing to "
                    "differentiate; pass a loss of output and batch."
                )
            value = torch.stack([(leaf * torch.randn_like(leaf)).sum() for leaf in leaves]).sum()
        gradients = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, gradients, strict=True) if gradient is not None}


def _deviation(weight: Tensor, gradient: Tensor, dims: ChannelDims) -> float:
    """Return the largest |<w, g>| / (|w| |g|) over the groups with a gradient; infinite if it is not finite."""
    layout = Layout(weight, dims)
    w, g = (layout.matrix(tensor).double() for tensor in (weight.detach(), gradient))
    along, lengths = (w * g).sum(1).abs(), w.norm(dim=1) * g.norm(dim=1)
    # Groups with almost no gradient (dead units) contain rounding errors only.
    reached = lengths > 1e-6 * lengths.max()
    if not lengths.isfinite().all() or not reached.any():
        return math.inf
    return (along[reached] / lengths[reached]).max().item()
