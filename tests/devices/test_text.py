import copy

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from hf_sphere import SphereBertConfig, SphereBertForMaskedLM, fit_spherization
from hf_sphere.analogies import LanguageModel, Question, score_questions
from hf_sphere.data.text import Masking, TextBatches, Vocabulary

SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def tiny(root):
    """A trained tiny BERT and its tokenizer."""
    folder = root / "tests" / "golden" / "analogy" / "tiny-bert"
    return BertForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_spherized_encoder_step_under_autocast_is_finite(dtype, attention, device):
    config = SphereBertConfig(**SIZES, attn_implementation=attention)
    model = SphereBertForMaskedLM(config).to(device)
    tokens = torch.randint(5, 400, (4, 20), device=device)
    with torch.autocast(device, dtype=dtype):
        output = model(tokens, labels=tokens)
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_calibration_matches_the_cpu(device):
    config = SphereBertConfig(**SIZES)
    model, reference = SphereBertForMaskedLM(config), BertModel(BertConfig(**SIZES))
    model.bert.load_state_dict(reference.state_dict(), strict=False)
    batches = [{"input_ids": torch.randint(5, 400, (10, 40))} for _ in range(5)]
    weights = []
    for place in ("cpu", device):
        fitted = copy.deepcopy(model).to(place)
        (fit,) = fit_spherization(fitted, reference.to(place), batches)
        weights.append(fitted.bert.encoder.layer[-1].output.spherical.linear.weight.cpu())
        assert fit.num_tokens == 2000
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-3)


def test_masked_batches_are_created_on_the_device_and_match_the_cpu(tiny, device, no_synchronization):
    tokens, options = torch.randint(10, 400, (20, 30)), {"batch_size": 6, "masking": Masking()}
    on_cpu, batches = (
        TextBatches(tokens, Vocabulary.of(tiny[1]), device=d, **options).epoch() for d in ("cpu", device)
    )
    on_gpu = [next(batches)]
    with no_synchronization():
        on_gpu += batches
    assert all(batch["input_ids"].device.type == device for batch in on_gpu)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"].cpu())
        assert torch.equal(a["labels"], b["labels"].cpu())


@pytest.mark.parametrize("scoring", ["marginal_bias", "embedding_similarity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_analogy_scores_match_the_cpu(tiny, scoring, dtype, device):
    model, tokenizer = tiny
    questions = [Question(("cat", "kitten"), (("dog", "puppy"), ("cow", "milk"), ("hen", "egg")), 0)]
    costs = [
        score_questions(questions, LanguageModel.load(copy.deepcopy(model), tokenizer, device=d, dtype=t), scoring)
        for d, t in (("cpu", torch.float32), (device, dtype))
    ]
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(costs[1].costs.cpu(), costs[0].costs, rtol=tolerance, atol=tolerance)
