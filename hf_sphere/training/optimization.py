"""Optimiser and learning-rate schedule from the arguments."""

import bisect
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hf_sphere.training.arguments import TrainingArguments


def build_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Build the optimiser with its parameter groups.

    Weights (two axes or more) decay; norms, biases and scalars do not. Parameters that the model names in
    `parameter_options` get a group of their own with those settings.
    """
    groups = parameter_groups(model, args.weight_decay)
    # One fused kernel a step where torch has one; the update rule is the same.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for g in groups for p in g["params"])
    if args.optimizer == "sgd":
        for group in groups:
            group.setdefault("nesterov", args.nesterov and group.get("momentum", args.momentum) > 0)
        return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.momentum, fused=fused)
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.optimizer]
    betas = (args.adam_beta1, args.adam_beta2)
    return adam(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused, weight_decay=0.0)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into decayed, not decayed, and those with settings of their own."""
    own: Mapping[str, Mapping[str, Any]] = getattr(model, "parameter_options", dict)()
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    special = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in own:
            special.append({"params": [parameter], "weight_decay": 0.0, **own[name]})
        else:
            (decayed if parameter.ndim > 1 else plain)["params"].append(parameter)
    missing = set(own) - {name for name, _ in model.named_parameters()}
    if missing:
        raise ValueError(f"settings are given for parameters that the model lacks: {', '.join(sorted(missing))}.")
    return [group for group in (decayed, plain, *special) if group["params"]]


def build_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, steps_per_epoch: int, *, higher_is_better: bool = True
) -> LRScheduler:
    """Build the schedule: one `step()` an optimiser step, or for `plateau` one `step(metric)` an epoch."""
    for group in optimizer.param_groups:
        # The peak, as torch's own schedules note it; a resumed run tells decays from changed settings by it.
        group.setdefault("initial_lr", group["lr"])
    if args.lr_scheduler_type == "plateau":
        mode: Literal["min", "max"] = "max" if higher_is_better else "min"
        return ReduceLROnPlateau(optimizer, mode=mode, factor=args.lr_gamma, patience=args.lr_patience)

    def factor(step: int) -> float:
        return learning_rate_factor(args, step / steps_per_epoch)

    return LambdaLR(optimizer, factor)


def learning_rate_factor(args: TrainingArguments, epoch: float) -> float:
    """Share of the peak learning rate at a point of training, given in epochs (fractions included)."""
    if epoch < args.warmup_epochs:
        return epoch / args.warmup_epochs
    if args.lr_scheduler_type == "step":
        return args.lr_gamma ** int(epoch // args.lr_step_epochs)
    if args.lr_scheduler_type == "multistep":
        return args.lr_gamma ** bisect.bisect_right(sorted(args.lr_milestones or []), epoch)
    span = max(args.num_train_epochs - args.warmup_epochs, 1e-9)
    progress = min((epoch - args.warmup_epochs) / span, 1.0)
    if args.lr_scheduler_type == "linear":
        return 1.0 - progress
    if args.lr_scheduler_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
