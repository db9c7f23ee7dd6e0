"""Tiny language models of many architectures with the vocabulary of the golden model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, RobertaTokenizer

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.models import SphereBertConfig, SphereBertForMaskedLM

SIZES = {
    "vocab_size": 400,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
MASKED = ["Bert", "Roberta", "DistilBert", "Albert", "Electra", "MPNet", "ModernBert", "DebertaV2", "SphereBert"]
CAUSAL = ["GPT2", "Llama"]
OTHER_NAMES = {
    "DistilBert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    "Albert": {"embedding_size": 8},
    "Electra": {"embedding_size": 8},
    "ModernBert": {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3},
    "Llama": {"bos_token_id": None, "eos_token_id": None},
}
"""Configuration options that differ between these architectures."""


@pytest.fixture(scope="session")
def golden_folder(root: Path) -> Path:
    """Reference values of word analogies."""
    return root / "tests" / "golden" / "analogy"


@pytest.fixture(scope="session")
def tiny_bert(golden_folder: Path) -> LanguageModel:
    """The model of the reference values."""
    return LanguageModel.load(golden_folder / "tiny-bert", device="cpu")


@pytest.fixture
def tokenizer(golden_folder: Path) -> PreTrainedTokenizerBase:
    """A WordPiece tokenizer with 400 tokens: 0 [PAD], 1 [UNK], 2 [CLS], 3 [SEP], 4 [MASK]."""
    return AutoTokenizer.from_pretrained(golden_folder / "tiny-bert")


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer: a word inside a text includes the space before it."""
    words = ["is to what as", "word language", "ostrich bird bird", "lion cat cat", "sheep wool"]
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(words * 5, vocab_size=330, min_frequency=2, show_progress=False)
    vocabulary, merges = json.loads(backend.to_str())["model"]["vocab"], json.loads(backend.to_str())["model"]["merges"]
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    shifted = {token: number + len(specials) for token, number in vocabulary.items()}
    vocab = {token: number for number, token in enumerate(specials)} | shifted
    return RobertaTokenizer(vocab=vocab, merges=[tuple(merge) for merge in merges], model_max_length=62)


def _build(architecture: str, head: str = "", **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = SIZES | OTHER_NAMES.get(architecture, {}) | options
    if architecture == "SphereBert":
        return SphereBertForMaskedLM(SphereBertConfig(**settings)).eval()
    if architecture == "GPT2":
        settings = {key: value for key, value in settings.items() if key not in SIZES} | {"vocab_size": 400}
        head = head.replace("ForCausalLM", "LMHeadModel")
    config = getattr(transformers, f"{architecture}Config")(**settings)
    return getattr(transformers, architecture + (head or "Model"))(config).eval()


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """Build a tiny model: `build("Bert", "ForMaskedLM", **options of the configuration)`."""
    return _build


@pytest.fixture(params=MASKED)
def masked(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Masked models of many architectures."""
    return LanguageModel(_build(request.param, "ForMaskedLM"), tokenizer)


@pytest.fixture(params=CAUSAL)
def causal(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Causal models; their tokenizer prepends [CLS]."""
    return LanguageModel(_build(request.param, "ForCausalLM"), tokenizer)
