from unittest import mock

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer, GPT2Config, GPT2Model

from hf_sphere.prototypes import embed_class_names

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "dog", "aquarium", "fish", "a", "photo", "of", "big", "{", "}"]
NAMES = ["cat", "big_dog", "aquarium fish", "dog"]


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=len(WORDS), **sizes))


@pytest.fixture
def tokenizer():
    return BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})


def embed_alone(encoder, tokenizer, text):
    """Compute the definition: the mean of the last hidden states of one text without padding."""
    encoder.eval()
    with torch.no_grad():
        return encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)


def test_class_vector_is_the_mean_of_the_last_hidden_states(encoder, tokenizer):
    vectors = embed_class_names([*NAMES, " big dog "], encoder, tokenizer=tokenizer)
    assert torch.equal(vectors[4], vectors[1])
    expected = [embed_alone(encoder, tokenizer, name.replace("_", " ")) for name in NAMES]
    assert (vectors.shape, vectors.dtype, vectors.device.type) == ((5, 16), torch.float32, "cpu")
    torch.testing.assert_close(vectors[:4], torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("template", ["a photo of a {}", "{} {}", "a {{}}"])
def test_template_surrounds_the_name(encoder, tokenizer, template):
    vectors = embed_class_names(["dog"], encoder, tokenizer=tokenizer, template=template)
    expected = embed_alone(encoder, tokenizer, template.replace("{}", "dog"))
    torch.testing.assert_close(vectors[0], expected, rtol=1e-5, atol=1e-6)


def test_model_folder_is_loaded_with_its_tokenizer(encoder, tokenizer, tmp_path):
    encoder.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    expected = embed_class_names(NAMES, encoder, tokenizer=tokenizer)
    for folder in (tmp_path / "model", str(tmp_path / "model")):
        torch.testing.assert_close(embed_class_names(NAMES, folder), expected)


@pytest.mark.parametrize("training", [True, False])
def test_model_mode_is_preserved_also_after_an_error(encoder, tokenizer, training):
    encoder.train(training)
    embed_class_names(NAMES, encoder, tokenizer=tokenizer)
    assert all(module.training == training for module in encoder.modules())
    broken = mock.Mock(side_effect=RuntimeError("out of reach"), pad_token=tokenizer.pad_token)
    with pytest.raises(RuntimeError, match="out of reach"):
        embed_class_names(NAMES, encoder, tokenizer=broken)
    assert all(module.training == training for module in encoder.modules())


def test_model_needs_no_padding_token(tokenizer):
    torch.manual_seed(0)
    decoder = GPT2Model(GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()
    tokenizer.eos_token, tokenizer.pad_token = "[SEP]", None
    expected = [embed_alone(decoder, tokenizer, name.replace("_", " ")) for name in NAMES]
    vectors = embed_class_names(NAMES, decoder, tokenizer=tokenizer)
    torch.testing.assert_close(vectors, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused(encoder, tokenizer):
    for names in ("cat", [], ["cat", 3]):
        with pytest.raises(ValueError, match="class_names must be a list of texts"):
            embed_class_names(names, encoder, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="class names must not be empty"):
        embed_class_names(["cat", " "], encoder, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"must have '\{\}' where the class name goes; got 'a photo'"):
        embed_class_names(NAMES, encoder, tokenizer=tokenizer, template="a photo")
