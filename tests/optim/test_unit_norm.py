"""Weights that a normalized GPT keeps at unit norm."""

import re

import pytest
import torch
import transformers
from architectures import IDS
from scale_invariance import MODELS
from torch import nn

from hf_sphere.optim import RenormalizeCallback, renormalize

# Read from `justnorm` after each step in NVIDIA's code of nGPT, by the names of dory: rows (axis 1) read the hidden
# state, columns (axis 0) write to it.
AXES = {"embed_tokens": 1, "lm_head": 1, "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1,
        "o_proj": 0, "down_proj": 0}  # fmt: skip


def dory() -> nn.Module:
    if not hasattr(transformers, "DoryForCausalLM"):
        pytest.skip("this version of transformers has no Dory")
    torch.manual_seed(0)
    return MODELS["dory"]()


def test_every_matrix_of_dory_gets_unit_norm_along_the_hidden_size():
    model = dory()
    before = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
    axes = renormalize(model)
    assert axes == {name: AXES[name.split(".")[-2]] for name, weight in before.items() if weight.ndim > 1}
    for name, weight in model.named_parameters():
        expected = before[name]
        if name in axes:
            length = expected.square().sum(axes[name], keepdim=True).sqrt()
            expected = expected / length.clamp_min(1e-30)  # the row of padding is 0
            assert weight.shape[axes[name]] == model.config.hidden_size
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_the_trainer_keeps_unit_norms(tmp_path):
    model = dory()
    data = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, learning_rate=0.1, use_cpu=True, report_to="none", optim="adamw_torch"
    )
    before = model.lm_head.weight.detach().clone()
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[RenormalizeCallback()]).train()
    norms = model.lm_head.weight.detach().norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    assert nn.functional.cosine_similarity(model.lm_head.weight, before).min() < 0.99


def test_rows_of_other_models_are_given_by_patterns_and_zero_rows_stay():
    model = nn.Embedding(4, 3, padding_idx=0).to(torch.bfloat16)
    assert renormalize(model, {"weight": 1}) == {"weight": 1}
    norms = model.weight.detach().double().norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([0.0, 1, 1, 1]).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("llama", None, "the scheme of unit norms must be one of dory; got 'llama'."),
        ("llama", {"*.query.weight": 1}, "pattern '*.query.weight' matches no weight; names are like model.embed"),
    ],
)
def test_an_unknown_scheme_or_name_is_an_error_before_training(model, weights, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RenormalizeCallback(weights).on_train_begin(None, None, None, model=MODELS[model]())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT reads it
def test_weights_with_an_adapter_are_an_error():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(dory(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(ValueError, match=r"q_proj.base_layer.weight has an adapter.* Merge it first"):
        renormalize(model)
    torch.testing.assert_close([*model.parameters()], before, rtol=0, atol=0)


def test_parts_that_are_compiled_are_normalized_and_flattened_weights_an_error():
    model, parts = dory(), dory()
    parts.lm_head = torch.compile(parts.lm_head)
    assert renormalize(parts) == renormalize(model)
    torch.testing.assert_close([*parts.parameters()], [*model.parameters()])
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(model.weight.flatten())
    with pytest.raises(RuntimeError, match="weight of shape \\[6\\] is no matrix or kernel"):
        renormalize(model, {"weight": 1})
