"""Learning rates of a wide and deep model from those of a narrow and shallow one."""

import re
from functools import partial

import pytest
import torch
from architectures import of
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_sphere.optim import AdamWHyperball, Muon, MuonHyperball, build_optimizer
from hf_sphere.optim.groups import ParameterGroups

BODY = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": 40, "max_position_embeddings": 32, **BODY}
MODELS = {
    "Llama": partial(of, "LlamaForCausalLM", **TEXT),
    "GPT-2": partial(of, "GPT2LMHeadModel", vocab_size=40, n_positions=32, n_embd=32, n_layer=8, n_head=2),
    "BERT": partial(of, "BertForMaskedLM", **TEXT),
    "ViT": partial(of, "ViTForImageClassification", image_size=16, patch_size=8, num_labels=5, **BODY),
}
BASE = {"base_width": 8, "base_layers": 2}
"""A quarter of the width and of the layers."""
KINDS = {"muon": (Muon, {}), **{k.__name__: (k, {"hyperball_on": "matrices"}) for k in (MuonHyperball, AdamWHyperball)}}
HIDDEN = {"muon": 1 / 4, "MuonHyperball": 1 / 2, "AdamWHyperball": 1 / 4}
"""Factor of a hidden matrix in the layers: 1/2 of the depth, and 1/2, 1 or 1/2 of the width."""
LAYER = r"\.\d+\."
FACTORS = {
    "Llama": {"lm_head": 1 / 4, "embed_tokens|model.norm": 1.0},
    "GPT-2": {"wte": 1 / 4, "wpe|ln_f": 1.0},
    "BERT": {"word_embeddings": 1 / 4, "embeddings|bias|LayerNorm": 1.0},
    "ViT": {"classifier.weight": 1 / 4, "embeddings|classifier|vit.layernorm": 1.0},
}
"""Of parameters outside of the layers, by the first pattern that their names match."""


def rates(groups: ParameterGroups) -> dict[str, float]:
    return {name: group.get("lr", 1.0) for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_rates_of_an_architecture_follow_the_roles_of_its_parameters(model, kind):
    optimizer, options = KINDS[kind]
    network = MODELS[model]()
    found = rates(optimizer.form_groups(network, lr=1.0, **BASE, **options))
    for name, parameter in network.named_parameters():
        if re.search(LAYER, name):
            expected = HIDDEN[kind] if parameter.ndim > 1 else 1 / 2
        else:
            # The matrix of BERT's head on the hidden states is hidden, but in no layer.
            by_pattern = (factor for pattern, factor in FACTORS[model].items() if re.search(pattern, name))
            expected = next(by_pattern, 2 * HIDDEN[kind])
        assert (name, found[name]) == (name, pytest.approx(expected))


def test_a_model_of_the_size_of_the_base_has_its_rates_and_width_alone_does_not_scale_biases_and_norms():
    network = MODELS["GPT-2"]()
    assert set(rates(Muon.form_groups(network, lr=0.5, base_width=32, base_layers=8)).values()) == {1.0}
    found = rates(Muon.form_groups(network, lr=1.0, base_width=8))
    expected = {name for name, parameter in network.named_parameters() if parameter.ndim == 1 or "wpe" in name}
    assert {name for name, rate in found.items() if rate == 1.0} == expected


def test_scaled_norms_and_biases_still_do_not_decay():
    network = MODELS["BERT"]()
    with_base, without = (Muon.form_groups(network, **options) for options in (BASE, {}))
    decays = [
        {n: g.get("weight_decay") != 0 for g in groups for n, _ in g["params"]} for groups in (with_base, without)
    ]
    assert decays[0] == decays[1]


def test_the_printed_groups_show_the_factors_which_multiply_those_of_names():
    text = str(MuonHyperball.form_groups(MODELS["Llama"](), hyperball_on="matrices", **BASE))
    (line,) = (line for line in text.splitlines() if line.startswith("lm_head"))
    assert line.endswith("; lr x 0.25")
    name = "transformer.h.0.mlp.c_fc.weight"
    optimizer = build_optimizer(MODELS["GPT-2"](), "muon", lr=1.0, lr_scales={name: 0.1}, **BASE)
    (group,) = (group for group in optimizer.param_groups if name in group["param_names"])
    assert group["lr"] == pytest.approx(0.1 / 4)


def test_the_trainer_takes_the_base_from_optim_args(tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), optim="muon", optim_args="base_width=8,base_layers=2", learning_rate=0.1, use_cpu=True
    )
    optimizer = Trainer(MODELS["Llama"](), arguments).create_optimizer()
    assert {round(group["lr"], 4) for group in optimizer.param_groups} == {0.025, 0.05, 0.1}


def test_the_width_of_a_model_without_configuration_is_that_of_its_output_layer():
    network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    found = rates(Muon.form_groups(network, torch.randn(4, 6), lr=1.0, base_width=8))
    assert {name: rate for name, rate in found.items() if "weight" in name} == {
        **{"0.weight": 1.0, "2.weight": 0.5, "4.weight": 0.25}
    }


class Branches(nn.Module):
    """Two output layers of different widths, a matrix that is not used, and no layers."""

    def __init__(self, is_frozen: bool = True) -> None:
        super().__init__()
        self.body, self.a, self.b, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 3), nn.Linear(4, 4)
        self.unused.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(self.body(x).tanh()), self.b(x)


T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 3}
X = torch.randn(4, 6)
BAD = {
    "base_width must be at most that of the model, 32; got 64": (MODELS["Llama"], None, {"base_width": 64}),
    "base_layers must be at most that of the model, 8; got 9": (MODELS["Llama"], None, {"base_layers": 9}),
    "base_width must be an integer of at least 0; got -1": (MODELS["Llama"], None, {"base_width": -1}),
    "base_layers must be an integer of at least 0; got 2.5": (MODELS["Llama"], None, {"base_layers": 2.5}),
    r"encoder\.block has 2, decoder\.block has 3; use lr_scales": (
        partial(of, "T5ForConditionalGeneration", **T5), None, {"base_layers": 2},
    ),
    r"rates of unused\.weight cannot be scaled: their role is unknown": (lambda: Branches(False), X, {"base_width": 4}),
    r"output layers have \[6, 8\] inputs; use lr_scales": (Branches, X, {"base_width": 4}),
    "base_layers must be at most that of the model, 0; got 1": (Branches, X, {"base_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_base_that_does_not_fit_and_unknown_roles_and_widths_are_refused_by_name(message):
    build, batch, options = BAD[message]
    with pytest.raises(ValueError, match=message):
        Muon.form_groups(build(), batch, **options)
