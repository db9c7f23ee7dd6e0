import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from hf_sphere.optim import find_scale_invariant_weights


def test_mixed_precision_has_no_effect_on_the_search_and_a_prepared_model_keeps_it():
    forget()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    expected, dtypes = {"0.weight": (0,), "3.weight": (0,)}, []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert find_scale_invariant_weights(model).channel_dims == expected
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert find_scale_invariant_weights(prepared).channel_dims == expected
    model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    prepared(torch.randn(2, 3, 9, 9))
    assert dtypes == [torch.bfloat16]
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
