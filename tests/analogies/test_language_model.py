import functools
import json
import shutil

import pytest
import tokenizers
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2DoubleHeadsModel,
    ResNetModel,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTModel,
)

from hf_sphere.analogies.language_model import LanguageModel

ALLOWED = r"allowed are masked language models \(\.\.\.ForMaskedLM\)"


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
    with loaded.evaluating(), torch.no_grad():
        torch.testing.assert_close(loaded.forward(ids, base=True)[0], model.base_model(ids)[0])


@pytest.mark.parametrize(
    ("architecture", "head", "kind", "changes"),
    [
        ("Bert", "ForMaskedLM", "masked", {}),
        ("GPT2", "ForCausalLM", "causal", {}),
        ("Bert", "LMHeadModel", "causal", {"is_decoder": True}),
        ("Bert", "", "embedding", {}),
    ],
)
def test_an_unspecified_class_is_inferred_from_the_checkpoint(build, save, architecture, head, kind, changes):
    language_model = LanguageModel.load(save(build(architecture, head, **changes), architectures="-"))
    assert language_model.kind == kind


def test_the_encoder_of_a_sequence_to_sequence_model_is_an_embedding_model(save):
    from transformers import T5Config

    config = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    language_model = LanguageModel.load(save(T5EncoderModel(config)))
    assert (language_model.kind, type(language_model.model).__name__) == ("embedding", "T5EncoderModel")


def _other_models(build):
    from transformers import ResNetConfig, T5Config, ViTConfig

    bert, gpt = build("Bert").config, build("GPT2").config
    sequences = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    images = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32)
    convolutions = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    return {
        "BertForSequenceClassification": BertForSequenceClassification(bert),
        "T5ForConditionalGeneration": T5ForConditionalGeneration(sequences),
        "GPT2DoubleHeadsModel": GPT2DoubleHeadsModel(gpt),
        "ViTModel": ViTModel(images),
        "ResNetModel": ResNetModel(convolutions),
    }


@pytest.mark.parametrize(
    "name",
    ["BertForSequenceClassification", "T5ForConditionalGeneration", "GPT2DoubleHeadsModel", "ViTModel", "ResNetModel"],
)
def test_models_of_other_kinds_are_rejected(build, save, tokenizer, name):
    model = _other_models(build)[name]
    with pytest.raises(ValueError, match=f"{name} is a {name}; {ALLOWED}"):
        LanguageModel.load(model, tokenizer)
    with pytest.raises(ValueError, match=f"is a {name}; {ALLOWED}"):
        LanguageModel.load(save(model))


def test_a_model_without_token_inputs_is_rejected(tokenizer):
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = Wav2Vec2Config(conv_dim=[8], conv_stride=[2], conv_kernel=[2], num_conv_pos_embedding_groups=4, **sizes)
    with pytest.raises(ValueError, match=f"is a Wav2Vec2Model, whose inputs are not tokens; {ALLOWED}"):
        LanguageModel.load(Wav2Vec2Model(config), tokenizer)


@pytest.mark.parametrize(
    ("architecture", "head", "changes"),
    [("Bert", "", {"architectures": ["BertForMaskedLM"]}), ("Electra", "ForPreTraining", {})],  # of replaced tokens
)
def test_a_checkpoint_without_a_head_for_masked_tokens_is_rejected(build, save, architecture, head, changes):
    message = rf"saved without .* so the head of its {architecture}ForMaskedLM would be random"
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(save(build(architecture, head), **changes))


def test_a_folder_without_a_tokenizer_is_rejected(build, tmp_path):
    build("Bert", "ForMaskedLM").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has no vocabulary.*Pass one: LanguageModel.load\(model"):
        LanguageModel.load(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no tokenizer that transformers can load"):
        LanguageModel.load(tmp_path / "model", tmp_path / "empty")


def test_bad_input_is_refused(build, tokenizer):
    for model in (None, 3, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="model must be a name, a folder or a model of transformers; got a "):
            LanguageModel.load(model)
    with pytest.raises(ValueError, match=f"ElectraForPreTraining, which does not predict tokens.*; {ALLOWED}"):
        LanguageModel.load(build("Electra", "ForPreTraining"), tokenizer)
    for scale in (0.5, 0.02):
        with pytest.raises(ValueError, match=r"depends on the tokens after it.* Load it with config.is_decoder=True"):
            LanguageModel.load(build("Bert", "LMHeadModel", initializer_range=scale), tokenizer)
    with pytest.raises(ValueError, match=r"BertForMaskedLM was not loaded from a folder .* Pass one"):
        LanguageModel.load(build("Bert", "ForMaskedLM"))


def test_a_loaded_model_finds_its_tokenizer(golden_folder, tokenizer):
    model = BertForMaskedLM.from_pretrained(golden_folder / "tiny-bert")
    language_model = LanguageModel.load(model)
    assert language_model.model is model
    assert language_model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert language_model.name == str(golden_folder / "tiny-bert")


def test_a_masked_model_requires_a_mask_token(build, tokenizer):
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match=r"tokenizer TokenizersBackend has no mask token. Set tokenizer.mask_token"):
        LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer)
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
def test_the_maximum_length_follows_from_the_model(build, tokenizer, architecture, options, limit):
    model = build(architecture, "ForMaskedLM", max_position_embeddings=40, **options)
    assert LanguageModel.load(model, tokenizer).max_length == limit
    ids = torch.full((1, limit), 7)
    assert model(input_ids=ids).logits.shape[1] == limit
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 7))


def test_the_maximum_length_respects_the_tokenizer_and_the_repr_names_the_model(build, tokenizer):
    tokenizer.model_max_length = 20
    assert LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer).max_length == 20
    tokenizer.model_max_length = int(1e30)
    language_model = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer)
    assert language_model.max_length == 64
    assert repr(language_model) == "LanguageModel('BertForMaskedLM', kind='masked', device='cpu', dtype='float32')"


def test_copies_of_a_model_have_the_same_fingerprint(golden_folder, tiny_bert, tmp_path):
    shutil.copytree(golden_folder / "tiny-bert", tmp_path / "copy")
    copy = LanguageModel.load(tmp_path / "copy")
    assert copy.fingerprint == tiny_bert.fingerprint
    assert len(copy.fingerprint) == 64
    copy.tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)  # changes the state of the tokenizer
    assert LanguageModel.load(copy.model, copy.tokenizer).fingerprint == tiny_bert.fingerprint
    copy.model.save_pretrained(tmp_path / "again")
    assert LanguageModel.load(tmp_path / "again", copy.tokenizer).fingerprint == tiny_bert.fingerprint


def test_the_dtype_and_the_configuration_change_the_fingerprint(golden_folder, tokenizer):
    seen = set()
    for dtype, changes in ((None, {}), (torch.bfloat16, {}), (None, {"layer_norm_eps": 1e-6})):
        model = BertForMaskedLM.from_pretrained(golden_folder / "tiny-bert", **changes)
        seen.add(LanguageModel.load(model, tokenizer, dtype=dtype).fingerprint)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_training_changes_the_fingerprint(build, tokenizer, kind):
    language_model = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer)
    before = language_model.fingerprint
    optimizer = kind(language_model.model.parameters(), lr=0.1)
    language_model.model(input_ids=torch.tensor([[2, 4, 3]]), labels=torch.tensor([[-100, 7, -100]])).loss.backward()
    optimizer.step()
    assert language_model.fingerprint != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_changes_outside_autograd_change_the_fingerprint(build, tokenizer, dtype):
    language_model = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer, dtype=dtype)
    seen = {language_model.fingerprint}
    weight = language_model.model.bert.encoder.layer[0].output.dense.weight
    weight.data.mul_(2)
    seen.add(language_model.fingerprint)
    weight.data[3, 5] += 1
    seen.add(language_model.fingerprint)
    language_model.model.half()
    seen.add(language_model.fingerprint)
    assert len(seen) == 4


def test_replacing_the_tokenizer_changes_the_fingerprint(golden_folder, build, tokenizer):
    language_model = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer)
    seen = {language_model.fingerprint}
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("a", "e")
    seen.add(language_model.fingerprint)
    tokenizer.mask_token = "[UNK]"
    seen.add(language_model.fingerprint)
    language_model.tokenizer = AutoTokenizer.from_pretrained(golden_folder / "tiny-bert")
    language_model.tokenizer.add_tokens(["ostrich"])
    seen.add(language_model.fingerprint)
    assert len(seen) == 4


def test_enabling_or_disabling_adapters_changes_the_fingerprint(build, tokenizer):
    peft = pytest.importorskip("peft")
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    language_model = LanguageModel.load(build("Bert", "ForMaskedLM"), tokenizer)
    torch.manual_seed(0)
    # PEFT's own functions: `add_adapter` of a new transformers refuses all but the newest PEFT
    peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["query"], init_lora_weights=False), language_model.model
    )
    layers = [layer for layer in language_model.model.modules() if isinstance(layer, tuners.BaseTunerLayer)]
    on = language_model.fingerprint
    for enabled in (False, True):
        for layer in layers:
            layer.enable_adapters(enabled)
        assert (language_model.fingerprint == on) == enabled


def test_the_fingerprint_includes_names_and_shapes(build, tokenizer):
    one, other = (build("GPT2", "ForCausalLM", n_inner=size) for size in (8, 16))
    assert LanguageModel(one, tokenizer).fingerprint != LanguageModel(other, tokenizer).fingerprint
    bare = AutoModel.from_config(one.config)
    bare.load_state_dict(one.transformer.state_dict())
    assert LanguageModel(bare, tokenizer).fingerprint != LanguageModel(one, tokenizer).fingerprint


def test_evaluation_preserves_the_mode_of_every_module(build, tokenizer):
    model = build("Bert", "ForMaskedLM").train()
    model.cls.eval()
    modes = [module.training for module in model.modules()]
    language_model = LanguageModel(model, tokenizer)
    with language_model.evaluating():
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
    assert [module.training for module in model.modules()] == modes
