import json

import pytest
import torch
import transformers
from transformers import T5Config, T5EncoderModel

from hf_sphere.analogies.language_model import LanguageModel, perplexities
from hf_sphere.analogies.prompts import Sentence
from hf_sphere.utils.modules import longest_input

ALLOWED = r"allowed are masked \(\.\.\.ForMaskedLM\)"


@pytest.fixture
def save(tmp_path, tokenizer, build):
    """Save a tiny model with its tokenizer and return the folder."""

    def save(model, **changes):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
        return folder

    return save


@pytest.mark.parametrize(
    ("architecture", "head", "kind"),
    [
        ("Bert", "ForMaskedLM", "masked"),
        ("SphereBert", "ForMaskedLM", "masked"),
        ("Bert", "ForPreTraining", "masked"),
        ("GPT2", "ForCausalLM", "causal"),
        ("Llama", "ForCausalLM", "causal"),
        ("Roberta", "", "embedding"),
        ("GPT2", "", "embedding"),
    ],
)
def test_the_kind_follows_from_the_saved_class(build, save, architecture, head, kind):
    model = build(architecture, head)
    folder = save(model)
    for language_model in (LanguageModel.load(folder), LanguageModel.load(model, str(folder))):
        assert language_model.kind == kind
        assert language_model.tokenizer("cat")["input_ids"] == [2, 266, 3]
    loaded = LanguageModel.load(str(folder), device="cpu")
    assert loaded.name == str(folder)
    ids = torch.tensor([[2, 7, 3]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.forward(ids, base=True)[0], model.base_model(ids)[0])


T5 = {"vocab_size": 400, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def test_the_encoder_of_a_sequence_to_sequence_model_is_an_embedding_model(save):
    language_model = LanguageModel.load(save(T5EncoderModel(T5Config(**T5))))
    assert (language_model.kind, type(language_model.model).__name__) == ("embedding", "T5EncoderModel")


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
OTHERS = {
    "BertForSequenceClassification": {"vocab_size": 400, **SMALL},
    "T5ForConditionalGeneration": T5,
    "GPT2DoubleHeadsModel": {"vocab_size": 400, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "ViTModel": {"image_size": 32, **SMALL},
    "ResNetModel": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_kinds_are_rejected(save, tokenizer, name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**OTHERS[name]))
    with pytest.raises(ValueError, match=f"{name} is a {name}; {ALLOWED}"):
        LanguageModel.load(model, tokenizer)
    with pytest.raises(ValueError, match=f"is a {name}; {ALLOWED}"):
        LanguageModel.load(save(model))


@pytest.mark.parametrize(
    ("architecture", "head", "changes"),
    [("Bert", "", {"architectures": ["BertForMaskedLM"]}), ("Electra", "ForPreTraining", {})],  # of replaced tokens
)
def test_a_checkpoint_without_a_head_for_masked_tokens_is_rejected(build, save, architecture, head, changes):
    message = rf"saved without .* so the head of its {architecture}ForMaskedLM would be random"
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(save(build(architecture, head), **changes))


def test_a_causal_model_with_bidirectional_attention_is_rejected(build, tokenizer):
    with pytest.raises(ValueError, match=r"depends on the tokens after it.* Load it with config.is_decoder=True"):
        LanguageModel.load(build("Bert", "LMHeadModel"), tokenizer)
    assert LanguageModel.load(build("Bert", "LMHeadModel", is_decoder=True), tokenizer).kind == "causal"


def test_a_masked_model_requires_a_mask_token(build, tokenizer):
    tokenizer.mask_token = None
    with pytest.raises(TypeError):
        perplexities(LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer), [Sentence("a cat")])
    assert LanguageModel.load(build("GPT2", "ForCausalLM"), tokenizer).kind == "causal"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_weights_can_be_set(golden_folder, build, tokenizer, dtype):
    loaded = LanguageModel.load(golden_folder / "tiny-bert", dtype=dtype, device="cpu")
    taken = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer, dtype=dtype)
    assert loaded.model.dtype == taken.model.dtype == (dtype or torch.float32)
    assert loaded.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("architecture", "options", "limit"),
    [
        ("Bert", {}, 40),
        ("Roberta", {"pad_token_id": 1}, 38),
        ("MPNet", {"pad_token_id": 1}, 38),
        ("Electra", {}, 40),
        ("DistilBert", {}, 40),
    ],
)
def test_the_longest_input_is_that_of_the_position_embeddings_or_of_the_tokenizer(
    build, tokenizer, architecture, options, limit
):
    model = build(architecture, "ForMaskedLM", max_position_embeddings=40, **options)
    for of_tokenizer in (int(1e30), 20):
        tokenizer.model_max_length = of_tokenizer
        assert longest_input(model, tokenizer) == min(limit, of_tokenizer)
    assert model(input_ids=torch.full((1, limit), 7)).logits.shape[1] == limit
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 7))
