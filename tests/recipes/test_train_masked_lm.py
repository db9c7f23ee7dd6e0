import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fresh_python import run_fresh
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from training_runs import TINY_BERT, same, weights
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    FunnelConfig,
    GPT2Config,
    MobileBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    pipeline,
)

from hf_sphere.data import TextDataOptions, load_text_data
from hf_sphere.training.tasks import masked_lm

RECIPE = "train_masked_lm"
QUICK = ["--model_name_or_path", str(TINY_BERT), "--dataset_name", "TEXTS", "--max_seq_length", "32", "--disable_tqdm"]
QUICK += ["--per_device_train_batch_size", "8", "--num_train_epochs", "2", "--learning_rate", "0.003"]
SPHERIZED = FINISHED = ["--spherized", "--spherized_layers=-1", "--spherization_kwargs={scaling: 5.0, radius: 5.0}"]
FIT = "--fit_spherization"


@torch.no_grad()
def measured(folder: Path, texts: Path, cache: list[str], split: str = "test") -> dict[str, float]:
    """Loss and accuracy of the saved model over all masked tokens of a split at once."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder)
    options = TextDataOptions(str(texts), eval_split=split, cache_dir=cache[1])
    data = load_text_data(options, tokenizer, block_length=32, eval_batch_size=1000, progress=False)
    (batch,) = data.evaluation.epoch()
    target = batch["labels"] != -100
    logits = model(batch["input_ids"]).logits[target]
    labels = batch["labels"][target]
    right = (logits.argmax(-1) == labels).double().mean().item()
    return {"loss": F.cross_entropy(logits, labels).item(), "accuracy": right}


# Output


def test_the_saved_model_reproduces_the_reported_loss_and_accuracy(finished, results_of, texts, cache):
    results, found = results_of(finished), measured(finished, texts, cache)
    assert results["eval_loss"] < math.log(400) - 1  # the chance level is log(400)
    assert found == pytest.approx({name: results[f"eval_{name}"] for name in found}, rel=1e-5)
    for prefix in ("eval", "validation", "train"):
        assert results[f"{prefix}_perplexity"] == pytest.approx(math.exp(results[f"{prefix}_loss"]))


def test_the_transformers_pipeline_fills_a_mask_by_the_spherized_model(finished):
    fill = pipeline("fill-mask", model=str(finished))
    assert len(fill(f"the cat {fill.tokenizer.mask_token} milk .")) == 5
    config = fill.model.config
    found = (config.model_type, config.spherized_layers, config.spherization_scaling, config.spherization_radius)
    assert found == ("sphere_bert", [-1], 5.0, 5.0)
    assert "option" not in json.loads((finished / "tokenizer_config.json").read_text())


def test_the_card_is_a_text_model_card(finished):
    card = (finished / "README.md").read_text()
    assert 'pipeline("fill-mask"' in card
    assert "spherized: layer 1" in card
    assert not [word for word in ("image", "Image", "timm", "classify") if word in card]


# Models


def test_a_roberta_with_byte_level_tokens_can_be_spherized(train, texts, tmp_path):
    """RoBERTa's positions start after the padding index, so it accepts fewer tokens than it has positions."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train([str(texts / "train.txt")], vocab_size=300, special_tokens=special, show_progress=False)
    trained._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, mask_token="<mask>", **names)
    config = RobertaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=34,
    )  # fmt: skip
    for part in (tokenizer, RobertaForMaskedLM(config)):
        part.save_pretrained(tmp_path / "roberta")
    words = ["--model_name_or_path", str(tmp_path / "roberta"), "--spherized"]
    folder = train(*words, "--num_train_epochs", "1")
    assert AutoModelForMaskedLM.from_pretrained(folder).config.model_type == "sphere_roberta"
    with pytest.raises(ValueError, match="max_seq_length 33 exceeds the maximum of the model, 32 tokens"):
        train(*words, "--max_seq_length", "33", name="longer")


def test_the_maximum_length_defaults_to_that_of_the_tokenizer(train, tmp_path):
    FunnelConfig(vocab_size=400, block_sizes=[1], d_model=8, n_head=2, d_head=4, d_inner=8).save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--tokenizer_name", str(TINY_BERT), "--from_scratch"]
    train(*words, "--stop_after_steps", "1")
    with pytest.raises(ValueError, match="max_seq_length 65 exceeds the maximum of the model, 64 tokens"):
        train(*words, "--max_seq_length", "65", name="longer")


def test_a_plain_model_starts_from_its_weights_and_a_fitted_one_closer_to_it(train, results_of):
    fit = [*SPHERIZED, FIT]
    starts = [train("--num_train_epochs", "0", *words, name=str(len(words))) for words in ([], SPHERIZED, fit)]
    assert same(weights(starts[0]), weights(TINY_BERT))
    plain, spherized, fitted = (results_of(folder)["eval_loss"] for folder in starts)
    assert abs(fitted - plain) < 0.2 * abs(spherized - plain)


# Objectives


def test_a_model_learns_to_repeat_its_input(train, results_of):
    results = results_of(train("--objective", "reconstruction", "--num_train_epochs", "4"))
    assert results["eval_accuracy"] > 0.6


# Randomness, resuming


def test_resuming_does_not_repeat_the_data_dependent_initialization(train, monkeypatch):
    words = [*SPHERIZED, FIT, "--num_train_epochs", "1"]
    train(*words, "--stop_after_steps", "3")
    monkeypatch.setattr(masked_lm, "fit_to_plain_model", lambda *_: pytest.fail("fitted twice"))
    train(*words, "--resume_from_checkpoint", "latest")


# Errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=400), "GPT2Config"),
        (None, "to spherize must be one of .*; got 'sphere_bert'"),
        (MobileBertConfig(), r"must be one of bert, .*; got 'mobilebert'"),
    ],
    ids=["no masked language model", "spherized", "unsupported"],
)
def test_a_model_that_cannot_be_spherized_is_refused(train, finished, config, message, tmp_path):
    if config is not None:
        config.save_pretrained(tmp_path / "model")
    folder, words = (finished if config is None else tmp_path / "model"), ["--tokenizer_name", str(TINY_BERT)]
    with pytest.raises(ValueError, match=message):
        train("--model_name_or_path", str(folder), *words, *(["--spherized"] if "GPT2" not in message else []))


def test_a_tokenizer_without_a_mask_token_is_refused(train, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_BERT)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="has no mask token"):
        train("--tokenizer_name", str(tmp_path / "tokenizer"))


# Separate processes

SCRIPT = "recipes/train_masked_lm.py"

WITHOUT_IMAGES = """
import runpy, sys
sys.modules["torchvision"] = sys.modules["timm"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
ours = {name for name in sys.modules if name.startswith(("hf_sphere.data.", "hf_sphere.training."))}
print("of images:", sorted(name for name in ours if any(word in name for word in ("image", "augment", "decoding"))))
"""


@pytest.mark.slow
def test_text_training_does_not_require_image_dependencies(root, environment, texts, cache, tmp_path):
    quick = [str(texts) if word == "TEXTS" else word for word in QUICK]
    words = [*quick, *cache, *SPHERIZED, "--num_train_epochs", "1", "--max_train_samples", "16"]
    command = [sys.executable, "-c", WITHOUT_IMAGES, SCRIPT, *words, "--output_dir", tmp_path / "run"]
    ended = run_fresh(command, hugging_face=False, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "of images: []" in ended.stdout
