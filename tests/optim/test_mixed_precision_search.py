import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from hf_sphere.optim import find_scale_invariant_weights


def test_autocast_has_no_effect_on_the_search():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = find_scale_invariant_weights(model)
    assert found.channel_dims == {"0.weight": (0,), "3.weight": (0,)}


def test_a_model_prepared_for_mixed_precision_has_the_same_groups():
    forget()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert find_scale_invariant_weights(prepared).channel_dims == {"0.weight": (0,), "3.weight": (0,)}
    forget()


def test_the_search_keeps_the_mixed_precision_of_a_prepared_model():
    forget()
    model, dtypes = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), []
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    find_scale_invariant_weights(prepared)
    model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    prepared(torch.randn(2, 4))
    assert dtypes == [torch.bfloat16]
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
