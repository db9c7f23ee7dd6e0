"""Optimizer, learning-rate schedule and averaged weights from the arguments."""

import bisect
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_sphere.optim import parameter_groups, radial_parameter_groups
from hf_sphere.optim.names import optimizer_class, optimizer_names
from hf_sphere.training.arguments import TrainingArguments


def build_optimizer(
    model: nn.Module, args: TrainingArguments, batch: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer with its parameter groups.

    Weight decay is applied to weights (two or more axes), not to norms, biases and scalars. Parameters with options in
    the model's `parameter_options` form separate groups. The optimizers of this library detect the radially invariant
    weights.

    Args:
        model: The model.
        args: Training arguments.
        batch: Keyword arguments of the model, for finding the radially invariant weights; generated if None.
    """
    groups = radial_parameter_groups(model, batch) if args.optimizer in optimizer_names() else parameter_groups(model)
    if args.layer_decay is not None:
        groups = _decay_by_layer(groups, model, args)
    # A fused kernel per step where torch supports it; the update rule is the same.
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    options: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "fused": fused}
    sphere = optimizer_class(args.optimizer) if args.optimizer in optimizer_names() else None
    if args.optimizer == "sgd" or (sphere is not None and "betas" not in sphere.option_defaults()):
        options["momentum"] = args.momentum
    else:
        options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        for group in groups:
            group.pop("momentum", None)  # not supported by these optimizers
    if sphere is not None:
        return sphere(groups, **options)
    for group in groups:
        if args.optimizer == "sgd":
            group.setdefault("nesterov", args.nesterov and group.get("momentum", args.momentum) > 0)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[args.optimizer](groups, **options)


def _decay_by_layer(groups: list[dict[str, Any]], model: Any, args: TrainingArguments) -> list[dict[str, Any]]:
    """Divide parameter groups by layer of the backbone, with the learning rates of timm's layer-wise decay.

    Reference:
        Bao, Dong, Piao and Wei, "BEiT: BERT pre-training of image transformers", ICLR 2022.
    """
    backbone = getattr(getattr(model, "base_model", None), "backbone", None)
    if backbone is None:
        raise ValueError(f"layer_decay {args.layer_decay} is for image models with a backbone; leave it out.")
    from timm.optim import param_groups_layer_decay

    timm_groups = param_groups_layer_decay(backbone, layer_decay=args.layer_decay)
    scales = {parameter: group["lr_scale"] for group in timm_groups for parameter in group["params"]}
    divided: dict[tuple[int, float], dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for name, parameter in group["params"]:
            scale = scales.get(parameter, 1.0)
            rate = group.get("lr", args.learning_rate) * scale
            part = divided.setdefault((number, scale), {**group, "lr": rate, "params": []})
            part["params"].append((name, parameter))
    # The first group's rate is shown: that of the last layers.
    return sorted(divided.values(), key=lambda group: group["lr"] != args.learning_rate)


def build_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, steps_per_epoch: int, *, higher_is_better: bool = True
) -> LRScheduler:
    """Build the schedule: one `step()` per optimizer step, or for `plateau` one `step(metric)` per epoch."""
    for group in optimizer.param_groups:
        # The peak, under the key of torch's schedulers; in a resumed run it separates decays from changed arguments.
        group.setdefault("initial_lr", group["lr"])
    if args.lr_scheduler_type == "plateau":
        mode: Literal["min", "max"] = "max" if higher_is_better else "min"
        return ReduceLROnPlateau(optimizer, mode=mode, factor=args.lr_gamma, patience=args.lr_patience)

    def factor(step: int) -> float:
        return learning_rate_factor(args, step / steps_per_epoch)

    return LambdaLR(optimizer, factor)


def start_average(model: nn.Module, decay: float) -> AveragedModel:
    """Copy a model, as the start of an exponential moving average of its parameters and buffers."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def learning_rate_factor(args: TrainingArguments, epoch: float) -> float:
    """Return the learning rate as a fraction of its peak, at a (fractional) epoch."""
    if epoch < args.warmup_epochs:
        return epoch / args.warmup_epochs
    if args.lr_scheduler_type == "step":
        return args.lr_gamma ** int(epoch // args.lr_step_epochs)
    if args.lr_scheduler_type == "multistep":
        return args.lr_gamma ** bisect.bisect_right(args.lr_milestones or [], epoch)
    span = max(args.num_train_epochs - args.warmup_epochs, 1e-9)
    progress = min((epoch - args.warmup_epochs) / span, 1.0)
    if args.lr_scheduler_type == "linear":
        return 1.0 - progress
    if args.lr_scheduler_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
