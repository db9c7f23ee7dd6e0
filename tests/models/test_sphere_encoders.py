"""Computation and training of the spherized text encoders."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from small_encoders import BERT
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

KINDS = ["Model", "ForMaskedLM", "ForSequenceClassification"]

every_kind = pytest.mark.parametrize("kind", KINDS)
# PEFT uses a deprecated name of transformers.
with_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


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


def output_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)[0]


# Values


@pytest.mark.parametrize("layers", [None, [0], [-1, 0, 1]])
def test_spherized_layer_matches_the_formula(family, layers):
    options = {"spherization_scaling": 2.0, "spherization_radius": 3.0, "spherization_delta": 1e-4}
    model = family.model("Model", spherized_layers=layers, **options).double()
    random_scalings(model)
    for index in model.config.spherized_layer_indices:
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
    torch.testing.assert_close(output_of(model, family.batch()), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("layers", "asked"),
    [(None, {}), (None, {"spherized_classifier": True}), ([], {"spherized_classifier": True}), ([], {})],
    ids=["layer", "both", "classifier", "neither"],
)
def test_classifier_is_spherized_only_if_the_config_says_so(family, layers, asked):
    model = family.model("ForSequenceClassification", spherized_layers=layers, **asked)
    assert hasattr(model.classifier, "spherization") == bool(asked)
    assert any(hasattr(layer.output, "spherical") for layer in model.base_model.encoder.layer) == (layers is None)
    assert output_of(model, family.batch()).shape == (3, 2)


@pytest.mark.parametrize(("layers", "indices"), [(None, (2,)), ((-1, 0), (0, 2)), ([], ()), ([2, 1, 0], (0, 1, 2))])
def test_layer_indices_may_be_negative(family, layers, indices):
    model = family.model("Model", spherized_layers=layers)
    spherized = [index for index, layer in enumerate(model.encoder.layer) if hasattr(layer.output, "spherical")]
    assert model.config.spherized_layer_indices == tuple(spherized) == indices


@pytest.mark.parametrize("learned", [True, False])
def test_scaling_and_radius_are_parameters_only_if_learned(family, learned):
    options = {"learn_spherization_scaling": learned, "learn_spherization_radius": not learned}
    model = family.model("Model", spherization_scaling=2.0, spherization_radius=3, **options)
    spherization = model.encoder.layer[-1].output.spherical.spherization
    assert (spherization.scaling.item(), spherization.radius.item()) == (2.0, 3.0)
    assert set(dict(spherization.named_parameters())) == {"scaling" if learned else "radius"}
    assert set(dict(spherization.named_buffers())) == {"radius" if learned else "scaling"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spherized_layers": [3]}, r"spherized_layers \[3\] contains layer 3, but the encoder has 3 layers"),
        ({"spherized_layers": [0, -4]}, r"contains layer -4.*or -3 to -1 from the end"),
        ({"spherized_layers": [1, 1]}, "contains a layer twice"),
        ({"spherized_layers": [0, -3]}, "contains a layer twice"),
        ({"spherization_delta": 1.0}, r"delta must be a number in \(0, 1\); got 1.0"),
        ({"spherization_radius": 0.0}, r"radius must be a number in \(0, inf\); got 0.0"),
    ],
)
def test_invalid_settings_are_rejected(family, options, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        family.config(**options)


def test_settings_of_a_wrong_type_and_too_narrow_encoders_are_rejected(family):
    for options in ({"spherized_layers": "last"}, {"spherization_scaling": "5"}):
        with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(options))):
            family.config(**options)
    with pytest.raises(ValueError, match="needs a hidden_size of at least 4; got 2"):
        family.model("ForSequenceClassification", hidden_size=2, spherized_classifier=True)


# Execution modes


@every_kind
def test_sdpa_attention_matches_eager_attention(family, kind):
    outputs = []
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        outputs.append(output_of(family.model(kind, attn_implementation=attention), family.batch()))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_chunked_feed_forward_gives_the_same_result(family):
    outputs = []
    for chunk in (0, 2):
        torch.manual_seed(0)
        model = family.model(spherized_layers=[0, 2], chunk_size_feed_forward=chunk)
        outputs.append(output_of(model, family.batch()))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gradients(family):
    model = family.model(spherized_layers=[0, 2], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    layer, runs = model.base_model.encoder.layer[2], []
    layer.intermediate.register_forward_hook(lambda *_: runs.append(1))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            # The older name, deprecated since 5.23, is the only one in earlier versions.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(**family.batch(), labels=family.batch()["input_ids"]).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    assert len(runs) == 3  # once without checkpointing, and once each in forward and backward with it
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@every_kind
def test_half_precision_is_close(family, kind):
    model = family.model(kind)
    expected = output_of(model, family.batch())
    result = output_of(model.bfloat16(), family.batch())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)


def test_resized_embeddings_stay_tied(family):
    model = family.model()
    model.resize_token_embeddings(57, mean_resizing=False)
    assert output_of(model, family.batch()).shape == (3, 6, 57)
    assert model.config.vocab_size == 57
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", KINDS[1:])
def test_trainer_trains_the_model(family, kind, tmp_path):
    model, batch = family.model(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), family.batch(4)
    labels: Any = batch["input_ids"] if kind == "ForMaskedLM" else torch.tensor([0, 1, 1, 0])
    rows = [{**{name: value[row] for name, value in batch.items()}, "labels": labels[row]} for row in range(4)]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, learning_rate=0.005, lr_scheduler_type="constant", logging_steps=1, use_cpu=True,
        per_device_train_batch_size=4, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] < losses[0]  # after one step
    assert losses[-1] < 0.8 * losses[0]
    unmoved = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert not {name for name in unmoved if "spher" in name or "classifier" in name}


@with_peft
def test_adapters_target_the_same_layers_as_in_the_plain_model(family):
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> set[str]:
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS"))
        return {name for name, module in wrapped.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}

    kind = "ForSequenceClassification"
    mine = adapted(family.model(kind))
    assert mine == adapted(family.plain(kind))
    assert len(mine) == 6  # query and value in three layers


@with_peft
def test_adapted_model_trains_only_adapters_and_classifier(family):
    peft = pytest.importorskip("peft")
    classifier = family.model("ForSequenceClassification", spherized_classifier=True)
    model = peft.get_peft_model(classifier, peft.LoraConfig(task_type="SEQ_CLS"))
    model(**family.batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in trained)
    assert any(name.endswith("classifier.modules_to_save.default.spherization.scaling") for name in trained)
