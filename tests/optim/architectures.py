"""Architectures of timm and transformers with tiny dimensions, and what each of their parameters is for.

The roles are written down from the papers and the code of the models: the first pattern that a name matches is that of
its role, and parameters that match none are hidden matrices. Parameters with a single axis are not listed: they are
biases, gains of norms, layer scales and temperatures, which do not decay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import transformers
from timm.models import levit, mlp_mixer
from torch import Tensor, nn


class Architecture(NamedTuple):
    """A model, its batch, and patterns of the names of its parameters that are not hidden matrices."""

    build: Callable[[], nn.Module]
    batch: Any
    output: str = "$^"
    embedding: str = "$^"
    undecayed: str = "$^"
    thin: str = "$^"
    stack: str = "$^"
    unused: str = "$^"


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


def of_timm(name: str, size: int = 32, options: Any = None, **roles: str) -> Architecture:
    """Return an architecture of timm's registry."""
    return Architecture(lambda: timm.create_model(name, num_classes=5, **(options or {})), images(size), **roles)


def of_class(build: Callable[..., nn.Module], options: dict[str, Any], size: int = 32, **roles: str) -> Architecture:
    """Return an architecture of timm from its class."""
    return Architecture(lambda: build(num_classes=5, **options), images(size), **roles)


def of_transformers(task: str, options: dict[str, Any], batch: Any = None, **roles: str) -> Architecture:
    """Return an architecture of transformers."""
    kind = getattr(transformers, task)
    return Architecture(lambda: kind(kind.config_class(**options)), batch or {"input_ids": IDS}, **roles)


PIXELS = {"pixel_values": images()}
BOTH = {"input_ids": IDS, **PIXELS}
SEQ2SEQ = {"input_ids": IDS, "decoder_input_ids": IDS}
AUDIO = {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(0))}
BERT_TABLES = r"word_embeddings|position_embeddings|token_type_embeddings"
CLASS_TOKENS = "cls_token|pos_embed"
BIAS_TABLE = "relative_position_bias_table"
DEPTHWISE = r"conv_dw|dwconv|conv2_kxk"

ARCHITECTURES = {
    # timm
    "ViT": of_timm("vit_tiny_patch16_224", options=VIT, output="^head", undecayed=CLASS_TOKENS),
    "ViT with registers and attention pooling": of_timm(
        "vit_base_patch16_siglip_224",
        options={**VIT, "reg_tokens": 2, "init_values": 1e-5},
        output="^head",
        undecayed="reg_token|pos_embed|latent",
    ),
    "BEiT": of_timm("beit_base_patch16_224", options=VIT, output="^head", undecayed=f"{CLASS_TOKENS}|{BIAS_TABLE}"),
    "XCiT": of_timm(
        "xcit_nano_12_p8_224",
        options={"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
        output="^head",
        undecayed="cls_token|temperature",
        thin="local_mp",
    ),
    "ResMLP": of_class(
        mlp_mixer.MlpMixer,
        {**MIXER, "mlp_ratio": 4, "block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine},
        output="^head",
        undecayed="alpha|beta",
    ),
    "Swin": of_timm("swin_tiny_patch4_window7_224", options=SWIN, output="^head", undecayed=BIAS_TABLE),
    "Swin v2": of_timm("swinv2_tiny_window8_256", options=SWIN, output="^head", undecayed="logit_scale|cpb_mlp"),
    "MaxViT": of_timm("test_maxvit", 64, {"img_size": 64}, output="^head", undecayed=BIAS_TABLE, thin=DEPTHWISE),
    "ResNet": of_timm("test_resnet", output="^fc"),
    "ConvNeXt": of_timm("test_convnext", 64, output="^head", thin=DEPTHWISE),
    "EfficientNet": of_timm("test_efficientnet", output="^classifier", thin=DEPTHWISE),
    "NFNet": of_timm("test_nfnet", output="^head", undecayed="gain"),
    "MambaOut": of_timm("test_mambaout", output=r"^head\.fc", thin=r"blocks\.\d+\.conv"),
    "LeViT with distillation": of_class(
        levit.LevitDistilled,
        {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
        64,
        output="^head",
        undecayed="attention_biases",
    ),
    # transformers: text
    "BERT for masked language modeling": of_transformers("BertForMaskedLM", TEXT, embedding=BERT_TABLES),
    "BERT with pooler": of_transformers("BertModel", TEXT, output="^pooler", embedding=BERT_TABLES),
    "BERT encoder": Architecture(
        lambda: transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False),
        {"input_ids": IDS},
        embedding=BERT_TABLES,
    ),
    "DeBERTa v3": of_transformers(
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, **TEXT},
        embedding=f"{BERT_TABLES}|rel_embeddings",
    ),
    "ModernBERT": of_transformers(
        "ModernBertForMaskedLM",
        {**TEXT, **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 1)},
        embedding="tok_embeddings",
    ),
    "GPT-2": of_transformers(
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
        embedding="wte|wpe",
    ),
    "Llama": of_transformers("LlamaForCausalLM", TEXT, output="^lm_head", embedding="embed_tokens"),
    "Mixtral": of_transformers(
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_key_value_heads": 1, **TEXT},
        output="^lm_head",
        embedding="embed_tokens",
        stack="experts",
    ),
    "Mamba": of_transformers(
        "MambaForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
        embedding="embeddings",
        undecayed="A_log",
        thin="conv1d",
    ),
    "T5": of_transformers(
        "T5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        SEQ2SEQ,
        embedding="shared|relative_attention_bias",
    ),
    # transformers: images, audio, several kinds of input
    "Swin of transformers, with its hidden states": of_transformers(
        "SwinForImageClassification",
        {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2], **IMAGE}
        | {"output_hidden_states": True},
        PIXELS,
        output="^classifier",
        undecayed=BIAS_TABLE,
    ),
    "DINOv2 with registers": of_transformers(
        "Dinov2WithRegistersForImageClassification",
        {"patch_size": 8, "use_swiglu_ffn": True, **IMAGE, **BODY},
        PIXELS,
        output="^classifier",
        undecayed=r"cls_token|position_embeddings|register_tokens",
        unused="mask_token",
    ),
    "ConvNeXt v2": of_transformers(
        "ConvNextV2ForImageClassification",
        {**STAGES, **IMAGE},
        PIXELS,
        output="^classifier",
        undecayed="grn",
        thin=DEPTHWISE,
    ),
    "ViT-MAE": of_transformers(
        "ViTMAEForPreTraining",
        {"patch_size": 8, "image_size": 32, **BODY}
        | {f"decoder_{name}": size for name, size in {**BODY, "num_hidden_layers": 1}.items()},
        PIXELS,
        output="decoder_pred",
        undecayed="cls_token|mask_token|position_embeddings|decoder_pos_embed",
    ),
    "CLIP": of_transformers(
        "CLIPModel",
        {
            "projection_dim": 8,
            "text_config": {**TEXT, "eos_token_id": 29},
            "vision_config": {"patch_size": 8, "image_size": 32, **BODY},
        },
        BOTH,
        output="^visual_projection|^text_projection",
        embedding="token_embedding|position_embedding",
        undecayed="class_embedding",
    ),
    "SigLIP": of_transformers(
        "SiglipModel",
        {"text_config": {**TEXT, "projection_size": 16}, "vision_config": {"patch_size": 8, "image_size": 32, **BODY}},
        BOTH,
        output=r"^text_model\.head",  # the attention pooling of images ends with a residual sum
        embedding="token_embedding|position_embedding",
        undecayed="probe",
    ),
    "wav2vec 2.0": of_transformers(
        "Wav2Vec2ForCTC",
        {"vocab_size": 12, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "layerdrop": 0.5}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, **BODY},
        AUDIO,
        output="^lm_head",
        undecayed="original0",
        thin=r"conv_layers\.0",
    ),
    "Perceiver": of_transformers(
        "PerceiverForSequenceClassification",
        {"vocab_size": 40, "d_model": 16, "d_latents": 16, "num_latents": 4, "num_blocks": 1}
        | {"num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
        | {"max_position_embeddings": 8},
        output="final_layer",
        embedding=r"input_preprocessor\.(embeddings|position_embeddings)",
        undecayed="latents|output_position_encodings",
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
