"""Experts in a stack, and fused queries, keys and values, as separate matrices."""

import copy
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from architectures import IDS, TEXT, VIT, images, of
from steps import give_gradients, take_steps
from torch import Tensor, nn

from hf_sphere.optim import AdamSRT, AdamWHyperball, Muon, MuonHyperball, build_optimizer, scale_invariant_groups

TINY = {**TEXT, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
GPT2 = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1}
TORCH = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


FUSED: dict[str, tuple[Any, Any, str, tuple[int, ...]]] = {
    "torch": (lambda: copy.deepcopy(TORCH), torch.randn(2, 5, 16), "in_proj_weight", (16, 16, 16)),
    "ViT": (partial(timm.create_model, "vit_tiny_patch16_224", **VIT), images(), "qkv.weight", (16,) * 3),
    "EVA-02": (partial(timm.create_model, "eva02_tiny_patch14_224", **VIT), images(), "qkv.weight", (16,) * 3),
    "BEiT": (partial(timm.create_model, "beit_base_patch16_224", **VIT), images(), "qkv.weight", (16,) * 3),
    "RelPos": (
        partial(timm.create_model, "vit_relpos_base_patch32_plus_rpn_256", **VIT), images(), "qkv.weight", (16,) * 3,
    ),
    "Swin": (
        partial(timm.create_model, "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16,
                depths=(2,), num_heads=(2,)),
        images(), "qkv.weight", (16,) * 3,
    ),
    "GPT-2": (partial(of, "GPT2LMHeadModel", **GPT2), {"input_ids": IDS}, "c_attn.weight", (16,) * 3),
    "ModernBERT": (
        partial(of, "ModernBertForMaskedLM", cls_token_id=1, sep_token_id=1, **TINY),
        {"input_ids": IDS}, "Wqkv.weight", (16,) * 3,
    ),
    "Phi-3": (
        partial(of, "Phi3ForCausalLM", **{**TINY, "num_attention_heads": 4, "num_key_value_heads": 2}),
        {"input_ids": IDS}, "qkv_proj.weight", (16, 8, 8),
    ),
}  # fmt: skip


def run(model: nn.Module, batch: Any) -> Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, Tensor) else output.logits


def matrices(groups: Any) -> dict[str, tuple[int, ...]]:
    return {name: group["matrices"] for group in groups if "matrices" in group for name, _ in group["params"]}


@pytest.mark.parametrize("name", FUSED)
def test_the_parts_of_a_fused_weight_are_queries_keys_and_values(name):
    """Scores are bilinear in queries and keys: twice the queries and half the keys leave the output as it is."""
    build, batch, suffix, expected = FUSED[name]
    torch.manual_seed(0)
    model = build().eval()
    groups = Muon.form_groups(model, batch, separate=True)
    found = {weight: parts for weight, parts in matrices(groups).items() if weight.endswith(suffix)}
    assert found
    assert {tuple(sizes) for _, *sizes in found.values()} == {expected}
    assert all(groups.rules[weight].reason == "hidden matrix; 3 matrices: fused qkv" for weight in found)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        before = run(model, batch)
        for weight, (axis, *sizes) in found.items():
            bias = dict(model.named_parameters()).get(weight.replace("weight", "bias"))
            attention = model.get_submodule(weight.removesuffix(suffix).rstrip("."))
            biases = [getattr(attention, f"{kind}_bias", None) for kind in "qk"]
            for index, factor in enumerate((2.0, 0.5)):
                model.get_parameter(weight).split(sizes, axis)[index].mul_(factor)
                for part in (bias.split(sizes)[index] if bias is not None else None, biases[index]):
                    if isinstance(part, Tensor):
                        part.mul_(factor)
        torch.testing.assert_close(run(model, batch), before, rtol=1e-3, atol=1e-4)


def test_fused_weights_with_interleaved_heads_or_in_cross_attention_are_not_split():
    model = of("GPTNeoXForCausalLM", **TINY)
    assert matrices(Muon.form_groups(model, {"input_ids": IDS}, separate=True)) == {}
    model = of("GPT2LMHeadModel", **GPT2, add_cross_attention=True)
    batch = {"input_ids": IDS, "encoder_hidden_states": torch.randn(2, 3, 16)}
    assert {name.split(".")[3] for name in matrices(Muon.form_groups(model, batch, separate=True))} == {"attn"}


class Experts(nn.Module):
    """Stacked experts (E, out, in), each followed by a norm."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(torch.einsum("bi,eoi->beo", x, self.up), (6,)).relu().mean(1)


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Experts(), nn.Linear(6, 2))


X = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["GPT-2", "Phi-3", "experts"])
def test_muon_updates_fused_parts_and_experts_like_matrices_of_their_own(name):
    build, batch, suffix, sizes = FUSED.get(name, (mixture, X, "2.up", (1, 1, 1)))
    model, axis = build(), int(name == "GPT-2")
    optimizer = build_optimizer(model, "muon", batch, lr=0.1, weight_decay=0.01, separate=True)
    fused = next(weight for weight_name, weight in model.named_parameters() if weight_name.endswith(suffix))
    parts = [nn.Parameter(part.detach().squeeze(0).clone()) for part in fused.split(sizes, axis)]
    expected = torch.optim.Muon(parts, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for seed in range(2):
        give_gradients(model.parameters(), seed)
        for part, gradient in zip(parts, fused.grad.split(sizes, axis), strict=True):
            part.grad = gradient.squeeze(0).clone()
        optimizer.step()
        expected.step()
    found = [part.squeeze(0) for part in fused.detach().split(sizes, axis)]
    torch.testing.assert_close(found, [part.detach() for part in parts])


@pytest.mark.parametrize(("kind", "options"), [(MuonHyperball, {"separate": True}), (AdamWHyperball, {})])
def test_every_expert_keeps_its_norm_as_if_it_were_a_tensor_of_its_own(kind, options):
    model = mixture()
    with torch.no_grad():
        model[2].up.mul_(torch.tensor([0.1, 1.0, 10.0])[:, None, None])
    groups = kind.form_groups(model, X, **options)
    assert groups.rules["2.up"].reason.endswith("; 3 matrices: " + ("experts" if options else "invariant each"))
    optimizer = kind(groups, lr=0.01)
    lengths = model[2].up.detach().double().flatten(1).norm(dim=1)
    experts = [nn.Parameter(matrix.detach().clone()) for matrix in model[2].up]
    expected = kind([{"params": experts, "hyperball": True, **({"muon": True} if options else {})}], lr=0.01)
    for seed in range(3):
        give_gradients(model.parameters(), seed)
        for expert, gradient in zip(experts, model[2].up.grad, strict=True):
            expert.grad = gradient.clone()
        optimizer.step()
        expected.step()
    torch.testing.assert_close(model[2].up.detach(), torch.stack([expert.detach() for expert in experts]))
    torch.testing.assert_close(model[2].up.detach().double().flatten(1).norm(dim=1), lengths, rtol=1e-6, atol=0)


def test_experts_of_which_one_is_zero_do_not_keep_their_norms():
    model = mixture()
    with torch.no_grad():
        model[2].up[1] = 0.0
    groups = AdamWHyperball.form_groups(model, X, hyperball_on="matrices", separate=True)
    assert groups.rules["2.up"].name == "adamw"
    assert groups.rules["2.up"].reason.endswith("; a norm is 0")
    for optimizer in (AdamWHyperball(groups, lr=0.01), AdamSRT(scale_invariant_groups(mixture(), X), lr=0.01)):
        take_steps(optimizer, 1)
    moments = [state["exp_avg_sq"].shape for state in optimizer.state.values()]  # of Adam-SRT, one per expert
    assert (3, 1, 1) in moments


def test_a_resumed_run_continues_with_the_norm_of_every_expert(tmp_path):
    def trained(steps: range, state: Any = None) -> tuple[nn.Module, Any]:
        model = mixture()
        optimizer = build_optimizer(model, "muon_hyperball", X, lr=0.1, separate=True)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for seed in steps:
            give_gradients(model.parameters(), seed)
            optimizer.step()
        return model, optimizer

    half = trained(range(2))
    torch.save([each.state_dict() for each in half], tmp_path / "state.pt")
    resumed, _ = trained(range(2, 4), torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(resumed.state_dict(), trained(range(4))[0].state_dict(), rtol=0, atol=0)
    whole = build_optimizer(mixture(), "muon_hyperball", X, lr=0.1, separate={"2.up": 1})
    with pytest.raises(ValueError, match=r"matrices of parameter group 1 is \[0, 1, 1, 1\] in the state and \[0, 3\]"):
        whole.load_state_dict(half[1].state_dict())


def test_further_matrices_are_given_by_patterns_of_names():
    groups = Muon.form_groups(mixture(), X, separate={"0.*": 2})
    assert matrices(groups) == {"0.weight": (0, 2, 2), "2.up": (0, 1, 1, 1)}
    assert groups.rules["0.weight"].reason == "hidden matrix; 2 matrices: matches 0.*"
    for pattern, count, message in (
        ("*.qkv", 3, r"pattern '\*\.qkv' of separate matches no hidden matrix and no stack"),
        *(("0.*", n, rf"separate must give 0\.weight a number of matrices that divides 4; got {n}") for n in (3, -2)),
    ):
        with pytest.raises(ValueError, match=message):
            Muon.form_groups(mixture(), X, separate={pattern: count})


def test_the_trainer_separates_matrices_on_request(tmp_path):
    model = of("MixtralForCausalLM", num_local_experts=3, num_key_value_heads=1, **TINY)
    arguments = transformers.TrainingArguments(
        str(tmp_path), optim="muon", optim_args="separate=true", use_cpu=True, report_to="none"
    )
    optimizer = transformers.Trainer(model, arguments).create_optimizer()
    assert {len(group["matrices"]) - 1 for group in optimizer.param_groups if "matrices" in group} == {3}
