"""The scale-invariant weights of twenty architectures, against a list from reading the code of the models.

A name that matches a pattern has scale-invariant groups of its kind; all others have none. A weight is invariant if
everything that depends on it passes a norm that sees nothing else: no bias, no residual sum, no gate.
"""

import json
import re

import pytest
import torch
import transformers
from reproduction.summaries import BENCHMARKS
from scale_invariance import MODELS, PIXELS, TIMM, find_groups, merge_layers
from torch import nn

from hf_sphere.optim import find_scale_invariant_weights
from hf_sphere.optim.invariance import call, open_trial, perturb

# Queries and keys have a norm per head. If the outputs of attention and MLP are also normalized before the residual
# sum, so are all linear maps on the way to it; the input of SiLU or of a sigmoid (gate) is not linear.
QUERIES_AND_KEYS = {r"self_attn\.[qk]_proj": "per head"}
BEFORE_NORMS = {r"self_attn\.[vo]_proj|mlp\.(up|down)_proj": "whole"}
READ = {
    "bert": {},  # norms see residual sums, embeddings are summed
    "gpt2": {},  # norms see the residual stream
    "llama": {},
    "qwen3": QUERIES_AND_KEYS,
    "gemma3": {**QUERIES_AND_KEYS, **BEFORE_NORMS},
    "mixtral": {},  # outputs of experts are summed into the residual stream
    "mamba2": {},  # what the gated norm sees has passed SiLU, and a sum with the input
    "t5": {},
    "modernbert": {},  # a norm follows the embedding, but the output layer uses the same weight
    "vit": {},
    "dinov2": {},
    # The first layer begins with a norm of the embedding. A norm over all heads sees values.
    "dory": {"embed_tokens": "rows", **QUERIES_AND_KEYS, **BEFORE_NORMS},
    "timm: resnet": {r"conv|downsample": "rows"},  # batch norm follows every convolution
    "timm: regnet": {r"conv\.weight": "rows"},
    "timm: efficientnet": {r"conv_(stem|head|exp|pwl?|dw)\.|\.conv\.": "rows"},  # squeeze-and-excitation has no norm
    "timm: nfnet": {r"conv\w*\.weight": "rows"},  # weights are standardized
    "timm: convnext": {},  # convolutions before layer norms have biases
    "timm: vit": {},
    "timm: swin": {},  # the patch embedding has a bias; the norm of patch merging is before its map
    "timm: resmlp": {},  # affine maps instead of norms
}


KNOWN = [name for name in MODELS if name != "dory" or hasattr(transformers, "DoryForCausalLM")]
"""Without those that an older version of transformers lacks."""


@pytest.mark.parametrize("name", [name for name in READ if name in KNOWN])
def test_the_check_finds_what_the_code_of_the_model_says(name):
    found = find_groups(name)
    expected = {
        weight: next((kind for pattern, kind in READ[name].items() if re.search(pattern, weight)), "none")
        for weight in found
    }
    assert found == expected


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "timm: resnet", "timm: nfnet", "timm: convnext"])
@torch.no_grad()
def test_the_output_is_invariant_to_scaling_of_scale_invariant_groups_only(name):
    groups = find_groups(name)
    with open_trial(MODELS[name]().double(), PIXELS if name in TIMM else None) as (model, batch):
        perturb(model)

        def answer() -> torch.Tensor:
            torch.manual_seed(1)  # for dropout
            return getattr(output := call(model, batch), "logits", output)

        before = answer()
        for weight_name, weight in model.named_parameters():
            if weight.ndim > 1:
                kept, kind = weight.clone(), groups[weight_name]
                (weight[0] if kind == "rows" else weight).mul_(3.0)
                change = (answer() - before).norm() / before.norm()
                assert change > 1e-4 if kind == "none" else change < 1e-5, weight_name
                weight.copy_(kept)


@pytest.mark.skipif(not hasattr(transformers, "DoryForCausalLM"), reason="older versions name weights differently")
def test_the_published_table_has_the_groups_that_are_found():
    published = json.loads((BENCHMARKS / "scale_invariance.json").read_text("utf-8"))["groups"]
    assert published == {name: merge_layers(find_groups(name)) for name in MODELS}


class Heads(nn.Module):
    """Four heads of three rows: each one normalized, or all at once."""

    def __init__(self, per_head: bool) -> None:
        super().__init__()
        self.map, self.per_head = nn.Linear(5, 12, bias=False), per_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.map(x)
        return (
            nn.functional.rms_norm(y.unflatten(-1, (4, 3)), (3,)) if self.per_head else nn.functional.rms_norm(y, (12,))
        )


@pytest.mark.parametrize(("per_head", "blocks"), [(True, {"map.weight": 4}), (False, {})])
def test_heads_with_a_norm_of_their_own_are_counted(per_head, blocks):
    torch.manual_seed(0)
    found = find_scale_invariant_weights(Heads(per_head), torch.randn(7, 5))
    assert (found.channel_dims, found.blocks) == ({"map.weight": ()}, blocks)
    assert ("also each of 4 blocks" in str(found)) is per_head
