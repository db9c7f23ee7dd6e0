"""Exchange of tensors between the processes of a loss whose classes are spread over them, with gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from hf_sphere.geometry.decorators import differentiable_once


def count_processes() -> int:
    """Return the number of processes of the default group, 1 without one."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def process_index() -> int:
    """Return the index of this process in the default group, 0 without one."""
    return distributed.get_rank() if count_processes() > 1 else 0


def share_of(count: int, process: int | None = None) -> range:
    """Return the items of a process (this one by default), of `count` that are spread evenly over all."""
    process, processes = process_index() if process is None else process, count_processes()
    return range(count * process // processes, count * (process + 1) // processes)


class Exchange:
    """Exchanges what losses need between processes, each with examples of its own and a part of the classes.

    Each process computes the losses of its B examples, of N in all; data parallelism minimizes the mean of the losses
    over processes, so the gradients of class vectors, which have no copies, are those of this mean. Without a group, or
    with classes that are not `shared`, all methods return what they are given.
    """

    def __init__(self, batch: Tensor, *, shared: bool) -> None:
        self.shared = shared and count_processes() > 1
        self.counts = [len(batch)]
        if self.shared:
            counts = torch.zeros(count_processes(), dtype=torch.int64, device=batch.device)
            counts[process_index()] = len(batch)
            distributed.all_reduce(counts)
            self.counts = counts.tolist()
        start = sum(self.counts[: process_index()]) if self.shared else 0
        self.own = slice(start, start + len(batch))

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all processes: (B, ...) -> (N, ...)."""
        if not self.shared:
            return values
        padding = (0, 0) * (values.ndim - 1) + (self.own.start, sum(self.counts) - self.own.stop)
        return _Sum.apply(F.pad(values, padding), count_processes())

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes, for the examples of this one: (N, ...) -> (B, ...)."""
        return _Sum.apply(values, 1 / count_processes())[self.own] if self.shared else values

    def log_sum(self, values: Tensor) -> Tensor:
        """Compute the log-sum-exp over processes, for the examples of this one: (N, ...) -> (B, ...)."""
        return log_sum_over_processes(values)[self.own] if self.shared else values

    def copied(self, value: Tensor) -> Tensor:
        """Return a parameter that all processes have, for a result that each computes in part."""
        return scale_gradient(value, count_processes()) if self.shared else value


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return a value, unchanged, whose gradient is multiplied by a factor."""
    return value if factor == 1 else value.detach() + factor * (value - value.detach())


def log_sum_over_processes(values: Tensor) -> Tensor:
    """Compute the log-sum-exp of a tensor over processes; the gradient is that of their mean loss."""
    peak = values.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    peak.clamp_min_(torch.finfo(peak.dtype).min)
    total = _Sum.apply((values - peak).exp(), 1 / count_processes())
    return total.clamp_min(torch.finfo(total.dtype).tiny).log() + peak  # 0 if there is no term at all


class _Sum(torch.autograd.Function):
    """The sum over processes; gradients are summed too, and multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        total = values.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_values = (grad_total * ctx.factor).contiguous()
        distributed.all_reduce(grad_values)
        return grad_values, None
