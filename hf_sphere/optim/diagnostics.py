"""Diagnostics of steps on scale-invariant weights: effective learning rate, effective direction, norms."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from hf_sphere.optim.invariance import find_scale_invariant_weights
from hf_sphere.optim.layout import ChannelDims, Layout, local
from hf_sphere.utils.modules import unwrap, widest_dtype

logger = logging.getLogger(__name__)


@dataclass
class EffectiveStep:
    """The effect of a step x - lr a / b on the directions u = x / |x| of K groups with D weights each.

    Attributes:
        learning_rate: The effective learning rate lr_e = lr / (|x|^2 s - lr <c, u>), with s = |b| / sqrt(D), (K,). For
            plain SGD at the start of training it is about lr / |x|^2.
        direction: The effective direction, tangent to the sphere: c - <c, u> u with c = |x| a / (b / s), (K, D).
        angle: Angle between the weights before and after the step, radians, (K,): atan(lr_e |direction|) up
            to a right angle. 0 for a group at zero.
        weight_norm: |x|, (K,).
        anisotropy: Standard deviation of b over its mean, (K,), a measure of how much the second moment changes the
            direction of a; 0 for SGD and for one second moment per group.
    """

    learning_rate: Tensor
    direction: Tensor
    angle: Tensor
    weight_norm: Tensor
    anisotropy: Tensor


def effective_step(weight: Tensor, momentum: Tensor, denominator: Tensor, lr: float | Tensor) -> EffectiveStep:
    """Compute the effect of a step on the sphere.

    Args:
        weight: x, (K, D).
        momentum: a, (K, D).
        denominator: b, (K, D) or (K, 1).
        lr: Learning rate.

    Reference:
        Roburin et al., "A spherical perspective on learning with normalization layers", theorem on the effective step
        of a generic scheme, equations of lr_e and c.

    Example:
        >>> effective_step(torch.eye(2), torch.ones(2, 2), torch.ones(2, 2), lr=0.1).angle
        tensor([0.1107, 0.1107])
    """
    denominator = denominator.expand_as(weight)
    tiny = torch.finfo(weight.dtype).tiny
    norm = weight.norm(dim=1).clamp_min(tiny)
    unit = weight / norm.unsqueeze(1)
    scale = denominator.square().mean(1).sqrt()
    scaled = norm.unsqueeze(1) * momentum / (denominator / scale.clamp_min(tiny).unsqueeze(1)).clamp_min(tiny)
    along = (scaled * unit).sum(1)
    direction = scaled - along.unsqueeze(1) * unit
    radial = norm.square() * scale - lr * along
    learning_rate = torch.where(norm > tiny, lr / radial, 0.0)
    return EffectiveStep(
        learning_rate=learning_rate,
        direction=direction,
        angle=torch.where(norm > tiny, torch.atan2(lr * direction.norm(dim=1), radial), 0.0),
        weight_norm=norm,
        anisotropy=denominator.std(1, correction=0) / denominator.mean(1).clamp_min(tiny),
    )


@torch.no_grad()
def step_diagnostics(
    optimizer: Optimizer, channel_dims: Mapping[str, ChannelDims] | None = None, model: nn.Module | None = None
) -> dict[str, dict[str, float]]:
    """Measure the effective step of each scale-invariant weight: means over the weight's groups.

    The step is computed from the current moments and weights. Right after `step` this is the step just taken, except
    for the change of the weights and the transport of the momentum.

    Args:
        optimizer: One of this library's, or torch's Adam, AdamW or SGD built from named parameters (such as in
            `parameter_groups`), after a step.
        channel_dims: Name of each scale-invariant weight to the axes of its groups, as in
            `find_scale_invariant_weights(model).channel_dims`; from the optimizer's groups if None.
        model: Provides the parameter names if the optimizer was built without names.

    Returns:
        For each weight `effective_learning_rate`, `effective_direction_norm`, `step_angle` (radians), `weight_norm` and
        `anisotropy` of the second moment.

    Raises:
        ValueError: If the optimizer is Muon or a hyperball one.

    Example:
        >>> optimizer = AdamSRT(scale_invariant_groups(network, images), lr=1e-3)
        >>> network(images).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(step_diagnostics(optimizer)["0.weight"])
        ['anisotropy', 'effective_direction_norm', 'effective_learning_rate', 'step_angle', 'weight_norm']
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
    _check_rules(optimizer)
    by_id = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    measured = {}
    for group in optimizer.param_groups:
        names = group.get("param_names") or [by_id.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"])]
        for name, parameter in zip(names, group["params"], strict=True):
            dims = group.get("channel_dims") if channel_dims is None else channel_dims.get(name)
            if dims is None:
                continue
            state = optimizer.state.get(parameter, {})
            if not local(parameter).numel() or ("exp_avg_sq" not in state and isinstance(optimizer, torch.optim.Adam)):
                continue  # no local shard, or no step yet
            layout = Layout(local(parameter), tuple(dims))
            if "exp_avg_sq" in state:
                (beta1, beta2), number, second = group["betas"], float(state["step"]), local(state["exp_avg_sq"])
                momentum = layout.matrix(local(state["exp_avg"])) / (1 - beta1**number)
                is_full = second.numel() == local(parameter).numel()
                second = layout.matrix(second) if is_full else second.reshape(-1, 1)
                denominator = (second / (1 - beta2**number)).sqrt() + group["eps"]
                if not is_full and getattr(optimizer, "scales_with_dim", True):
                    denominator = denominator / momentum.shape[1] ** 0.5
            else:
                gradient: Any = parameter.grad  # measure before `zero_grad`
                buffer = state.get("momentum_buffer")
                momentum = layout.matrix(local(gradient if buffer is None else buffer))
                denominator = torch.ones_like(momentum[:, :1])
            scheme = layout.matrix(local(parameter)), momentum, denominator
            weight, momentum, denominator = (each.to(widest_dtype(parameter)) for each in scheme)
            step = effective_step(weight, momentum, denominator, float(group["lr"]))
            values = {
                "effective_learning_rate": step.learning_rate,
                "effective_direction_norm": step.direction.norm(dim=1),
                "step_angle": step.angle,
                "weight_norm": step.weight_norm,
                "anisotropy": step.anisotropy,
            }
            measured[name] = {quantity: of_groups.mean().item() for quantity, of_groups in values.items()}
    return measured


def find_channel_dims(model: nn.Module, optimizer: Optimizer, batch: Any = None) -> dict[str, ChannelDims]:
    """Return the channel axes of the scale-invariant weights by name, from the optimizer if it has them.

    Args:
        model: The model, which `find_scale_invariant_weights` checks if the optimizer has no such axes.
        optimizer: The optimizer.
        batch: A batch of real data for the check.

    Raises:
        ValueError: If the optimizer is Muon or a hyperball one.

    Example:
        >>> find_channel_dims(network, torch.optim.Adam(network.parameters()), images)
        {'0.weight': (0,), '2.weight': (0,)}
    """
    _check_rules(optimizer)
    groups = [group for group in optimizer.param_groups if group.get("channel_dims") is not None]
    of_groups = {name: group["channel_dims"] for group in groups for name in group.get("param_names", ())}
    channel_dims = of_groups or find_scale_invariant_weights(model, batch).channel_dims
    if not channel_dims:
        logger.warning("No diagnostics of steps are logged: the model has no scale-invariant weights.")
    return channel_dims


def _check_rules(optimizer: Optimizer) -> None:
    if any(group.get("muon") or group.get("hyperball") for group in optimizer.param_groups):
        what = f"steps x - lr a / b, which {type(getattr(optimizer, 'optimizer', optimizer)).__name__} does not take"
        raise ValueError(f"step diagnostics (diagnostics_steps) are for {what}; omit them.")


def as_metrics(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Name measurements for a tracker: `scale_invariant/<quantity>/<layer>`, without a layer for the mean.

    Example:
        >>> as_metrics({"0.weight": {"effective_lr": 0.1}})
        {'scale_invariant/effective_lr': 0.1, 'scale_invariant/effective_lr/0': 0.1}
    """
    metrics = {}
    for quantity in next(iter(measured.values()), {}):
        values = {name.removesuffix(".weight"): values[quantity] for name, values in measured.items()}
        metrics[f"scale_invariant/{quantity}"] = sum(values.values()) / len(values)
        metrics |= {f"scale_invariant/{quantity}/{layer}": value for layer, value in values.items()}
    return metrics


class StepDiagnosticsCallback(TrainerCallback):
    """Logs `step_diagnostics` from the Trainer of transformers.

    Args:
        log: The Trainer's `log`.
        every: Steps between two logs.

    Example:
        >>> trainer.add_callback(StepDiagnosticsCallback(trainer.log, every=100))  # doctest: +SKIP
    """

    def __init__(self, log: Callable[[dict[str, float]], None], every: int = 100) -> None:
        self._log, self._every = log, every
        self._channel_dims: dict[str, ChannelDims] = {}
        self._measured: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the scale-invariant weights."""
        self._channel_dims = find_channel_dims(unwrap(kwargs["model"]), kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure every `every` optimizer steps, before the gradients are reset."""
        is_due = (state.global_step + 1) % self._every == 0 and state.is_world_process_zero
        if self._channel_dims and is_due:
            measured = step_diagnostics(kwargs["optimizer"], self._channel_dims, unwrap(kwargs["model"]))
            self._measured = as_metrics(measured)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the measurements once the Trainer has counted the step."""
        if self._measured:
            self._log(self._measured)
            self._measured = {}
