"""Fitting the spherized layers of an encoder to the plain encoder it started from."""

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_encoders import Encoder, every_encoder, pre_norm
from torch import Tensor
from transformers import AutoTokenizer, BertForMaskedLM

from hf_sphere import SphereBertForMaskedLM, SphereBertModel, fit_spherization
from hf_sphere.models import SpherizationFit
from hf_sphere.models.sphere_encoder import fitting

NOUNS = ["cat", "nurse", "mountain", "story", "lamp", "picture", "water", "teacher", "bird", "wood", "judge", "car"]
TEMPLATES = ["{} is to {} what {} is to {}", "the relation between {} and {} is the same as {} to {}."]


def sentences(count: int, start: int = 0) -> list[str]:
    """Distinct sentences of words in the vocabulary of the tiny BERT."""
    words = itertools.permutations(NOUNS, 4)
    chosen = itertools.islice(words, start, None, 37)  # neighbors differ in one word
    return [TEMPLATES[index % 2].format(*four) for index, four in zip(range(count), chosen, strict=False)]


@pytest.fixture(scope="module")
def checkpoint(root) -> str:
    """A two-layer BERT with large random weights, so that each layer matters."""
    return str(root / "tests" / "golden" / "analogy" / "tiny-bert")


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


def load(checkpoint, **options: Any) -> tuple[SphereBertForMaskedLM, BertForMaskedLM]:
    """Load the plain model and the spherized one that starts from it."""
    torch.manual_seed(0)
    spherized = SphereBertForMaskedLM.from_pretrained(checkpoint, **options)
    return spherized.eval(), BertForMaskedLM.from_pretrained(checkpoint).eval()


def batch_of(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def new_map(model: Any, layer: int = -1) -> Tensor:
    return model.base_model.encoder.layer[layer].output.spherical.linear.weight.detach()


@torch.no_grad()
def features_and_targets(model: Any, reference: Any, layer: int, batch: dict[str, Tensor]) -> tuple[np.ndarray, ...]:
    """Inputs and targets of the map of one layer for every token, by definition, and the text of each token."""
    attended: list[Tensor] = []
    for encoder in (model.base_model, reference.base_model):
        hook = encoder.encoder.layer[layer].attention.register_forward_hook(
            lambda *given: attended.append(given[-1][0])
        )
        encoder(**batch)
        hook.remove()
    mine, its = (values.double() for values in attended)
    own, plain = model.base_model.encoder.layer[layer], reference.base_model.encoder.layer[layer]
    first, second = plain.intermediate.dense, plain.output.dense
    wanted = F.gelu(its @ first.weight.double().T + first.bias) @ second.weight.double().T + second.bias + its - mine
    values = mine @ own.intermediate.dense.weight.double().T + own.intermediate.dense.bias
    lowest = min(math.asin(1e-6 ** (1 / values.shape[-1])), 0.99 * math.pi / 2)
    angles = (math.pi / 2 - lowest) * values.sigmoid() + lowest
    before = torch.cat([torch.ones_like(angles[..., :1]), angles.sin().cumprod(-1)], -1)
    points = before * torch.cat([angles.cos(), torch.ones_like(angles[..., :1])], -1)
    kept = batch["attention_mask"].bool()
    return points[kept].numpy(), wanted[kept].numpy(), kept.nonzero()[:, 0].numpy()


def ridge_regression(points: np.ndarray, targets: np.ndarray, ridge: float) -> np.ndarray:
    """Ridge regression as least squares with one additional row per coordinate."""
    pull = np.diag(np.sqrt(ridge * (points**2).sum(0)))
    solution, *_ = np.linalg.lstsq(
        np.vstack([points, pull]), np.vstack([targets, np.zeros((len(pull), targets.shape[1]))]), rcond=None
    )
    return solution


def fit_with(ridge: float, *given: Any, **options: Any) -> list[SpherizationFit]:
    """Fit with one ridge instead of the best."""
    with mock.patch.object(fitting, "RIDGES", (ridge,)):
        return fit_spherization(*given, **options)


def explained_variance(points: np.ndarray, targets: np.ndarray, solution: np.ndarray) -> float:
    return 1 - ((points @ solution - targets) ** 2).sum() / ((targets - targets.mean(0)) ** 2).sum()


# Fit


@pytest.mark.settings(layers=lambda layers: {"layers": str(layers)})
@pytest.mark.parametrize(("layers", "ridge"), [([1], 0.0), ([0, 1], 1e-4)])
def test_map_is_the_ridge_regression_on_the_layer_inputs_layer_by_layer(checkpoint, tokenizer, layers, ridge):
    model, reference = (half.double() for half in load(checkpoint, spherized_layers=layers))
    batch = batch_of(tokenizer, sentences(100))
    fits = fit_with(ridge, model, reference, [batch])
    for layer, fit in zip(layers, fits, strict=True):  # the map of a layer does not change its own inputs
        points, targets, _ = features_and_targets(model, reference, layer, batch)
        expected = points @ ridge_regression(points, targets, ridge)
        np.testing.assert_allclose(points @ new_map(model, layer).numpy().T, expected, rtol=1e-5, atol=1e-5)
        assert (fit.layer, fit.ridge, fit.num_tokens) == (layer, ridge, len(points))


def test_explained_variance_is_measured_on_every_fifth_text(checkpoint, tokenizer):
    model, reference = (half.double() for half in load(checkpoint))
    texts = sentences(100)
    [fit] = fit_spherization(model, reference, texts, tokenizer=tokenizer)
    batch = batch_of(tokenizer, texts)
    points, targets, rows = features_and_targets(model, reference, 1, batch)
    held_out = rows % 5 == 4
    maps = {
        candidate: ridge_regression(points[~held_out], targets[~held_out], candidate)
        for candidate in (10.0**exponent for exponent in range(-9, 1))
    }
    scores = {name: explained_variance(points[held_out], targets[held_out], fitted) for name, fitted in maps.items()}
    assert fit.ridge == max(scores, key=lambda candidate: scores[candidate])  # the best ridge
    # Output of the last layer after its norm, with the map fitted without the held-out texts.
    new_map(model).copy_(torch.from_numpy(maps[fit.ridge]).T)
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        outputs = [half.base_model(**batch).last_hidden_state[kept].numpy()[held_out] for half in (model, reference)]
    expected = explained_variance(outputs[0], outputs[1], np.eye(outputs[0].shape[1]))
    assert fit.explained_variance == pytest.approx(expected, abs=1e-5)
    assert 0.5 < fit.explained_variance < 1


# Quality


def batches_of(encoder: Encoder) -> list[dict[str, Tensor]]:
    """Two batches of 100 texts or images."""
    inputs = encoder.batch(100)
    if not encoder.is_image:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return [{name: value.roll(shift, dims=-1) for name, value in inputs.items()} for shift in (0, 3)]


@every_encoder
def test_fit_brings_every_encoder_close_to_the_plain_one_also_in_half_precision(encoder):
    plain, model = encoder.plain(initializer_range=0.3), encoder.model(initializer_range=0.3)
    model.load_state_dict(plain.state_dict(), strict=False)
    rounded, rounded_plain = (copy.deepcopy(each).bfloat16() for each in (model, plain))
    before = (encoder.output(model) - encoder.output(plain)).square().mean()
    [fit] = fit_spherization(model, plain, batches_of(encoder))
    assert fit.layer == 2
    assert fit.explained_variance > 0.5
    assert (encoder.output(model) - encoder.output(plain)).square().mean() < before / 2
    [other] = fit_spherization(rounded, rounded_plain, batches_of(encoder))
    assert encoder.spherical(rounded).linear.weight.dtype == torch.bfloat16
    assert other.explained_variance == pytest.approx(fit.explained_variance, abs=0.05)


@pre_norm
def test_fit_compensates_for_earlier_layers_if_the_norm_comes_first(encoder):
    plain, model = (
        each("Model", initializer_range=0.3, **options).double()
        for each, options in ((encoder.plain, {}), (encoder.model, {"spherized_layers": [0, 1]}))
    )
    model.load_state_dict(plain.state_dict(), strict=False)
    batches = batches_of(encoder)
    fit_with(0.0, model, plain, batches)
    calls: dict[str, list[Tensor]] = {"inputs": [], "model": [], "plain": []}
    linear = encoder.spherical(model, 1).linear
    linear.register_forward_hook(lambda _, inputs, output: calls["inputs"].append(inputs[0]))
    for name, each in (("model", model), ("plain", plain)):
        encoder.layer(each, 1).register_forward_hook(lambda _, inputs, output, name=name: calls[name].append(output))
    for inputs in batches:
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        model(**inputs)
        plain(**inputs)
    inputs, outputs, targets = (torch.cat(each) for each in calls.values())
    # The error of a least-squares fit is orthogonal to its inputs.
    assert (outputs - targets).square().mean() > 1e-6
    assert torch.einsum("bln,blh->nh", inputs, outputs - targets).abs().max() < 1e-7


# Inputs and side effects


def test_texts_and_tokenized_batches_give_the_same_fit_also_of_an_encoder_without_a_head(
    tokenizer, checkpoint, monkeypatch
):
    maps = []
    texts = sentences(64)
    batches = [batch_of(tokenizer, texts[start : start + 16]) for start in range(0, 64, 16)]
    for batch in batches:
        batch["labels"] = batch["input_ids"]  # unused
    for given in ([*texts[:20], "", " \n", *texts[20:]], batches):  # empty texts are skipped
        model, reference = load(checkpoint)
        fit_with(1e-4, model, reference, given)  # with the tokenizer of the checkpoint
        maps.append(new_map(model))
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)
    alone = SphereBertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    fit_with(1e-4, alone, reference, batches)
    assert torch.equal(new_map(alone), maps[1])
    monkeypatch.setattr(fitting, "MAX_LENGTH", 6)
    [fit] = fit_spherization(model, reference, texts[:20])
    assert fit.num_tokens == 120
    [fit] = fit_spherization(model, reference, [{"input_ids": torch.randint(5, 400, (20, 10))}])  # without a mask
    assert fit.num_tokens == 200


@pytest.mark.parametrize(
    ("options", "trained"), [({"chunk_size_feed_forward": 4}, False), ({"hidden_dropout_prob": 0.5}, True)]
)
def test_a_chunked_feed_forward_and_dropout_in_training_mode_give_the_same_fit(checkpoint, options, trained):
    ids = torch.randint(5, 400, (30, 12))
    maps = []
    for given in ({}, options):
        model, reference = load(checkpoint, **given)
        model.train(trained and bool(given))
        fit_with(1e-3, model, reference, [{"input_ids": ids}])
        maps.append(new_map(model))
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)


def test_reading_stops_at_the_token_limit(checkpoint, tokenizer):
    model, reference = load(checkpoint)
    read: list[str] = []

    def endless() -> Iterator[str]:
        for text in itertools.cycle(sentences(64)):
            read.append(text)
            yield text

    [fit] = fit_spherization(model, reference, endless(), tokenizer=tokenizer, max_tokens=500)
    lengths = np.cumsum([len(tokenizer(text).input_ids) for text in read])
    assert len(read) % 16 == 0
    assert lengths[-17] < 500 <= lengths[-1] == fit.num_tokens


def test_only_the_new_maps_are_modified_and_the_fit_described(checkpoint, tokenizer):
    model, reference = load(checkpoint)
    model.train()
    model.bert.embeddings.eval()  # as when the embeddings are frozen
    modes = [module.training for half in (model, reference) for module in half.modules()]
    before = [{name: value.clone() for name, value in half.state_dict().items()} for half in (model, reference)]
    [fit] = fit_with(1e-3, model, reference, sentences(20), tokenizer=tokenizer)
    assert [module.training for half in (model, reference) for module in half.modules()] == modes
    assert not any(module._forward_pre_hooks for half in (model, reference) for module in half.modules())
    pairs = [(half.state_dict(), values) for half, values in zip((model, reference), before, strict=True)]
    changed = {name for now, values in pairs for name in now if not torch.equal(now[name], values[name])}
    assert changed == {"bert.encoder.layer.1.output.spherical.linear.weight"}
    share = f"{100 * fit.explained_variance:.2f}"
    expected = f"layer 1: {share} % of the variance explained on held-out text ({fit.num_tokens} tokens, ridge 0.001)"
    assert str(fit) == expected


# Validation


def test_equal_texts_can_be_fitted_and_too_few_are_rejected(checkpoint, tokenizer):
    fit_spherization(*load(checkpoint), sentences(1) * 50, tokenizer=tokenizer)
    for few in (sentences(2), [], [{"input_ids": torch.randint(5, 400, (6, 10))}]):
        with pytest.raises(ValueError, match=r"needs at least 65 tokens in 5 texts; got \d+ tokens in"):
            fit_spherization(*load(checkpoint), few, tokenizer=tokenizer)


def test_texts_with_tokens_are_held_out_if_every_fifth_is_padding_in_any_batches(family):
    model, reference = family.model(), family.plain()
    ids = torch.randint(5, 50, (40, 6), generator=torch.Generator().manual_seed(0))
    at_once = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    at_once["attention_mask"][4::5] = 0
    (fit,) = fit_with(0.01, model, reference, [at_once])
    assert fit.num_tokens == int(at_once["attention_mask"].sum())
    assert fit.explained_variance < 1
    parts = [{name: value[start : start + 5] for name, value in at_once.items()} for start in range(0, 40, 5)]
    (other,) = fit_with(0.01, model, reference, parts)
    assert other.explained_variance == pytest.approx(fit.explained_variance, rel=1e-6)
