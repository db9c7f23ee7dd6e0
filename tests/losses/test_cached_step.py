"""Gradients of the loss of a batch that is encoded in chunks."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import ModelOutput
from two_processes import run_two

from hf_sphere.losses import (
    ArcFaceLoss,
    CrossBatchSupConLoss,
    HeadLoss,
    InfoNCELoss,
    SigLIPLoss,
    SupConLoss,
    VMFSoftmaxLoss,
    cached_step,
)

LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SupConLoss": lambda: SupConLoss(0.3, learn_temperature=True),
    "InfoNCELoss": lambda: InfoNCELoss(0.3),
    "SigLIPLoss": lambda: SigLIPLoss(0.3, -1.0),
    "CrossBatchSupConLoss": lambda: CrossBatchSupConLoss(5, 40),
    "ArcFaceLoss": lambda: ArcFaceLoss(5, 8),
    "ProxyAnchorLoss": lambda: HeadLoss(5, 8, head="proxy_anchor"),
    "VMFSoftmaxLoss": lambda: VMFSoftmaxLoss(5, 8),
}


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 5))


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def run(step: Callable[[nn.Module, nn.Module], Tensor], model: nn.Module, loss: nn.Module, dtype: torch.dtype) -> Any:
    model, loss = copy.deepcopy(model).to(dtype), copy.deepcopy(loss).to(dtype)
    torch.manual_seed(1)
    value = step(model, loss)
    return value.detach(), gradients(model, loss), torch.rand(1)


def chunkwise(x: Tensor, labels: Tensor, size: int) -> Callable[[nn.Module, nn.Module], Tensor]:
    """A plain step on the whole batch whose dropout masks are those of chunks."""

    def step(model: nn.Module, loss: nn.Module) -> Tensor:
        value = loss(torch.cat([model(part) for part in x.split(size)]), labels)
        value.backward()
        return value

    return step


@given(st.sampled_from(sorted(LOSSES)), st.integers(1, 20), st.sampled_from([0.0, 0.4]))
def test_loss_and_gradients_are_those_of_the_whole_batch(name, chunk_size, dropout):
    x, labels, model, loss = torch.randn(16, 6).double(), torch.arange(8).repeat(2), network(dropout), LOSSES[name]()
    cached = run(lambda *modules: cached_step(*modules, (x, labels), chunk_size), model, loss, torch.float64)
    expected = run(chunkwise(x, labels, chunk_size), model, loss, torch.float64)
    torch.testing.assert_close(cached, expected, rtol=1e-9, atol=1e-12)  # with the same random numbers afterwards


class Encoder(nn.Module):
    """An encoder as of transformers, whose inputs are named."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, values: Tensor, scale: Tensor) -> ModelOutput:
        return ModelOutput(embeddings=self.network(values) * scale[:, None])


def test_named_inputs_and_outputs_with_embeddings_are_those_of_tensors():
    x, scale, labels, model, loss = torch.randn(8, 6), torch.rand(8) + 1, torch.arange(8) % 2, Encoder(), SupConLoss()
    value = cached_step(model, loss, ({"values": x, "scale": scale}, labels), 3)
    found = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    expected = loss(model(x, scale).embeddings, labels)
    expected.backward()
    torch.testing.assert_close((value, found), (expected.detach(), gradients(model)))


def test_gradients_in_float32_and_under_autocast_are_those_of_the_whole_batch():
    x, labels, model, loss = torch.randn(200, 6), torch.arange(200) % 20, network(0.4), LOSSES["SupConLoss"]()
    for enabled, tolerance in ((False, 1e-6), (True, 0.02)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cached = run(lambda *modules: cached_step(*modules, (x, labels), 32), model, loss, torch.float32)
            expected = run(chunkwise(x, labels, 32), model, loss, torch.float32)
        for ours, theirs in zip(cached[1], expected[1], strict=True):
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_gradients_are_added_scaled_by_a_scaler_and_of_the_loss_alone_if_the_model_is_frozen():
    x, labels, model, scaler = torch.randn(8, 6), torch.arange(8) % 2, network(), torch.amp.GradScaler("cpu", 1024.0)
    loss = SupConLoss()
    loss(model(x), labels).backward()
    once = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    for _ in range(2):
        cached_step(model, lambda embeddings, labels: scaler.scale(loss(embeddings, labels)), (x, labels), 3)
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in once])
    model, loss = network().requires_grad_(False), ArcFaceLoss(5, 4)
    cached_step(model, loss, (torch.randn(8, 6), torch.arange(8) % 4), 3)
    assert loss.head.weight.grad.any()


def test_batch_norm_in_training_is_reported():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    batch = torch.randn(8, 6), torch.arange(8) % 2
    with pytest.warns(UserWarning, match="Batch norm in training has the statistics of chunks"):
        cached_step(model, SupConLoss(), batch, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_step(model.eval(), SupConLoss(), batch, 4)


def test_a_size_of_chunks_below_one_is_an_error():
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1; got 0"):
        cached_step(nn.Linear(6, 5), SupConLoss(), (torch.randn(8, 6), torch.arange(8) % 2), 0)


# Two processes, with batches and numbers of chunks of different sizes

SIZES = [5, 11]


def _compute(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo")
    results, x = {}, torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    for name in ("SupConLoss", "ArcFaceLoss"):
        model, loss = DistributedDataParallel(network()), DistributedDataParallel(LOSSES[name]())
        labels = torch.arange(16) % 4
        value = cached_step(model, loss, (x.split(SIZES)[rank], labels.split(SIZES)[rank]), 2)
        results[name] = value, gradients(model, loss)
    torch.save(results, f"{folder}/{rank}.pt")


def test_gradients_averaged_over_two_processes_are_those_of_one(tmp_path):
    run_two(_compute, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first["SupConLoss"][1], second["SupConLoss"][1])
    x, labels, model, loss = (
        torch.randn(16, 6, generator=torch.Generator().manual_seed(0)),
        torch.arange(16) % 4,
        network(),
        LOSSES["SupConLoss"](),
    )
    value = loss(model(x), labels)
    value.backward()
    torch.testing.assert_close((first["SupConLoss"][0] + second["SupConLoss"][0]) / 2, value.detach())
    torch.testing.assert_close(first["SupConLoss"][1], gradients(model, loss), rtol=1e-5, atol=1e-6)
    model, loss = network(), LOSSES["ArcFaceLoss"]()  # a mean over processes of means over examples
    losses = [loss(model(part), its) for part, its in zip(x.split(SIZES), labels.split(SIZES), strict=True)]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(first["ArcFaceLoss"][1], gradients(model, loss), rtol=1e-5, atol=1e-6)
