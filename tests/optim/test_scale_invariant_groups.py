"""Interface of the search for scale-invariant weights; its results are tested in test_invariance.py."""

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from architectures import described
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel
from two_processes import forget

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.optim import AdamSRT, build_optimizer, find_scale_invariant_weights, scale_invariant_groups


class Small(nn.Module):
    """Conv, batch norm, dropout, linear; with `fails`, the forward pass raises after the norm."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 2)
        self.fails = fails

    def forward(self, images: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        hidden = self.dropout(self.norm(self.conv(images)).relu())
        if self.fails:
            raise RuntimeError("a fault in the forward pass")
        return scale * self.linear(hidden.mean((2, 3)))


FOUND = {"conv.weight": (0,)}


def images(**options: Any) -> Tensor:
    return torch.randn(4, 3, 6, 6, **options)


# Side effects


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All state of the model and the random generators that the search could change."""
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "same": {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()},
        "gradients": {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()},
        "asked": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def partly_frozen(model: Small) -> Small:
    model.train()
    model.norm.eval()
    return model


def with_gradients(model: Small) -> Small:
    model(images()).sum().backward()
    model.linear.requires_grad_(False)
    return model


STATES: dict[str, Callable[[Small], Small]] = {
    "in training": lambda model: model.train(),
    "in evaluation": lambda model: model.eval(),
    "partly in evaluation": partly_frozen,
    "with gradients and frozen weights": with_gradients,
}


@pytest.mark.parametrize("fails", [False, True], ids=["", "the forward pass raises"])
@pytest.mark.parametrize("state", STATES)
def test_the_search_preserves_model_and_random_state(state, fails):
    model = STATES[state](Small())
    model.fails = fails
    before, message = snapshot(model), r"Small does not accept the batch.*a fault in the forward pass"
    with pytest.raises(ValueError, match=message) if fails else contextlib.nullcontext():
        find_scale_invariant_weights(model, images(generator=torch.Generator()))
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0, equal_nan=True)


# Batches


@pytest.mark.parametrize(
    "batch",
    [
        *(lambda: images(), lambda: (images(),), lambda: [images(), 2.0], lambda: {"images": images()}),
        *(lambda: {"images": images(), "scale": torch.tensor(2.0)}, lambda: None),
    ],
    ids=["tensor", "tuple", "list", "mapping", "mapping of two", "generated"],
)
def test_every_batch_format_is_supported(batch):
    assert find_scale_invariant_weights(Small(), batch()).channel_dims == FOUND


@pytest.mark.parametrize(
    "change",
    ["double", "half", "bfloat16", nn.DataParallel, torch.compile],
    ids=["double", "half", "bfloat16", "parallel", "compiled"],
)
def test_models_of_every_precision_and_wrapped_ones_are_supported(change):
    model = getattr(Small(), change)() if isinstance(change, str) else change(Small())
    found = find_scale_invariant_weights(model, images(dtype=next(model.parameters()).dtype))
    assert found.channel_dims == FOUND
    assert 0.0 <= found.deviations["conv.weight"] < 1e-4
    assert found.deviations.keys() == FOUND.keys()


def small_vision(image_size: int) -> nn.Module:
    config = {"backbone": "resnet18", "embedding_dim": 3, "image_size": image_size, "num_channels": 1, "num_labels": 5}
    return SphereVisionForImageClassification(SphereVisionConfig(**config))


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: small_vision(64), 20),
        (lambda: small_vision(32), 20),  # its last feature maps have one pixel
        (lambda: timm.create_model("resnet20_cifar", in_chans=1, num_classes=5), 21),
        (lambda: nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6)), 1),
        (lambda: timm.create_model("conv4", num_classes=5), 5),  # for images of 84 pixels
        (lambda: Small().double(), 1),
    ],
    ids=["transformers", "one pixel", "timm", "embedding", "conv4", "float64"],
)
def test_an_input_is_generated_from_the_configuration_or_the_first_layer(build, count):
    assert len(find_scale_invariant_weights(build()).channel_dims) == count


def test_a_batch_without_gradients_finds_no_scale_invariant_weights():
    class Zero(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0

    found = find_scale_invariant_weights(Zero(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(4, 2))
    assert found.channel_dims == {}
    assert "no gradient reaches it in this batch" in found.rejected["0.weight"]


def test_tied_weights_are_listed_once():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    normed = nn.Sequential(first, nn.BatchNorm1d(6), second, nn.BatchNorm1d(6))
    assert find_scale_invariant_weights(normed, torch.randn(8, 6)).channel_dims == {"0.weight": (0,)}
    assert find_scale_invariant_weights(normed[:3], torch.randn(8, 6)).channel_dims == {}


# Invalid arguments


class WantsTwo(Small):
    def forward(self, images: Tensor, other: Tensor) -> Tensor:
        return super().forward(images, other)


BATCHES = {
    "with labels": lambda: (images(), torch.zeros(2)),
    "loader": lambda: DataLoader(images()),
    "array": lambda: images().numpy(),
    "unknown name": lambda: {"pixels": images()},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["adam_srt", "muon"])
def test_the_error_for_a_batch_that_does_not_fit_says_how_it_is_passed(name, batch):
    with pytest.raises(ValueError, match=r"does not accept the batch: \w*Error.* model\(\*batch\), .* without labels"):
        build_optimizer(nn.Sequential(Small()), name, batch())


def test_a_model_without_a_generated_input_or_a_differentiable_output_is_refused():
    with pytest.raises(ValueError, match=r"WantsTwo does not accept any generated input: .*Pass a batch"):
        find_scale_invariant_weights(WantsTwo())
    small = Small()
    small.register_forward_hook(lambda module, inputs, output: output.shape)
    with pytest.raises(ValueError, match="output Size contains nothing to differentiate"):
        find_scale_invariant_weights(small, images())


# Groups and table


def test_the_groups_contain_the_parameters_of_the_model_and_can_be_passed_to_an_optimizer():
    model = Small()
    grouped = {name: p for group in scale_invariant_groups(torch.compile(model)) for name, p in group["params"]}
    assert all(grouped[name] is parameter for name, parameter in model.named_parameters())
    optimizer = AdamSRT(scale_invariant_groups(model, images()), lr=1e-3, weight_decay=0.1)
    assert described(optimizer) == [
        ((0,), 0.1, ["conv.weight"]),
        (None, 0.1, ["linear.weight"]),
        (None, 0.0, ["conv.bias", "norm.weight", "norm.bias", "linear.bias"]),
    ]


def test_the_warning_for_a_model_without_scale_invariant_weights_says_what_is_used_instead():
    model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    message = r"^BertModel has no scale-invariant weight, .* the ordinary one of torch\. Print .* for the reasons\.$"
    with pytest.warns(UserWarning, match=message):
        groups = scale_invariant_groups(model)
    assert [group.get("channel_dims") for group in groups] == [None, None]


def test_the_table_lists_channel_dims_or_the_reason_for_every_weight():
    found = find_scale_invariant_weights(Small(), images())
    first, conv, linear = str(found).splitlines()
    assert first == f"1 of 2 weight tensors are scale-invariant ({100 * 108 / 116:.4g} % of their elements)"
    assert conv.split()[:3] == ["conv.weight", "channel_dims", "[0],"]
    assert linear.split(maxsplit=1) == ["linear.weight", f"not scale-invariant: {found.rejected['linear.weight']}"]
    frozen = find_scale_invariant_weights(Small().requires_grad_(False), images())
    assert set(frozen.rejected.values()) == {"frozen"}


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
