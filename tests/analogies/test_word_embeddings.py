import dataclasses

import pytest
import torch

from hf_sphere.analogies.language_model import LanguageModel, embed_words, embed_words_in_context, encode
from hf_sphere.analogies.prompts import PERMUTATIONS, Sentence, fill

WORDS = ["cat", "choreography", "dance", "cat", "nurse", "the story"]


def states_of(language_model, ids):
    with torch.no_grad():
        return language_model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def embed_alone(language_model, text):
    """Reference implementation for WordPiece: all tokens except [CLS] and [SEP]."""
    return states_of(language_model, language_model.tokenizer(text)["input_ids"])[1:-1].mean(0)


@pytest.fixture(params=["Bert", "Bert:ForMaskedLM", "DebertaV2:ForMaskedLM", "Llama:ForCausalLM", "GPT2"])
def any_kind(request, build, tokenizer):
    return LanguageModel(build(*request.param.split(":")), tokenizer)


@pytest.fixture
def roberta(build, byte_level_tokenizer):
    options = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    return LanguageModel(build("Roberta", "ForMaskedLM", **options), byte_level_tokenizer)


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_word_is_the_mean_of_its_tokens(any_kind, batch_size):
    found = embed_words(any_kind, WORDS, batch_size=batch_size)
    assert (found.shape, found.dtype, found.device.type) == ((6, 16), torch.float32, "cpu")
    expected = torch.stack([embed_alone(any_kind, word) for word in WORDS])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[3])


@pytest.mark.parametrize(("word", "start", "first"), [("language", "Ġlanguage", 1), ("zebra", "Ġ", 2)])
def test_a_single_word_is_tokenized_as_in_a_text_without_a_separate_space(roberta, word, start, first):
    ids = roberta.tokenizer(f" {word}")["input_ids"]
    assert roberta.tokenizer.convert_ids_to_tokens(ids)[:2] == ["<s>", start]
    expected = states_of(roberta, ids)[first:-1].mean(0)
    torch.testing.assert_close(embed_words(roberta, [word])[0], expected, rtol=1e-5, atol=1e-5)


def test_words_of_a_sentence_are_found_in_any_order(any_kind):
    words = ["choreography", "dance", "cat", "nurse"]
    pieces = [any_kind.tokenizer.convert_tokens_to_ids(any_kind.tokenizer.tokenize(word)) for word in words]
    assert len(pieces[0]) > 1
    sentences = [fill("she-to-as", words, permutation) for permutation in PERMUTATIONS]
    found = embed_words_in_context(any_kind, sentences)
    assert (found.shape, found.dtype) == ((24, 4, 16), torch.float32)
    for sentence, of_words in zip(sentences, found, strict=True):
        ids = any_kind.tokenizer(sentence.text)["input_ids"]
        states = states_of(any_kind, ids)
        for piece, vector in zip(pieces, of_words, strict=True):
            starts = [start for start in range(len(ids)) if ids[start : start + len(piece)] == piece]
            assert len(starts) == 1
            expected = states[starts[0] : starts[0] + len(piece)].mean(0)
            torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)


def test_words_are_found_among_byte_level_tokens(roberta):
    sentence = fill("is-to-what", ["ostrich", "bird", "lion", "cat"])
    ids = roberta.tokenizer(sentence.text)["input_ids"]
    tokens = roberta.tokenizer.convert_ids_to_tokens(ids)
    states = states_of(roberta, ids)
    found = embed_words_in_context(roberta, [sentence])[0]
    for word, vector in zip(["bird", "cat"], found[[1, 3]], strict=True):
        expected = states[[tokens.index(f"Ġ{word}")]].mean(0)
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-5)
    end = next(end for end in range(2, len(tokens)) if "".join(tokens[1:end]) == "ostrich")
    torch.testing.assert_close(found[0], states[1:end].mean(0), rtol=1e-5, atol=1e-5)


def test_a_hidden_word_has_the_embedding_of_its_masks(tiny_bert):
    sentence = dataclasses.replace(fill("is-to-as", ["cat", "tea", "nurse", "story"]), hidden=(2,))
    ids = tiny_bert.tokenizer(sentence.text.replace("nurse", "[MASK]"))["input_ids"]
    expected = states_of(tiny_bert, ids)[ids.index(tiny_bert.tokenizer.mask_token_id)]
    torch.testing.assert_close(embed_words_in_context(tiny_bert, [sentence])[0, 2], expected, rtol=1e-5, atol=1e-5)


def test_embeddings_are_new_tensors_and_the_model_mode_is_preserved(build, tokenizer):
    language_model = LanguageModel(build("Bert").train(), tokenizer)
    first, second = embed_words(language_model, WORDS), embed_words(language_model, WORDS)
    assert torch.equal(first, second)
    assert language_model.model.training
    assert not first.is_inference()
    first -= first.mean(0)


def test_a_word_without_a_token_is_refused(tiny_bert):
    with pytest.raises(ValueError, match="has no token of its own"):
        encode(tiny_bert, [Sentence("cat is \u200b to nurse", ((0, 3), (7, 8)))], words=True)
