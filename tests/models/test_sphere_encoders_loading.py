"""Saving and loading spherized text encoders, and starting from plain checkpoints."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_encoders import BERT, every_encoder
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    RobertaConfig,
    RobertaTokenizer,
    pipeline,
)

AUTO = {
    "Model": AutoModel,
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}

every_kind = pytest.mark.parametrize("kind", AUTO)


def write_vocabulary(folder: Path, name: str) -> None:
    """Write the vocabulary of a tokenizer without its class."""
    if name == "Bert":
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\nsat")
    else:
        words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "t", "h", "e", "c", "a", "th", "the", "ca", "Ġ"]
        (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
        (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nc a\n")


def drop(folder: Path, part: str) -> set[str]:
    """Remove the tensors whose name contains `part` from a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    dropped = {name for name in tensors if part in name}
    save_file({name: value for name, value in tensors.items() if name not in dropped}, file, {"format": "pt"})
    return dropped


# Spherized checkpoints


def test_config_round_trips(family, tmp_path):
    config = family.config(spherized_layers=[0, -1], spherization_scaling=5, spherized_classifier=False, num_labels=7)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("learned", [True, False])
def test_weight_is_loaded_if_scaling_and_radius_are_missing(family, learned, tmp_path):
    options = {"learn_spherization_scaling": learned, "spherization_scaling": 4.0, "spherization_radius": 3.0}
    model = family.model("ForSequenceClassification", spherized_classifier=True, **options)
    model.save_pretrained(tmp_path)
    dropped = drop(tmp_path, "spherization.")
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == dropped
    assert len(dropped) == 4  # of the layer and of the classifier
    before = model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    assert loaded.classifier.spherization.scaling.item() == 4.0
    with torch.no_grad():
        model.base_model.encoder.layer[2].output.spherical.spherization.scaling.fill_(1.75)
    model.save_pretrained(tmp_path)
    assert len(drop(tmp_path, "spherization.radius")) == 2
    spherization = type(model).from_pretrained(tmp_path).base_model.encoder.layer[2].output.spherical.spherization
    assert (spherization.scaling.item(), spherization.radius.item()) == (1.75, 3.0)


@every_encoder
def test_spherized_layers_differing_from_the_checkpoint_are_rejected(encoder, tmp_path):
    cases = [([0], [1]), ([0, 1], [1]), ([1], [0, 1]), ([0], []), ([0], None)]
    for saved, asked in cases if encoder == BERT else cases[:1]:
        for saved_as in {"Model", encoder.tasks[-1]}:
            encoder.model(saved_as, spherized_layers=saved).save_pretrained(tmp_path)
            shown = [2] if asked is None else asked
            message = re.escape(f"the layers {saved} are spherized, but the configuration has spherized_layers {shown}")
            with pytest.raises(ValueError, match=message):
                encoder.model_class(encoder.tasks[-1]).from_pretrained(
                    tmp_path, config=encoder.config(spherized_layers=asked)
                )
    encoder.model(spherized_layers=[-1, 0]).save_pretrained(tmp_path)
    _, info = type(encoder.model()).from_pretrained(tmp_path, spherized_layers=[0, 2], output_loading_info=True)
    assert not any(info.values())


def test_tokenizer_class_is_inferred_from_the_config(family, tmp_path):
    family.config().save_pretrained(tmp_path)
    write_vocabulary(tmp_path, family.name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is (BertTokenizer if family == BERT else RobertaTokenizer)
    assert len(tokenizer("the").input_ids) == 3


def test_fill_mask_pipeline_runs_on_a_saved_model(family, tmp_path):
    model = family.model()
    model.save_pretrained(tmp_path)
    write_vocabulary(tmp_path, family.name)
    fill = pipeline("fill-mask", str(tmp_path))
    assert type(fill.model) is type(model)
    answers = fill(f"the {fill.tokenizer.mask_token}", top_k=50)
    ids = torch.tensor(fill.tokenizer(f"the {fill.tokenizer.mask_token}").input_ids)
    probabilities = model(input_ids=ids[None]).logits[0, ids == fill.tokenizer.mask_token_id].softmax(-1)[0]
    found = {answer["token"]: answer["score"] for answer in answers}
    assert found == pytest.approx(dict(enumerate(probabilities.tolist())), abs=1e-6)


# Plain checkpoints


def test_new_weights_use_the_initialization_of_the_encoder(family, tmp_path):
    family.plain(initializer_range=0.5).save_pretrained(tmp_path)
    torch.manual_seed(5)
    spherical = family.model_class("ForMaskedLM").from_pretrained(tmp_path).base_model.encoder.layer[2].output.spherical
    assert spherical.linear.weight.std().item() == pytest.approx(0.5, rel=0.15)
    assert (spherical.spherization.scaling.item(), spherical.spherization.radius.item()) == (1.0, 1.0)


@every_kind
def test_plain_checkpoint_loads_with_the_new_model_type_and_no_warning(family, kind, tmp_path, transformers_log):
    family.plain(kind).save_pretrained(tmp_path / "plain")
    options = {"add_pooling_layer": False, "output_loading_info": True}
    _, info = family.model_class("Model").from_pretrained(tmp_path / "plain", **options)  # with any head or none
    assert all("layer.2.output.spherical." in name for name in info["missing_keys"])
    model = family.model_class(kind).from_pretrained(tmp_path / "plain")
    assert type(model.config) is type(family.config())
    model.save_pretrained(tmp_path / "own")
    saved = json.loads((tmp_path / "own" / "config.json").read_text())
    assert saved["model_type"] == f"sphere_{family.model_type}"
    assert saved["architectures"] == [type(model).__name__]
    assert type(AUTO[kind].from_pretrained(tmp_path / "own")) is type(model)
    assert "of type" not in transformers_log.text
    # Control: a configuration of another family does warn.
    (BertConfig if family.name == "Roberta" else RobertaConfig).from_pretrained(tmp_path / "plain")
    assert "of type" in transformers_log.text


@pytest.mark.parametrize("source", ["plain", "own"])
def test_tied_weights_are_tied_after_loading_and_resizing(family, source, tmp_path):
    (family.plain() if source == "plain" else family.model()).save_pretrained(tmp_path)
    model = family.model_class("ForMaskedLM").from_pretrained(tmp_path)
    model.resize_token_embeddings(57, mean_resizing=False)
    assert model(**family.batch()).logits.shape == (3, 6, 57)
    assert model.config.vocab_size == 57
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_half_precision_checkpoint_loads_in_half_precision(family, tmp_path):
    family.plain().bfloat16().save_pretrained(tmp_path)
    model = family.model_class("ForMaskedLM").from_pretrained(tmp_path, dtype="auto")
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert model(**family.batch()).logits.isfinite().all()


def test_configuration_of_the_plain_encoder_is_rejected(family, tmp_path):
    family.plain().save_pretrained(tmp_path)
    plain = AutoConfig.from_pretrained(tmp_path)
    message = f"config must be a Sphere{family.name}Config; got a {family.name}Config. Omit it, or read it with"
    with pytest.raises(ValueError, match=message):
        family.model_class("ForMaskedLM").from_pretrained(tmp_path, config=plain)


@pytest.mark.parametrize("as_path", [False, True], ids=["object", "path"])
def test_spherized_configuration_is_accepted(family, as_path, tmp_path):
    family.plain().save_pretrained(tmp_path)
    config = type(family.config()).from_pretrained(tmp_path, spherized_layers=[0])
    config.save_pretrained(tmp_path / "config")
    given = tmp_path / "config" if as_path else config
    model = family.model_class("ForMaskedLM").from_pretrained(tmp_path, config=given)
    assert model.config.spherized_layer_indices == (0,)
