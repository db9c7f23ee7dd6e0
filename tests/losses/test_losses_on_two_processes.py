"""Losses of embeddings on two processes with batches of different sizes, compared with one that has all examples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from two_processes import run_two

from hf_sphere import losses

SIZES = [4, 6]
OF_CLASSES = [[0, 1, -100, 0, 5, 1, 0, 2, 2, 9], [3, 3, 0, 1, 1, 0, 2, 5, 5, 2], [1, 0, 2, 2, -100, 9, 9, 0, 1, 1]]
OF_PAIRS = [[0, 1, 1, 0, 5, 7, 7, 9, 5, 9]]
MAKE: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "SupConLoss": (lambda: losses.SupConLoss(0.3, learn_temperature=True), OF_CLASSES[:1]),
    "InfoNCELoss": (lambda: losses.InfoNCELoss(0.3), OF_PAIRS),
    "SigLIPLoss": (lambda: losses.SigLIPLoss(0.3, -1.0), OF_PAIRS),
    "memory": (lambda: losses.CrossBatchSupConLoss(4, 18, temperature=0.3, learn_temperature=True), OF_CLASSES),
    "heat": (losses.HeatKernelLoss, [None]),
    "koleo": (losses.KoLeoLoss, [None]),
    "sliced": (losses.SlicedUniformityLoss, [None]),
}
"""A loss, and the labels of each of its batches; None if it has no labels."""


def compute(part: Callable[[Tensor], Tensor]) -> dict[str, list[tuple[Tensor, ...]]]:
    """Return value, gradients of embeddings and of parameters, and buffers, for a part of each batch."""
    results: dict[str, list[tuple[Tensor, ...]]] = {}
    for name, (make, batches) in MAKE.items():
        loss, results[name] = make(), []
        for step, labels in enumerate(batches):
            x = part(torch.randn(10, 4, generator=torch.Generator().manual_seed(step))).clone().requires_grad_()
            loss.zero_grad()
            value = loss(x) if labels is None else loss(x, part(torch.tensor(labels)))
            value.backward()
            parameters = [parameter.grad.clone() for parameter in loss.parameters()]
            buffers = [buffer.clone() for buffer in loss.buffers()]
            results[name].append((value.detach(), x.grad, parameters, buffers))
    return results


def _compute(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(rank)  # the circles of the first process are those of all
    torch.save(compute(lambda values: values.split(SIZES)[rank]), f"{folder}/{rank}.pt")


def test_mean_over_two_processes_is_the_loss_of_one_process(tmp_path):
    run_two(_compute, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.manual_seed(0)
    for name, steps in compute(lambda values: values).items():
        for expected, *parts in zip(steps, first[name], second[name], strict=True):
            values, gradients, parameters, buffers = zip(*parts, strict=True)
            averaged = [sum(grads) / 2 for grads in zip(*parameters, strict=True)]
            found = sum(values) / 2, torch.cat(gradients) / 2, averaged, buffers[0]
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(*buffers, rtol=0, atol=0)
