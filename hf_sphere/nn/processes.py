"""Sums and exchanges of tensors between processes, differentiable, for losses whose parts are on several processes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from hf_sphere.geometry.autograd import differentiable_once


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


@dataclass(frozen=True)
class Rows:
    """Numbers of rows of a tensor on all processes, which may differ."""

    counts: list[int]

    @classmethod
    def of(cls, values: Tensor) -> "Rows":
        """Exchange the numbers of rows of a tensor."""
        counts = torch.zeros(count_processes(), dtype=torch.int64, device=values.device)
        counts[process_index()] = len(values)
        distributed.all_reduce(counts)
        return cls(counts.tolist())

    @property
    def own(self) -> slice:
        """The rows of this process among those of all."""
        start = sum(self.counts[: process_index()])
        return slice(start, start + self.counts[process_index()])

    @property
    def total(self) -> int:
        """Number of rows over all processes."""
        return sum(self.counts)

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all processes; the gradient of a loss with parts on all of them is complete.

        The parts are those of a loss whose sums come from `sum_over_processes`.
        """
        padding = (0, 0) * (values.ndim - 1) + (self.own.start, self.total - self.own.stop)
        return _Sum.apply(F.pad(values, padding), count_processes())

    def distribute_columns(self, values: Tensor, num_columns: int) -> Tensor:
        """Collect all columns of the rows of this process, where each process has some columns of all rows.

        Args:
            values: (N, k), the columns of this process in the order of the processes.
            num_columns: Sum of k over the processes, which share them as `share_of` does.

        Returns:
            (B, num_columns), without a gradient.
        """
        own = self.counts[process_index()]
        widths = [len(share_of(num_columns, process)) for process in range(len(self.counts))]
        received = values.new_empty(own * num_columns)
        sent, taken = [count * values.shape[1] for count in self.counts], [own * width for width in widths]
        distributed.all_to_all_single(received, values.detach().flatten(), taken, sent)
        return torch.cat(
            [part.view(own, width) for part, width in zip(received.split(taken), widths, strict=True)], dim=1
        )


def sum_over_processes(values: Tensor) -> Tensor:
    """Sum a tensor over processes, where each uses the sum in a loss of its own, and the mean of these is minimized.

    The gradient of a tensor is that of the mean of the losses of all processes, so that class weights on one process
    are trained as if they had copies whose gradients data parallelism averages.
    """
    return _Sum.apply(values, 1 / count_processes())


def log_sum_over_processes(values: Tensor) -> Tensor:
    """Return the log-sum-exp over processes; see `sum_over_processes`."""
    peak = values.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    peak.clamp_min_(torch.finfo(peak.dtype).min)
    total = sum_over_processes((values - peak).exp())
    return total.clamp_min(torch.finfo(total.dtype).tiny).log() + peak  # 0 if there is no term at all


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return a value, unchanged, whose gradient is multiplied by a factor."""
    return value.detach() + factor * (value - value.detach())


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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = (gradient * ctx.factor).contiguous()
        distributed.all_reduce(gradient)
        return gradient, None
