"""Which weights of twenty architectures are scale-invariant, by the numerical check on tiny models with random weights.

python benchmarks/scale_invariance.py

Takes seconds on one core. Weights of all layers have one name, with `*` for the numbers. Writes
`results/scale_invariance.json`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
import transformers
from common import report, row
from timm.models import mlp_mixer
from torch import nn

from hf_sphere.optim import find_scale_invariant_weights

IDS = torch.randint(5, 30, (2, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TOKENS = dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos")], 1)
TEXT = {"vocab_size": 40, "max_position_embeddings": 32, **BODY, **TOKENS}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
IMAGE = {"image_size": 64, "patch_size": 16, "num_labels": 5, **BODY}
SMALL = {"img_size": 64, "num_classes": 5}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", TEXT),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, **TOKENS}),
    "llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 3}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8,
         "n_groups": 1, "chunk_size": 8, **TOKENS},
    ),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
                                          "num_heads": 2}),
    "modernbert": ("ModernBertForMaskedLM", {**TEXT, "cls_token_id": 1, "sep_token_id": 1}),
    "vit": ("ViTForImageClassification", IMAGE),
    "dinov2": ("Dinov2ForImageClassification", IMAGE),
    "dory": ("DoryForCausalLM", {**GROUPED, "num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1}),
}  # fmt: skip


def of_transformers(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build a model from its class and the options of its configuration."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


TIMM: dict[str, Callable[[], nn.Module]] = {
    "timm: resnet": lambda: timm.create_model("test_resnet", num_classes=5),
    "timm: regnet": lambda: timm.create_model("regnetx_002", num_classes=5),
    "timm: efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=5),
    "timm: nfnet": lambda: timm.create_model("test_nfnet", num_classes=5),
    "timm: convnext": lambda: timm.create_model("test_convnext", num_classes=5),
    "timm: vit": lambda: timm.create_model(
        "vit_tiny_patch16_224", embed_dim=16, depth=2, num_heads=2, patch_size=16, **SMALL
    ),
    "timm: swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", window_size=4, embed_dim=16, depths=(2, 1), num_heads=(1, 2), **SMALL
    ),
    "timm: resmlp": lambda: mlp_mixer.MlpMixer(
        patch_size=16, embed_dim=16, num_blocks=2, mlp_ratio=4, block_layer=mlp_mixer.ResBlock,
        norm_layer=mlp_mixer.Affine, **SMALL
    ),
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda entry=entry: of_transformers(*entry) for name, entry in TRANSFORMERS.items()},  # type: ignore[misc]
    **TIMM,
}


def find_groups(name: str) -> dict[str, str]:
    """Return the kind of the scale-invariant groups of each weight: rows, per head, per expert, whole or none."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    batch: Any = None
    if name in TIMM:
        batch = PIXELS
    elif model.main_input_name == "pixel_values":
        batch = {"pixel_values": PIXELS}
    else:
        batch = {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}
    found = find_scale_invariant_weights(model, batch)
    groups = {}
    for weight in found.num_weights:
        dims = found.channel_dims.get(weight)
        if dims == (0,):
            module = model.get_submodule(weight.rpartition(".")[0])
            groups[weight] = "per expert" if hasattr(module, "num_experts") else "rows"
        elif dims == ():
            groups[weight] = "per head" if weight in found.blocks else "whole"
        else:
            groups[weight] = "none" if dims is None else "columns"
    return groups


def merge_layers(groups: Mapping[str, str]) -> dict[str, str]:
    """Return the groups by name with `*` for numbers; layers that differ are named by all of their kinds."""
    kinds: dict[str, dict[str, None]] = {}
    for weight, kind in groups.items():
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", weight), {})[kind] = None
    return {weight: ", ".join(found) for weight, found in kinds.items()}


def main() -> None:
    """Find the groups of every model."""
    rows, found = [], {}
    for name in MODELS:
        found[name] = find_groups(name)
        invariant = sum(kind != "none" for kind in found[name].values())
        rows.append(row(f"{name}: scale-invariant weights", invariant))
        rows.append(row(f"{name}: weights with two or more axes", len(found[name])))
    report("scale_invariance", rows, groups={name: merge_layers(groups) for name, groups in found.items()},
           transformers=transformers.__version__, timm=timm.__version__)  # fmt: skip


if __name__ == "__main__":
    main()
