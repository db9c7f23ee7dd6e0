"""Finds the radially invariant weights of any model: by its structure, then by proof."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_sphere.optim.channels import ChannelDims
from hf_sphere.optim.example_inputs import example_inputs
from hf_sphere.optim.homogeneity import HomogeneityMode
from hf_sphere.optim.trial import call, exact, make_trial, move

Loss = Callable[[Any, Any], Tensor]


@dataclass
class RadialWeights:
    """What was found; prints as a table.

    Attributes:
        channel_dims: Name of each radially invariant weight to the axes that number its groups: `(0,)` where each
            filter is a group, `()` where the whole tensor is one.
        deviations: Name to the largest |<w, dL/dw>| / (|w| |dL/dw|) over its groups, 0 in exact arithmetic.
        rejected: Name of every other weight matrix or kernel to the reason why it is not.
        refuted: Those of the rejected that the structure proposed and the batch proved wrong.
        num_weights: Name to how many numbers the weight has.
    """

    channel_dims: dict[str, ChannelDims] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    refuted: list[str] = field(default_factory=list)
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
    It is made with weights moved at random off their initial values, and twice where a single group decides. All this
    happens on a copy of the model, in training mode and with the epsilons of its norms set to nearly zero; the model
    itself is left as it is. The copy is in float32, on the model's device, and gone afterwards.

    Args:
        model: Any module, before it is sharded.
        batch: Keywords (a mapping), arguments (a tuple or list) or the one argument of the model; made up if None,
            from what a transformers or timm model says of itself, or from the first layer.
        loss: Loss of the model's output and the batch; the output's own `loss` if it has one, else a random linear
            function of the output (the invariance holds for any).
        tolerance: Largest |<w, dL/dw>| / (|w| |dL/dw|) of a group that counts as zero. For groups of more than a
            hundred weights it falls as 1 / sqrt(D), as the value of a weight that is not invariant does.

    Raises:
        ValueError: If the model is sharded, on the meta device or cannot be copied, if tolerance is not in (0, 1), if
            no input could be made up, or if the output holds nothing to differentiate.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1; got {tolerance}.")
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    found = RadialWeights(num_weights={n: p.numel() for n, p in model.named_parameters() if p.ndim > 1})
    devices = {parameter.device for parameter in model.parameters()}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]), exact(devices):
        torch.manual_seed(0)
        trial = make_trial(model)
        mode, batch = _follow(trial, batch)
        candidates = [name for name in mode.normalized if name not in mode.broken]
        evidence = _gather(trial, candidates, batch, loss, tolerance)
    largest = max((_size(pair) for pairs in evidence.values() for pair in pairs), default=0.0)
    for name in found.num_weights:
        if name in frozen:
            found.rejected[name] = "frozen"
        elif name not in candidates:
            reached = "no normalisation" if name not in mode.normalized else "something else than normalisations"
            found.rejected[name] = mode.broken.get(name, f"its scale meets {reached}")
        elif max(map(_size, evidence[name])) <= 1e-6 * largest:
            found.rejected[name] = "no gradient reaches it in this batch, which proves nothing"
        elif max(evidence[name][0][0].shape[1:], default=1) == 1:
            found.rejected[name] = "its groups have a single weight each"
        else:
            dims, deviation = _finest_groups(evidence[name], tolerance)
            if dims is not None:
                found.channel_dims[name], found.deviations[name] = dims, deviation
            else:
                found.rejected[name] = f"<w, dL/dw> is {deviation:.1e} of |w| |dL/dw|, not 0"
                found.refuted.append(name)
    return found


Evidence = dict[str, list[tuple[Tensor, Tensor]]]


def _gather(trial: nn.Module, names: list[str], batch: Any, loss: Loss | None, tolerance: float) -> Evidence:
    """Weights and their gradients, once where many groups tell alike, twice where one alone might by chance."""
    evidence: Evidence = {name: [] for name in names}
    chosen = names
    for _ in range(2):
        if chosen:
            move(trial)
            for name, pair in _weights_and_gradients(trial, chosen, batch, loss).items():
                evidence[name].append(pair)
            chosen = [name for name in names if _finest_groups(evidence[name], tolerance)[0] == ()]
    return evidence


def _follow(trial: nn.Module, batch: Any) -> tuple[HomogeneityMode, Any]:
    """Follow the weights through a forward pass of the batch, or of the first made-up input that the model takes."""
    weights = {name: p for name, p in trial.named_parameters() if p.ndim > 1 and p.requires_grad}
    inputs = example_inputs(trial) if batch is None else [batch]
    failure = "nothing is known of its inputs"
    for example in inputs:
        mode = HomogeneityMode(weights)
        try:
            with torch.no_grad(), mode.watch(trial):
                output = call(trial, example)
        except Exception as error:
            if batch is not None:
                raise
            failure = f"{type(error).__name__}: {error}"
            continue
        mode.finish(output)
        return mode, example
    raise ValueError(
        f"no input could be made up for {type(trial).__name__} ({failure}). Pass a batch: build the optimiser from "
        "radial_parameter_groups(model, batch)."
    )


def _weights_and_gradients(
    trial: nn.Module, names: list[str], batch: Any, loss: Loss | None
) -> dict[str, tuple[Tensor, Tensor]]:
    parameters = dict(trial.named_parameters())
    weights = [parameters[name] for name in names]
    with torch.enable_grad():
        output = call(trial, batch)
        value = loss(output, batch) if loss is not None else getattr(output, "loss", None)
        if value is None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not leaves:
                raise ValueError(
                    f"the output of {type(trial).__name__}, a {type(output).__name__}, holds nothing to differentiate; "
                    "pass a loss of output and batch."
                )
            value = torch.stack([(leaf * torch.randn_like(leaf)).sum() for leaf in leaves]).sum()
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
    return {
        name: (weight.detach().clone(), torch.zeros_like(weight) if gradient is None else gradient)
        for name, weight, gradient in zip(names, weights, gradients, strict=True)
    }


def _size(pair: tuple[Tensor, Tensor]) -> float:
    weight, gradient = pair
    return (weight.double().norm() * gradient.double().norm()).item()


def _finest_groups(pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> tuple[ChannelDims | None, float]:
    """The finest invariant groups: along the first axis, the second (transposed convolutions), or the whole tensor."""
    weight = pairs[0][0]
    deviation = math.inf
    for dims in ((0,), (1,), ()):
        rest = [axis for axis in range(weight.ndim) if axis not in dims]
        count = math.prod(weight.shape[axis] for axis in rest)
        if any(weight.shape[axis] < 2 for axis in dims) or count < 2:
            continue
        deviation = max(_deviation(weight, gradient, rest) for weight, gradient in pairs)
        if deviation <= min(tolerance, 10 * tolerance / count**0.5):
            return dims, deviation
    return None, deviation


def _deviation(weight: Tensor, gradient: Tensor, rest: list[int]) -> float:
    """Largest |<w, g>| / (|w| |g|) over the groups that a gradient reaches; infinite where it is not finite."""
    weight, gradient = weight.double(), gradient.double()
    along = (weight * gradient).sum(rest).abs()
    lengths = weight.square().sum(rest).sqrt() * gradient.square().sum(rest).sqrt()
    # Groups with next to no gradient (dead units) hold rounding errors only.
    reached = lengths > 1e-6 * lengths.max()
    if not lengths.isfinite().all() or not reached.any():
        return math.inf
    return (along[reached] / lengths[reached]).max().item()
