"""Training with a loss that is a mean over target tokens, whose number varies between batches."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import Tensor, nn

import hf_sphere
from hf_sphere.data import Masking, TextBatches, Vocabulary
from hf_sphere.training import RecipeArguments, TrainingLoop
from hf_sphere.training.evaluation import evaluate, measure_tokens, perplexity

VOCABULARY = Vocabulary(prefix=(2,), suffix=(3,), mask=4, special=torch.arange(5), ordinary=torch.arange(5, 30))


class TinyLanguageModel(nn.Module):
    """Small model that sees each token and its neighbors; no two tokens have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.out(self.mix(self.embedding(input_ids).mT).mT)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def make_model() -> TinyLanguageModel:
    torch.manual_seed(0)
    return TinyLanguageModel()


def make_batches(count: int = 24, **options) -> TextBatches:
    tokens = torch.randint(5, 30, (count, 12), generator=torch.Generator().manual_seed(0))
    options = {"batch_size": 4, "masking": Masking(0.3), "shuffle": True} | options
    return TextBatches(tokens, VOCABULARY, **options)


def train(batches: TextBatches, folder: str, **options) -> tuple[TinyLanguageModel, list[dict[str, float]]]:
    """Train with plain gradient descent; return the model and the history."""
    args = RecipeArguments(
        output_dir=folder, optim="sgd", momentum=0.0, learning_rate=0.5, disable_tqdm=True,
        **{"num_train_epochs": 1, **options},
    )  # fmt: skip
    loop = TrainingLoop(
        make_model(), batches, args, Accelerator(cpu=True), evaluate=lambda model: {"loss": 0.0}, metric="loss",
        measure=measure_tokens, derive=perplexity,
    )  # fmt: skip
    state = loop.run()
    return loop.accelerator.unwrap_model(loop.model), state.history


def after_one_step(batches: list[dict[str, Tensor]]) -> TinyLanguageModel:
    """Model after one step on the mean loss over the target tokens of all batches."""
    model = make_model()
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")}
    model(**whole).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    return model


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulated", [1, 2, 6])
def test_step_uses_the_mean_over_all_target_tokens_of_its_batches(tmp_path, accumulated):
    model, _ = train(make_batches(), str(tmp_path), gradient_accumulation_steps=accumulated, stop_after_steps=1)
    assert_same_weights(model, after_one_step(list(make_batches().epoch())[:accumulated]))


def test_training_loss_is_the_mean_over_all_target_tokens(tmp_path):
    _, (entry,) = train(make_batches(), str(tmp_path), gradient_accumulation_steps=6)
    whole = {key: torch.cat([batch[key] for batch in make_batches().epoch()]) for key in ("input_ids", "labels")}
    output = make_model()(**whole)
    target = whole["labels"] != -100
    right = (output.logits.argmax(-1) == whole["labels"])[target].double().mean().item()
    found = [entry[f"train_{name}"] for name in ("loss", "accuracy", "perplexity")]
    assert found == pytest.approx([output.loss.item(), right, math.exp(output.loss.item())], rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 5, 24])
def test_evaluation_matches_a_single_full_batch(batch_size):
    batches = make_batches(shuffle=False, batch_size=batch_size)
    assert batch_size != 1 or len({int(TextBatches.num_targets(batch)) for batch in batches.epoch()}) > 2
    found = evaluate(make_model(), batches, Accelerator(cpu=True), measure_tokens)
    (whole,) = make_batches(shuffle=False, batch_size=24).epoch()
    output = make_model()(**whole)
    right = [int(row.argmax()) == label for row, label in zip(
        output.logits.flatten(0, 1), whole["labels"].flatten().tolist(), strict=True
    ) if label != -100]  # fmt: skip
    loss = output.loss.item()
    expected = {"loss": loss, "accuracy": sum(right) / len(right)}
    assert found == pytest.approx(expected, rel=1e-6)
    # ModernBERT returns the logits of all tokens or, with `sparse_prediction`, those of the targets alone.
    targets = whole["labels"] != -100
    for logits in (output.logits, output.logits.flatten(0, 1), output.logits[targets]):
        assert measure_tokens(SimpleNamespace(logits=logits), whole)["accuracy"] == pytest.approx(expected["accuracy"])
    assert perplexity({"loss": 1e4}) == {"perplexity": math.inf}


@pytest.mark.parametrize("prefix", ["ModernBert", "SphereModernBert"])
def test_sparse_prediction_has_the_measures_of_dense_prediction(prefix):
    library: Any = hf_sphere if prefix.startswith("Sphere") else transformers
    measured = []
    for sparse in (False, True):
        torch.manual_seed(0)
        config = getattr(library, f"{prefix}Config")(
            vocab_size=30, hidden_size=16, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
            pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, sparse_prediction=sparse,
        )  # fmt: skip
        model = getattr(library, f"{prefix}ForMaskedLM")(config)
        measured.append(evaluate(model, make_batches(shuffle=False), Accelerator(cpu=True), measure_tokens))
    assert measured[1] == pytest.approx(measured[0], rel=1e-6)
