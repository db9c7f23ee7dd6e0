"""Optimizer, learning-rate schedule and averaged weights from the arguments; norms; checks of optimizer states."""

import bisect
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.nn.processes import count_processes
from hf_sphere.optim import build_optimizer
from hf_sphere.optim.groups import option_defaults
from hf_sphere.optim.sphere_optimizer import SphereOptimizer
from hf_sphere.training.arguments import RecipeArguments

AVERAGE_FILE = "average.pt"


def optimizer_from_arguments(
    model: Any, args: RecipeArguments, batch: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of the arguments; see `hf_sphere.optim.build_optimizer`.

    Learning rates of layers decay as those of timm.

    Reference:
        Bao, Dong, Piao and Wei, "BEiT: BERT pre-training of image transformers", ICLR 2022.
    """
    values = vars(args) | {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    values["eps"], valid = args.adam_epsilon, {*option_defaults(args.optim)}
    if args.optim != "sgd":
        valid.discard("nesterov")
    names = ("weight_decay", "momentum", *_OF_SOME, "lr", "betas", "eps")
    options = {name: values[name] for name in names if name in valid}
    scales = None
    if args.layer_decay is not None:
        from timm.optim import param_groups_layer_decay

        groups = param_groups_layer_decay(model.base_model.backbone, layer_decay=args.layer_decay)
        by_parameter = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
        scales = {name: by_parameter[each] for name, each in model.named_parameters() if each in by_parameter}
    return build_optimizer(model, args.optim, batch, lr_scales=scales, **options)


_OF_SOME = ("nesterov", "adamw_lr_scale", "hyperball_on")


def check_optimizer_arguments(args: RecipeArguments) -> None:
    """Raise an error for arguments of other optimizers that have other values than by default."""
    valid = {*option_defaults(args.optim)}
    if args.optim != "sgd":
        valid.discard("nesterov")
    of_adam = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
    for name in ("momentum", *_OF_SOME, *of_adam):
        default, value = getattr(RecipeArguments, name), getattr(args, name)
        if of_adam.get(name, name) not in valid and value != default:
            raise ValueError(f"{name} {value} has no effect with optim {args.optim}; leave it out, or at {default}.")


def build_scheduler(
    optimizer: torch.optim.Optimizer, args: RecipeArguments, steps_per_epoch: int, *, higher_is_better: bool = True
) -> LRScheduler:
    """Build the schedule: one `step()` per optimizer step, or `step(metric)` per epoch for `reduce_lr_on_plateau`."""
    for group in optimizer.param_groups:
        # The peak, under the key of torch's schedulers; in a resumed run it separates decays from changed arguments.
        group.setdefault("initial_lr", group["lr"])
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        mode: Literal["min", "max"] = "max" if higher_is_better else "min"
        return ReduceLROnPlateau(optimizer, mode=mode, factor=args.lr_gamma, patience=args.lr_patience)

    def factor(step: int) -> float:
        epoch = step / steps_per_epoch
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
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if args.lr_scheduler_type == "cosine" else 1.0

    return LambdaLR(optimizer, factor)


def start_average(model: nn.Module, decay: float, accelerator: Accelerator) -> AveragedModel:
    """Copy a model, as the start of an exponential moving average of all its tensors, which checkpoints contain."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    # Not registered with Accelerate, which would read it with `weights_only=False`.
    accelerator.register_load_state_pre_hook(
        lambda models, folder: average.load_state_dict(
            torch.load(f"{folder}/{AVERAGE_FILE}", map_location="cpu", weights_only=True)
        )
    )
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: accelerator.save(average.state_dict(), f"{folder}/{AVERAGE_FILE}")
    )
    return average


def total_norm(model: nn.Module, *, of_gradients: bool = False) -> Tensor:
    """Return the norm of all parameters or their gradients, including the class vectors of other processes."""
    shards, own, others = class_shards(model), list[Tensor](), list[Tensor]()
    for name, parameter in model.named_parameters():
        value = parameter.grad if of_gradients else parameter
        if value is not None:
            (own if name in shards else others).append(value)
    norm = nn.utils.get_total_norm(others)
    if not shards:
        return norm
    squares = nn.utils.get_total_norm(own).square()
    if count_processes() > 1:
        distributed.all_reduce(squares)
    return (norm.square() + squares).sqrt()


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise an error for a state of other shapes before an optimizer loads it: torch's fused kernels do not check them.

    Nor do they check strides: tensors with others than those of the parameter are copied. A pre-hook of
    `Optimizer.load_state_dict`.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    owners = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for index, (group, parameter) in zip(indices, owners, strict=False):  # torch compares the groups
        for key, value in state_dict["state"].get(index, {}).items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            like = parameter
            if isinstance(optimizer, SphereOptimizer):
                like = optimizer.initial_state(key, parameter, group)
            if (value.shape, value.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"{key} in the optimizer state is {value.dtype} of shape {[*value.shape]}, which does not fit the "
                    f"parameter: {like.dtype} of shape {[*like.shape]} expected"
                )
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                copy = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                state_dict["state"][index][key] = copy.copy_(value)
