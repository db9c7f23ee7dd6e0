"""Training steps of compiled losses."""

import pytest
import torch
from torch._dynamo.utils import counters

from hf_sphere import losses
from hf_sphere.losses import HeadLoss

BUILD = {
    "logits": lambda: losses.ArcFaceLoss(8, 6),
    "samples": lambda: losses.VMFSoftmaxLoss(8, 6, num_samples=2),
    "blocks": lambda: HeadLoss(8, 6, head="softmax", blockwise=True, label_smoothing=0.1),
    "blocks of centers": lambda: losses.SubCenterArcFaceLoss(8, 6, blockwise=True),
    "SupConLoss": lambda: losses.SupConLoss(learn_temperature=True),
    "InfoNCELoss": losses.InfoNCELoss,
    "SigLIPLoss": losses.SigLIPLoss,
}


@pytest.mark.parametrize("name", BUILD)
def test_steps_of_any_batch_size_are_those_without_compilation(name):
    torch.compiler.reset()
    torch.manual_seed(0)
    loss = BUILD[name]()
    loss(torch.randn(10, 8), torch.arange(10) // 2)  # the data-dependent initialization, if there is one
    counters.clear()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")  # like inductor, without generating code
    for size in (8, 12, 6):
        x, labels, results = torch.randn(size, 8), torch.arange(size) // 2, []
        labels[:2] = -100
        for run in (loss, compiled):
            if isinstance(loss, HeadLoss):
                loss.head.before_forward(size, torch.arange(size))
            inputs = x.clone().requires_grad_()
            loss.zero_grad()
            run(inputs, labels).backward()
            results.append((inputs.grad, {key: value.grad for key, value in loss.named_parameters()}))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2  # one of the first size, one of any size
