"""Architectures of timm and transformers with tiny dimensions, and what each of their parameters is for.

The roles are written down from the papers and the code of the models: the first pattern that a name matches is that of
its role, and parameters that match none are hidden matrices. Parameters with a single axis do not decay: they are
biases, gains of norms, layer scales and temperatures.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import transformers
from timm.models import levit, mlp_mixer
from torch import Tensor, nn

ROLES = {
    "output": r"^(head|fc|classifier|lm_head|pooler|visual_projection|text_projection)|decoder_pred|final_layer",
    "embedding": r"(?<!patch_)(embeddings?|embed_tokens|wte|wpe|shared|relative_attention_bias)\.weight$",
    "unused": "$^",
    "undecayed": "_tokens?$|pos_embed$|position_embeddings$|class_embedding|latent|probe|bias_table|attention_biases|"
    "logit_scale|cpb_mlp|temperature|alpha|beta|gain|A_log|grn|original0",
    "thin": r"local_mp|conv_dw|dwconv|conv2_kxk|conv1d|conv_layers\.0|blocks\.\d+\.conv\.weight",
    "stack": "experts",
}


class Architecture(NamedTuple):
    """A model, its batch, and patterns of its parameters where those of `ROLES` do not fit."""

    build: Callable[[], nn.Module]
    batch: Any
    patterns: dict[str, str] = {}

    def role_of(self, name: str, weight: Tensor) -> str:
        """Return the role of a parameter: a key of `ROLES`, or `hidden`."""
        matching = (role for role, pattern in (ROLES | self.patterns).items() if re.search(pattern, name))
        return next(matching, "hidden") if weight.ndim > 1 else "undecayed"


def images(size: int = 32) -> Tensor:
    """Return a batch of images."""
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A scale-invariant convolution, a hidden matrix that is not scale-invariant, an embedding, an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 8, 3, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Return three numbers for each row of indices."""
        maps = self.norm(self.conv(self.embedding(ids).mT)).mean(-1)
        return self.output(torch.tanh(self.hidden(maps)))


def net(seed: int = 0) -> Net:
    """Return a net whose weights are determined by a seed."""
    torch.manual_seed(seed)
    return Net()


TOKENS = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0))  # input of `Net`
IDS = torch.randint(5, 30, (2, 8), generator=torch.Generator().manual_seed(0))
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2)}
BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 40, "max_position_embeddings": 32, **BODY}
IMAGE = {"image_size": 32, "num_labels": 5}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}


def of_timm(name: str, size: int = 32, options: Any = None, **patterns: str) -> Architecture:
    """Return an architecture of timm's registry."""
    return Architecture(lambda: timm.create_model(name, num_classes=5, **(options or {})), images(size), patterns)


def of_class(build: Callable[..., nn.Module], options: dict[str, Any], size: int = 32) -> Architecture:
    """Return an architecture of timm from its class."""
    return Architecture(lambda: build(num_classes=5, **options), images(size))


def of(task: str, **options: Any) -> nn.Module:
    """Return a model of transformers by the name of its class, with options of its configuration."""
    kind = getattr(transformers, task)
    return kind(kind.config_class(**options))


def of_transformers(task: str, options: dict[str, Any], batch: Any = None, **patterns: str) -> Architecture:
    """Return an architecture of transformers."""
    return Architecture(lambda: of(task, **options), batch or {"input_ids": IDS}, patterns)


PIXELS = {"pixel_values": images()}
BOTH = {"input_ids": IDS, **PIXELS}
SEQ2SEQ = {"input_ids": IDS, "decoder_input_ids": IDS}
AUDIO = {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(0))}
SIDES = {"patch_size": 8, "image_size": 32}

ARCHITECTURES = {
    # timm
    "ViT": of_timm("vit_tiny_patch16_224", options=VIT),
    "ViT with registers and attention pooling": of_timm(
        "vit_base_patch16_siglip_224", options={**VIT, "reg_tokens": 2, "init_values": 1e-5}
    ),
    "BEiT": of_timm("beit_base_patch16_224", options=VIT),
    "XCiT": of_timm("xcit_nano_12_p8_224", options={"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "ResMLP": of_class(
        mlp_mixer.MlpMixer,
        {**MIXER, "mlp_ratio": 4, "block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine},
    ),
    "Swin": of_timm("swin_tiny_patch4_window7_224", options=SWIN),
    "Swin v2": of_timm("swinv2_tiny_window8_256", options=SWIN),
    "MaxViT": of_timm("test_maxvit", 64, {"img_size": 64}),
    "ResNet": of_timm("test_resnet"),
    "ConvNeXt": of_timm("test_convnext", 64),
    "EfficientNet": of_timm("test_efficientnet"),
    "NFNet": of_timm("test_nfnet"),
    "MambaOut": of_timm("test_mambaout", output=r"^head\.fc"),
    "LeViT with distillation": of_class(
        levit.LevitDistilled,
        {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
        64,
    ),
    # transformers: text
    "BERT for masked language modeling": of_transformers("BertForMaskedLM", TEXT),
    "BERT with pooler": of_transformers("BertModel", TEXT),
    "BERT encoder": Architecture(
        lambda: transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False), {"input_ids": IDS}
    ),
    "DeBERTa v3": of_transformers(
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, **TEXT},
    ),
    "ModernBERT": of_transformers(
        "ModernBertForMaskedLM",
        {**TEXT, **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 1)},
        output="$^",
    ),
    "GPT-2": of_transformers(
        "GPT2LMHeadModel", {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ),
    "Llama": of_transformers("LlamaForCausalLM", TEXT),
    "Mixtral": of_transformers("MixtralForCausalLM", {"num_local_experts": 3, "num_key_value_heads": 1, **TEXT}),
    "Mamba": of_transformers(
        "MambaForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
    ),
    "T5": of_transformers(
        "T5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        SEQ2SEQ,
    ),
    # transformers: images, audio, several kinds of input
    "Swin of transformers, with its hidden states": of_transformers(
        "SwinForImageClassification",
        {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2], **IMAGE}
        | {"output_hidden_states": True},
        PIXELS,
    ),
    "DINOv2 with registers": of_transformers(
        "Dinov2WithRegistersForImageClassification",
        {"use_swiglu_ffn": True, **SIDES, **IMAGE, **BODY},
        PIXELS,
        unused="mask_token",
    ),
    "ConvNeXt v2": of_transformers("ConvNextV2ForImageClassification", {**STAGES, **IMAGE}, PIXELS),
    "ViT-MAE": of_transformers(
        "ViTMAEForPreTraining",
        {**SIDES, **BODY, **{f"decoder_{name}": size for name, size in {**BODY, "num_hidden_layers": 1}.items()}},
        PIXELS,
    ),
    "CLIP": of_transformers(
        "CLIPModel",
        {"projection_dim": 8, "text_config": {**TEXT, "eos_token_id": 29}, "vision_config": {**SIDES, **BODY}},
        BOTH,
    ),
    "SigLIP": of_transformers(
        "SiglipModel",
        {"text_config": {**TEXT, "projection_size": 16}, "vision_config": {**SIDES, **BODY}},
        BOTH,
        output=r"^text_model\.head",  # the attention pooling of images ends with a residual sum
    ),
    "wav2vec 2.0": of_transformers(
        "Wav2Vec2ForCTC",
        {"vocab_size": 12, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "layerdrop": 0.5}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, **BODY},
        AUDIO,
    ),
    "Perceiver": of_transformers(
        "PerceiverForSequenceClassification",
        {"vocab_size": 40, "d_model": 16, "d_latents": 16, "num_latents": 4, "num_blocks": 1}
        | {"num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
        | {"max_position_embeddings": 8},
    ),
}


def described(optimizer: torch.optim.Optimizer) -> list[tuple[Any, float, list[str]]]:
    """Return axes of groups, weight decay and names of the parameters of each group."""
    return [(group["channel_dims"], group["weight_decay"], group["param_names"]) for group in optimizer.param_groups]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
