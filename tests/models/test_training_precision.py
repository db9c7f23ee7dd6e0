"""A training step of each head in each precision, with memory formats, gradient checkpointing and compilation."""

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import BACKBONES, EmbeddingNet, register_backbone
from hf_sphere.nn import HEADS

IMAGES, LABELS = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4
LABELS[0] = -100

DISTANCES = {  # largest relative distances of the loss and of the norm of its gradient from those in float32
    "autocast bfloat16": (0.005, 0.01),
    "autocast float16": (0.001, 0.002),
    "bfloat16": (0.02, 0.02),  # -2.773, the logarithm of a temperature, is rounded to -2.781
}
FLAGS = ("compiled", "channels_last", "checkpointing")


def cases() -> Iterator[tuple[str, str, dict[str, bool]]]:
    """Each head in each precision, so that every pair of options appears; compiled only once per head, for the time."""
    for (i, head), (j, precision) in itertools.product(enumerate(HEADS), enumerate(DISTANCES)):
        flags = ((i + j) % 3 == 0, (i // 3 + j) % 2 == 0, (i // 6 + (j > 0)) % 2 == 0)
        yield head, precision, dict(zip(FLAGS, flags, strict=True))


class Blocks(nn.Sequential):
    """Convolutional blocks that can be computed again in the backward pass."""

    checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


@pytest.fixture(scope="module", autouse=True)
def _two_blocks():
    @register_backbone
    def two_blocks(*, in_chans: int = 3, **net) -> nn.Module:
        """Two blocks of convolutions."""
        layers = Blocks(block(in_chans, 8), block(8, 16), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        backbone = EmbeddingNet(layers, 16, **net)
        backbone.set_grad_checkpointing = layers.set_grad_checkpointing
        return backbone

    yield
    del BACKBONES["two_blocks"]


def train(
    head: str, precision: str, *, compiled: bool = False, channels_last: bool = False, checkpointing: bool = False
) -> tuple[Tensor, Tensor, nn.Module]:
    """Take a step, and return the loss, the norm of its gradient, and the model."""
    torch.manual_seed(1)
    model = SphereVisionForImageClassification(
        SphereVisionConfig(backbone="two_blocks", image_size=8, num_labels=4, head=head, embedding_dim=8)
    )
    if model.head.needs_data_initialization:
        model.head.initialize_from_data(torch.randn(64, 8))
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model, images = model.train().to(dtype, memory_format=memory_format), IMAGES.to(dtype, memory_format=memory_format)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    # A scale at which nothing overflows: from the default one a scaler would skip a few steps first.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "autocast float16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.before_forward(0, torch.arange(16))
    lower = getattr(torch, precision.split()[-1])
    with torch.autocast("cpu", dtype=lower, enabled=precision.startswith("autocast")):
        loss = run(pixel_values=images, labels=LABELS).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([p.grad.double() for p in model.parameters() if p.grad is not None])
    scaler.step(optimizer)
    return loss.detach(), norm, model


@functools.cache
def in_float32(head: str) -> tuple[Tensor, Tensor]:
    return train(head, "float32")[:2]


@pytest.mark.parametrize(("head", "precision", "flags"), [*cases()])
def test_a_step_is_finite_and_close_to_float32(head, precision, flags):
    torch.compiler.reset()
    (loss, norm, model), (exact, exact_norm) = train(head, precision, **flags), in_float32(head)
    assert loss.dtype == torch.float32
    assert abs(loss / exact - 1) < DISTANCES[precision][0]
    assert abs(norm / exact_norm - 1) < DISTANCES[precision][1]
    assert all(value.isfinite().all() for value in model.state_dict().values())
