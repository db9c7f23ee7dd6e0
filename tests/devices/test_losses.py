"""Training steps of the losses on another device: values, and what a CUDA graph could capture."""

import copy
from contextlib import nullcontext

import pytest
import torch

from hf_sphere import losses
from hf_sphere.nn.heads import mixins

SIZES = {"SupConLoss": (), "InfoNCELoss": (), "SigLIPLoss": (), "CrossBatchSupConLoss": (6, 20)}
OTHERS = ("HeadLoss", "PairLoss", "MetricLearningLoss", "SentenceTransformerLoss")
WITHOUT_LABELS = ("HeatKernelLoss", "KoLeoLoss", "SlicedUniformityLoss")
NAMES = sorted(name for name in dir(losses) if name.endswith("Loss") and name not in (*OTHERS, *WITHOUT_LABELS))
LABELS = torch.tensor([-100, 3, 1, 2, 1, 3, 2])


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    loss = getattr(losses, name)(*SIZES.get(name, (6, 4)))
    loss(torch.randn(7, 6), LABELS)  # the data-dependent initialization, if there is one
    return loss


def step(loss: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    value = loss(x, labels)
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    return [value, *torch.autograd.grad(value, [x, *trained])]


@pytest.fixture(autouse=True)
def _in_blocks(monkeypatch):  # losses of the logits are cases of all public names
    monkeypatch.setattr(mixins, "MANY_LOGITS", 0)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"VMFSoftmaxLoss"}))  # whose samples differ
def test_values_and_gradients_match_the_cpu(name, device):
    loss, x = make(name), torch.randn(7, 6)
    expected = step(copy.deepcopy(loss), x.clone().requires_grad_(), LABELS)
    found = step(loss.to(device), x.to(device).requires_grad_(), LABELS.to(device))
    torch.testing.assert_close([value.cpu() for value in found], expected)


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_have_the_same_kernels_and_do_not_wait_for_the_device(name, pretend):
    loss, sequences = make(name).to("pretend"), []
    for order in ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], [1, 5, 0, 2, 4, 3, 6]):
        x, labels = torch.randn(7, 6).to("pretend").requires_grad_(), LABELS[order].to("pretend")
        # SupConLoss reads the number of positives of the first batch
        with pretend.capturable() if sequences else nullcontext(), pretend.recorded_kernels() as kernels:
            step(loss, x, labels)
        sequences.append(kernels)
    assert len(sequences[1]) > 20
    assert sequences[1] == sequences[2]
