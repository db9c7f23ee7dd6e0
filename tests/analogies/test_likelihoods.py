import contextlib
import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from hf_sphere.analogies.language_model import LanguageModel, perplexities
from hf_sphere.analogies.prompts import Sentence, fill

WORDS = ["lion", "cat", "sheep", "wool", "word", "language", "dance", "choreography"]
SENTENCES = [
    fill("is-to-what", ["word", "language", "nurse", "music"]),  # these three share masked copies
    fill("is-to-what", ["word", "language", "mountain", "music"]),
    fill("is-to-what", ["word", "language", "nurse", "tea"]),
    fill("she-to-as", ["choreography", "dance", "plot", "story"], (1, 0, 3, 2)),
    fill("rel-same", ["word", "language", "note", "music"]),
]
CLS, SEP, MASK = 2, 3, 4


def plain_losses(language_model, ids, hidden=()):
    """Negative log-likelihoods of the tokens between the special ones, one mask per forward pass, in float64."""
    scored, losses = [position for position in range(1, len(ids) - 1) if position not in hidden], []
    mask = language_model.tokenizer.mask_token_id
    ids = [mask if position in hidden else token for position, token in enumerate(ids)]
    for position in scored:
        masked = torch.tensor([ids])
        masked[0, position] = mask
        with torch.no_grad():
            logits = language_model.model(input_ids=masked).logits[0, position].double()
        losses.append(-logits.log_softmax(-1)[ids[position]])
    return torch.stack(losses)


def plain_perplexity(language_model, text):
    return plain_losses(language_model, language_model.tokenizer(text)["input_ids"]).mean().exp()


@contextlib.contextmanager
def watched(module):
    """Record the inputs of a module, in call order."""
    inputs = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs.get("input_ids", *args[:1])), with_kwargs=True
    )
    yield inputs
    hook.remove()


def test_every_architecture_matches_the_reference_computation(masked):
    found = perplexities(masked, SENTENCES)
    expected = torch.stack([plain_perplexity(masked, sentence.text) for sentence in SENTENCES])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert not found.is_inference()


@pytest.mark.parametrize("architecture", ["Bert", "Albert"])
def test_the_second_head_of_a_pretraining_model_is_ignored(build, tokenizer, architecture):
    language_model = LanguageModel(build(architecture, "ForPreTraining"), tokenizer)
    masked = LanguageModel(build(architecture, "ForMaskedLM"), tokenizer)
    masked.model.load_state_dict(language_model.model.state_dict(), strict=False)
    assert torch.equal(perplexities(language_model, SENTENCES), perplexities(masked, SENTENCES))


def test_every_masked_copy_runs_once_in_a_batch_of_equal_lengths(tiny_bert):
    with watched(tiny_bert.model) as batches:
        perplexities(tiny_bert, SENTENCES * 2)
    rows = [tuple(row) for ids in batches for row in ids.tolist()]
    needed = set()
    for sentence in SENTENCES:
        ids = tiny_bert.tokenizer(sentence.text)["input_ids"]
        needed |= {(*ids[:position], MASK, *ids[position + 1 :]) for position in range(1, len(ids) - 1)}
    assert sorted(rows) == sorted(needed)
    assert len({ids.shape[1] for ids in batches}) > 1
    copies = sum(len(tiny_bert.tokenizer(sentence.text)["input_ids"]) - 2 for sentence in SENTENCES)
    assert len(needed) < copies  # some sentences share masked copies
    assert 0 not in {token for row in rows for token in row}  # no padding


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join), min_size=1, max_size=6),
    batch_size=st.sampled_from([None, 1, 2, 5]),
)
def test_a_score_does_not_depend_on_the_batch(tiny_bert, texts, batch_size):
    found = perplexities(tiny_bert, [Sentence(text) for text in texts], batch_size=batch_size)
    expected = torch.stack([plain_perplexity(tiny_bert, text) for text in texts])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("hidden", [(2,), (3,), (0, 3)])
def test_hidden_words_are_masked_and_not_scored(tiny_bert, hidden):
    sentence = dataclasses.replace(SENTENCES[3], hidden=hidden)
    encoded = tiny_bert.tokenizer(sentence.text, return_offsets_mapping=True)
    covered = [range(*sentence.spans[word]) for word in hidden]
    positions = [
        position
        for position, (start, end) in enumerate(encoded["offset_mapping"])
        if any(start in characters and start < end for characters in covered)
    ]
    assert len(positions) > len(hidden) - 1
    expected = plain_losses(tiny_bert, encoded["input_ids"], positions).mean().exp()
    torch.testing.assert_close(perplexities(tiny_bert, [sentence])[0], expected, rtol=1e-5, atol=0)


def test_mask_tokens_in_the_text_are_not_scored(tiny_bert):
    text = "cat is to [MASK] as story is to what"
    ids = tiny_bert.tokenizer(text)["input_ids"]
    expected = plain_losses(tiny_bert, ids, [ids.index(MASK)]).mean().exp()
    torch.testing.assert_close(perplexities(tiny_bert, [Sentence(text)])[0], expected, rtol=1e-5, atol=0)


def test_byte_level_tokens_are_scored(build, byte_level_tokenizer):
    options = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    language_model = LanguageModel(build("Roberta", "ForMaskedLM", **options), byte_level_tokenizer)
    text = "ostrich is to bird what lion is to cat"
    expected = plain_perplexity(language_model, text)
    torch.testing.assert_close(perplexities(language_model, [Sentence(text)])[0], expected, rtol=1e-5, atol=0)


def test_causal_perplexity_matches_the_loss(causal):
    found = perplexities(causal, SENTENCES)
    for sentence, value in zip(SENTENCES, found, strict=True):
        ids = torch.tensor([causal.tokenizer(sentence.text)["input_ids"]])[:, :-1]  # [SEP] is not scored
        loss = causal.model(input_ids=ids, labels=ids).loss.item()
        assert value.item() == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("start", [[2], []], ids=str)
def test_the_bos_token_is_prepended_if_the_tokenizer_adds_none_and_else_the_second_is_scored_first(
    build, byte_level_tokenizer, start
):
    # A byte-level tokenizer without special tokens, like that of GPT-2
    backend = type(byte_level_tokenizer.backend_tokenizer).from_str(byte_level_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    without_start = PreTrainedTokenizerFast(tokenizer_object=backend)
    options = {} if start else {"bos_token_id": None}
    language_model = LanguageModel(build("GPT2", "ForCausalLM", **options), without_start)
    ids = torch.tensor([[*start, *without_start("lion is to cat")["input_ids"]]])
    expected = math.exp(language_model.model(input_ids=ids, labels=ids).loss.item())
    for batch_size in (None, 1):
        found = perplexities(language_model, [Sentence("lion is to cat"), Sentence("!")], batch_size=batch_size)
        assert found[0].item() == pytest.approx(expected, rel=1e-5)
        assert found[1].isnan() == (not start)  # nothing comes before its only token


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float64, 1e-12)], ids=str)
def test_models_of_other_precision_are_close_to_the_computation_in_double(build, tokenizer, dtype, tolerance):
    options = {"initializer_range": 0.1}
    language_model = LanguageModel(build("Bert", "ForMaskedLM", **options).to(dtype), tokenizer)
    double = LanguageModel(build("Bert", "ForMaskedLM", **options).double(), tokenizer)
    expected = torch.stack([plain_perplexity(double, sentence.text) for sentence in SENTENCES])
    torch.testing.assert_close(perplexities(language_model, SENTENCES), expected, rtol=tolerance, atol=0)


def test_dropout_is_disabled_and_module_modes_are_preserved(build, tokenizer):
    language_model = LanguageModel(build("Bert", "ForMaskedLM"), tokenizer)
    expected = perplexities(language_model, SENTENCES)
    language_model.model.train()
    language_model.model.bert.embeddings.eval()
    modes = [module.training for module in language_model.model.modules()]
    assert torch.equal(perplexities(language_model, SENTENCES), expected)
    assert [module.training for module in language_model.model.modules()] == modes
    logits = language_model.model(input_ids=torch.tensor([[CLS, MASK, SEP]])).logits
    assert logits.shape == (1, 3, 400)
    assert logits.requires_grad
