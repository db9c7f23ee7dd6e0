"""Computation and training of the spherized text encoders."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from small_encoders import BERT, every_encoder
from torch import Tensor, nn


def spherize_plainly(values: Tensor, scaling: float, radius: float, delta: float) -> Tensor:
    """Spherization by definition, angle by angle."""
    lowest = min(math.asin(delta ** (1 / values.shape[-1])), 0.99 * math.pi / 2)
    points, product = [], torch.full_like(values[..., 0], radius)
    for value in values.unbind(-1):
        angle = (math.pi / 2 - lowest) / (1 + (-scaling * value).exp()) + lowest
        points.append(product * angle.cos())
        product = product * angle.sin()
    return torch.stack([*points, product], dim=-1)


def random_scalings(model: nn.Module) -> None:
    """Give every weight a distinct value, so that initial values cannot pass for learned ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


# Values


@pytest.mark.parametrize(("layers", "indices"), [(None, (2,)), ((-1, 0), (0, 2)), ([2, 1, 0], (0, 1, 2))])
def test_spherized_layer_matches_the_formula(family, layers, indices):
    options = {"spherization_scaling": 2.0, "spherization_radius": 3.0, "spherization_delta": 1e-4}
    model = family.model("Model", spherized_layers=layers, **options).double()
    spherized = [index for index, layer in enumerate(model.encoder.layer) if hasattr(layer.output, "spherical")]
    assert model.config.spherized_layer_indices == tuple(spherized) == indices
    random_scalings(model)
    for index in indices:
        layer = model.encoder.layer[index]
        seen = SimpleNamespace()
        layer.intermediate.register_forward_pre_hook(lambda _, given, seen=seen: setattr(seen, "x", given[0]))
        layer.register_forward_hook(lambda _, given, result, seen=seen: setattr(seen, "y", result))
        model(**family.batch())
        values = seen.x @ layer.intermediate.dense.weight.T + layer.intermediate.dense.bias
        scaling = layer.output.spherical.spherization.scaling.item()
        points = spherize_plainly(values, scaling, radius=3.0, delta=1e-4)
        norm = layer.output.LayerNorm
        mapped = points @ layer.output.spherical.linear.weight.T + seen.x
        expected = F.layer_norm(mapped, (16,), norm.weight, norm.bias, eps=model.config.layer_norm_eps)
        torch.testing.assert_close(seen.y, expected, rtol=1e-11, atol=1e-11)


def test_classifier_has_a_half_width_spherized_layer(family):
    options = {"num_labels": 5, "spherization_scaling": 2.0, "spherized_classifier": True}
    model = family.model("ForSequenceClassification", **options).double()
    random_scalings(model)
    head = model.classifier
    assert (head.projection.in_features, head.projection.out_features) == (16, 7)
    assert (head.linear.in_features, head.linear.out_features, head.linear.bias) == (8, 5, None)
    encoded = getattr(model, family.model_type)(**family.batch())
    features = encoded.pooler_output if family == BERT else encoded.last_hidden_state[:, 0]
    values = features @ head.projection.weight.T + head.projection.bias
    points = spherize_plainly(values, head.spherization.scaling.item(), radius=1.0, delta=1e-6)
    expected = points @ head.linear.weight.T
    torch.testing.assert_close(family.output(model), expected, rtol=1e-11, atol=1e-11)


# Execution modes


def test_chunked_feed_forward_and_eager_attention_give_the_same_result(family):
    options = [{}, {"chunk_size_feed_forward": 2}, {"attn_implementation": "eager"}]
    expected, *outputs = [family.output(family.model(spherized_layers=[0, 2], **given)) for given in options]
    torch.testing.assert_close(outputs, [expected] * 2, rtol=1e-5, atol=1e-6)


# PEFT uses a deprecated name of transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_target_the_layers_of_the_plain_model_and_are_trained_with_the_classifier(family):
    peft = pytest.importorskip("peft")
    kind = "ForSequenceClassification"
    model, plain = (
        peft.get_peft_model(each, peft.LoraConfig(task_type="SEQ_CLS"))
        for each in (family.model(kind, spherized_classifier=True), family.plain(kind))
    )
    mine, its = (
        {name for name, module in each.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
        for each in (model, plain)
    )
    assert mine == its
    assert len(mine) == 6  # query and value in three layers
    model(**family.batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in trained)
    assert any(name.endswith("classifier.modules_to_save.default.spherization.scaling") for name in trained)


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
            with pytest.raises(ValueError, match=r"has other spherized layers: spherized_layers is "):
                encoder.model_class(encoder.tasks[-1]).from_pretrained(
                    tmp_path, config=encoder.config(spherized_layers=asked)
                )
    encoder.model(spherized_layers=[-1, 0]).save_pretrained(tmp_path)
    _, info = type(encoder.model()).from_pretrained(tmp_path, spherized_layers=[0, 2], output_loading_info=True)
    assert not any(info.values())


def test_fill_mask_pipeline_runs_on_a_saved_model(family, tmp_path):
    model = family.model()
    model.save_pretrained(tmp_path)
    write_vocabulary(tmp_path, family.name)
    fill = transformers.pipeline("fill-mask", str(tmp_path))
    assert type(fill.model) is type(model)
    answers = fill(f"the {fill.tokenizer.mask_token}", top_k=50)
    ids = torch.tensor(fill.tokenizer(f"the {fill.tokenizer.mask_token}").input_ids)
    probabilities = model(input_ids=ids[None]).logits[0, ids == fill.tokenizer.mask_token_id].softmax(-1)[0]
    found = {answer["token"]: answer["score"] for answer in answers}
    assert found == pytest.approx(dict(enumerate(probabilities.tolist())), abs=1e-6)


# Plain checkpoints


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
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
    assert "of type" not in transformers_log.text
    # Control: a configuration of another family does warn.
    (transformers.BertConfig if family.name == "Roberta" else transformers.RobertaConfig).from_pretrained(
        tmp_path / "plain"
    )
    assert "of type" in transformers_log.text
