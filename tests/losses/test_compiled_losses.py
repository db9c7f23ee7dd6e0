"""Training steps of compiled losses."""

import copy

import pytest
import torch
from case_selection import each
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hf_sphere import losses
from hf_sphere.losses import HeadLoss

BUILD = {
    "logits": lambda: losses.ArcFaceLoss(8, 6),
    "samples": lambda: losses.VMFSoftmaxLoss(8, 6, num_samples=2),
    "blocks": lambda: HeadLoss(8, 6, head="softmax", blockwise=True, label_smoothing=0.1),
    "blocks of centers": lambda: losses.SubCenterArcFaceLoss(8, 6, blockwise=True),
    "SupConLoss": lambda: losses.SupConLoss(learn_temperature=True),
    "memory": lambda: losses.CrossBatchSupConLoss(8, 20),
    "InfoNCELoss": losses.InfoNCELoss,
    "SigLIPLoss": losses.SigLIPLoss,
}
WITHOUT_LABELS = {
    "heat": losses.HeatKernelLoss,
    "koleo": losses.KoLeoLoss,
    "sliced": losses.SlicedUniformityLoss,
}


@pytest.mark.parametrize("name", [*BUILD, *WITHOUT_LABELS])
def test_steps_of_any_batch_size_are_those_without_compilation(name):
    torch.compiler.reset()
    torch.manual_seed(0)
    has_labels = name in BUILD
    loss = {**BUILD, **WITHOUT_LABELS}[name]()
    if isinstance(loss, HeadLoss):
        loss(torch.randn(10, 8), torch.arange(10) // 2)  # the data-dependent initialization, if there is one
    other = copy.deepcopy(loss)
    counters.clear()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")  # like inductor, without generating code
    for size in (8, 12, 6):
        x, labels, results = torch.randn(size, 8), torch.arange(size) // 2, []
        labels[:2] = -100
        for module, run in ((loss, loss), (other, compiled)):
            if isinstance(module, HeadLoss):
                module.head.before_forward(size, torch.arange(size))
            inputs = x.clone().requires_grad_()
            module.zero_grad()
            torch.manual_seed(0)
            value = run(inputs, labels) if has_labels else run(inputs)
            value.backward()
            gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
            results.append((value.detach(), inputs.grad, gradients, dict(module.named_buffers())))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    if has_labels:
        assert counters["stats"]["unique_graphs"] <= 2  # one of the first size, one of any size
        return
    results, without_gradient = [], torch.compile(loss, fullgraph=True, backend="eager")
    for run in (loss, without_gradient):
        torch.manual_seed(0)
        results.append(run(x))
    torch.testing.assert_close(*results)


@each("name")
@pytest.mark.parametrize("name", [*BUILD, *WITHOUT_LABELS])
def test_gradients_are_the_same_where_the_loss_is_recomputed_in_the_backward_pass(name):
    torch.manual_seed(0)
    loss, x, results = {**BUILD, **WITHOUT_LABELS}[name](), torch.randn(12, 8), []
    labels = [torch.arange(12) // 2] if name in BUILD else []
    if isinstance(loss, HeadLoss):
        loss(x, *labels)
    for module, run in ((loss, lambda call, *inputs: call(*inputs)), (copy.deepcopy(loss), checkpoint)):
        inputs, options = x.clone().requires_grad_(), {"use_reentrant": False} if run is checkpoint else {}
        torch.manual_seed(0)
        value = run(module, inputs, *labels, **options)
        if name == "memory" and options:
            with pytest.raises(ValueError, match="when the memory has changed; leave it out"):
                value.backward()
            return
        value.backward()
        results.append((inputs.grad, {key: parameter.grad for key, parameter in module.named_parameters()}))
    torch.testing.assert_close(*results, rtol=0, atol=0)
