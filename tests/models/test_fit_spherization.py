"""Fitting the spherized layers of an encoder to the plain encoder it started from."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_encoders import BERT, DISTILBERT, VIT, Encoder, every_encoder, pre_norm
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from hf_sphere import SphereBertForMaskedLM, SphereBertModel, fit_spherization

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


@pytest.fixture
def load(checkpoint):
    """Load the plain model and the spherized one that starts from it."""

    def pair(**options: Any) -> tuple[SphereBertForMaskedLM, BertForMaskedLM]:
        torch.manual_seed(0)
        spherized = SphereBertForMaskedLM.from_pretrained(checkpoint, **options)
        return spherized.eval(), BertForMaskedLM.from_pretrained(checkpoint).eval()

    return pair


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


def explained_variance(points: np.ndarray, targets: np.ndarray, solution: np.ndarray) -> float:
    return 1 - ((points @ solution - targets) ** 2).sum() / ((targets - targets.mean(0)) ** 2).sum()


# Fit


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_map_is_the_ridge_regression_on_the_layer_inputs(load, tokenizer, ridge):
    model, reference = (half.double() for half in load())
    batch = batch_of(tokenizer, sentences(100))
    points, targets, _ = features_and_targets(model, reference, 1, batch)
    expected = points @ ridge_regression(points, targets, ridge)
    [fit] = fit_spherization(model, reference, [batch], ridge=ridge)
    np.testing.assert_allclose(points @ new_map(model).numpy().T, expected, rtol=1e-5, atol=1e-5)
    assert (fit.layer, fit.ridge, fit.num_tokens) == (1, ridge, len(points))


def test_layers_are_fitted_sequentially(load, tokenizer):
    model, reference = (half.double() for half in load(spherized_layers=[0, 1]))
    batch = batch_of(tokenizer, sentences(100))
    fits = fit_spherization(model, reference, [batch], ridge=1e-4)
    assert [fit.layer for fit in fits] == [0, 1]
    for layer in (0, 1):  # the map of a layer does not change its own inputs
        points, targets, _ = features_and_targets(model, reference, layer, batch)
        expected = points @ ridge_regression(points, targets, 1e-4)
        np.testing.assert_allclose(points @ new_map(model, layer).numpy().T, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ridge", [None, 1e-3])
def test_explained_variance_is_measured_on_every_fifth_text(load, tokenizer, ridge):
    model, reference = (half.double() for half in load())
    texts = sentences(100)
    [fit] = fit_spherization(model, reference, texts, tokenizer=tokenizer, ridge=ridge, batch_size=16)
    batch = batch_of(tokenizer, texts)
    points, targets, rows = features_and_targets(model, reference, 1, batch)
    held_out = rows % 5 == 4
    maps = {
        candidate: ridge_regression(points[~held_out], targets[~held_out], candidate)
        for candidate in ([10.0**exponent for exponent in range(-9, 1)] if ridge is None else [ridge])
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


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_only_a_fitted_encoder_is_close_to_the_plain_one(load, tokenizer, layers):
    model, reference = load(spherized_layers=layers)
    unseen = batch_of(tokenizer, sentences(40, start=5))

    @torch.no_grad()
    def share_missed() -> float:
        mine, its = (half.base_model(**unseen)[0][unseen["attention_mask"].bool()] for half in (model, reference))
        return float((mine - its).square().sum() / (its - its.mean(0)).square().sum())

    fresh = share_missed()
    fit_spherization(model, reference, sentences(200), tokenizer=tokenizer)
    assert share_missed() < 0.25 * fresh


def masked_batch(tokenizer: Any, texts: list[str], first: int) -> dict[str, Tensor]:
    """Inputs with every fourth token masked, starting at an offset, and the labels."""
    inputs = batch_of(tokenizer, texts)
    ids = inputs["input_ids"]
    masked = (torch.arange(ids.shape[1]) % 4 == first) & (ids > tokenizer.mask_token_id)
    labels, hidden = ids.masked_fill(~masked, -100), ids.masked_fill(masked, tokenizer.mask_token_id)
    return {**inputs, "input_ids": hidden, "labels": labels}


def test_fitted_model_starts_near_the_loss_of_the_trained_one(checkpoint, tokenizer, tmp_path):
    trained = BertForMaskedLM.from_pretrained(checkpoint)
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
    texts = sentences(200)
    for step in range(120):
        optimizer.zero_grad()
        trained(**masked_batch(tokenizer, texts[step % 4 :: 4], first=step % 3)).loss.backward()
        optimizer.step()
    trained.eval().save_pretrained(tmp_path)
    model = SphereBertForMaskedLM.from_pretrained(tmp_path).eval()
    unseen = masked_batch(tokenizer, sentences(40, start=5), first=2)

    @torch.no_grad()
    def loss(of: Any) -> float:
        return of(**unseen).loss.item()

    plain, fresh = loss(trained), loss(model)
    assert plain < fresh - 1.0  # otherwise the test would pass trivially
    fit_spherization(model, trained, texts, tokenizer=tokenizer)
    assert abs(loss(model) - plain) < 0.2 * (fresh - plain)


def batches_of(encoder: Encoder) -> list[dict[str, Tensor]]:
    """Two batches of 100 texts or images."""
    inputs = encoder.batch(100)
    if not encoder.is_image:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return [{name: value.roll(shift, dims=-1) for name, value in inputs.items()} for shift in (0, 3)]


@every_encoder
def test_fit_brings_every_encoder_close_to_the_plain_one(encoder):
    plain, model = encoder.plain(initializer_range=0.3), encoder.model(initializer_range=0.3)
    model.load_state_dict(plain.state_dict(), strict=False)
    before = (encoder.output(model) - encoder.output(plain)).square().mean()
    [fit] = fit_spherization(model, plain, batches_of(encoder))
    assert fit.layer == 2
    assert fit.explained_variance > 0.5
    assert (encoder.output(model) - encoder.output(plain)).square().mean() < before / 2


@pre_norm
def test_fit_compensates_for_earlier_layers_if_the_norm_comes_first(encoder):
    plain, model = (
        each("Model", initializer_range=0.3, **options).double()
        for each, options in ((encoder.plain, {}), (encoder.model, {"spherized_layers": [0, 1]}))
    )
    model.load_state_dict(plain.state_dict(), strict=False)
    batches = batches_of(encoder)
    fit_spherization(model, plain, batches, ridge=0.0)
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


def test_texts_and_tokenized_batches_give_the_same_fit(load, tokenizer, checkpoint):
    maps = []
    texts = sentences(64)
    batches = [batch_of(tokenizer, texts[start : start + 16]) for start in range(0, 64, 16)]
    for batch in batches:
        batch["labels"] = batch["input_ids"]  # unused
    for given in ([*texts[:20], "", " \n", *texts[20:]], batches):  # empty texts are skipped
        model, reference = load()
        fit_spherization(model, reference, given, ridge=1e-4)  # with the tokenizer of the checkpoint
        maps.append(new_map(model))
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)


def test_max_length_truncates_texts_and_without_a_mask_all_tokens_are_used(load, tokenizer):
    model, reference = load()
    [fit] = fit_spherization(model, reference, sentences(20), tokenizer=tokenizer, max_length=6)
    assert fit.num_tokens == 120
    ids = torch.randint(5, 400, (20, 10))
    [fit] = fit_spherization(model, reference, [{"input_ids": ids[:10]}, {"input_ids": ids[10:]}])
    assert fit.num_tokens == 200


@pytest.mark.parametrize(
    ("options", "trained"), [({"chunk_size_feed_forward": 4}, False), ({"hidden_dropout_prob": 0.5}, True)]
)
def test_a_chunked_feed_forward_and_dropout_in_training_mode_give_the_same_fit(load, options, trained):
    ids = torch.randint(5, 400, (30, 12))
    maps = []
    for given in ({}, options):
        model, reference = load(**given)
        model.train(trained and bool(given))
        fit_spherization(model, reference, [{"input_ids": ids}], ridge=1e-3)
        maps.append(new_map(model))
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)


def test_reading_stops_at_the_token_limit(load, tokenizer):
    model, reference = load()
    read: list[str] = []

    def endless() -> Iterator[str]:
        for text in itertools.cycle(sentences(64)):
            read.append(text)
            yield text

    [fit] = fit_spherization(model, reference, endless(), tokenizer=tokenizer, max_tokens=500, batch_size=8)
    lengths = np.cumsum([len(tokenizer(text).input_ids) for text in read])
    assert len(read) % 8 == 0
    assert lengths[-9] < 500 <= lengths[-1] == fit.num_tokens


def test_only_the_new_maps_are_modified_and_the_fit_described(load, tokenizer):
    model, reference = load()
    model.train()
    model.bert.embeddings.eval()  # as when the embeddings are frozen
    modes = [module.training for half in (model, reference) for module in half.modules()]
    before = [{name: value.clone() for name, value in half.state_dict().items()} for half in (model, reference)]
    [fit] = fit_spherization(model, reference, sentences(20), tokenizer=tokenizer, ridge=1e-3)
    assert [module.training for half in (model, reference) for module in half.modules()] == modes
    assert not any(module._forward_pre_hooks for half in (model, reference) for module in half.modules())
    pairs = [(half.state_dict(), values) for half, values in zip((model, reference), before, strict=True)]
    changed = {name for now, values in pairs for name in now if not torch.equal(now[name], values[name])}
    assert changed == {"bert.encoder.layer.1.output.spherical.linear.weight"}
    share = f"{100 * fit.explained_variance:.2f}"
    expected = f"layer 1: {share} % of the variance explained on held-out text ({fit.num_tokens} tokens, ridge 0.001)"
    assert str(fit) == expected


def test_half_precision_model_is_fitted_in_float32(load, tokenizer):
    exact, reference = load()
    rounded, rounded_reference = (half.bfloat16() for half in load())
    [expected] = fit_spherization(exact, reference, sentences(100), tokenizer=tokenizer)
    [fit] = fit_spherization(rounded, rounded_reference, sentences(100), tokenizer=tokenizer)
    assert new_map(rounded).dtype == torch.bfloat16
    assert fit.explained_variance == pytest.approx(expected.explained_variance, abs=0.05)


def test_encoder_without_a_head_is_fitted_to_a_model_with_one(checkpoint, load, tokenizer):
    texts = sentences(30)
    model, reference = load()
    fit_spherization(model, reference, texts, tokenizer=tokenizer, ridge=1e-3)
    alone = SphereBertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    fit_spherization(alone, reference, texts, tokenizer=tokenizer, ridge=1e-3)
    assert torch.equal(new_map(alone), new_map(model))


# Validation


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (2, {}, r"too few tokens: at least 65 in 5 texts are required; got \d+ in 2"),
        (0, {}, "got 0 in 0"),
        (100, {"max_tokens": 40, "batch_size": 1}, r"Pass more texts, or increase max_tokens \(40\)"),
        (100, {"max_tokens": 64, "batch_size": 5}, "too few tokens"),
    ],
)
def test_too_few_tokens_are_rejected(load, tokenizer, count, options, message):
    model, reference = load()
    if options.get("batch_size") == 5:
        options = options | {"max_length": 4}  # many texts, each short
    before = new_map(model).clone()
    with pytest.raises(ValueError, match=message):
        fit_spherization(model, reference, sentences(count)[:16], tokenizer=tokenizer, **options)
    assert torch.equal(new_map(model), before)


def test_underdetermined_fit_without_ridge_is_rejected(load, tokenizer):
    same = sentences(1) * 50
    with pytest.raises(ValueError, match=r"layer 1 .*no unique solution with ridge 0.*use a larger one"):
        fit_spherization(*load(), same, tokenizer=tokenizer, ridge=0.0)
    fit_spherization(*load(), same, tokenizer=tokenizer)  # a ridge is chosen automatically


def test_spherized_reference_layer_is_rejected(load, checkpoint, tokenizer):
    model, _ = load()
    with pytest.raises(ValueError, match="layer 1 of the reference is spherized"):
        fit_spherization(model, model, sentences(20), tokenizer=tokenizer)
    elsewhere = SphereBertForMaskedLM.from_pretrained(checkpoint, spherized_layers=[0])
    fit_spherization(model, elsewhere, sentences(20), tokenizer=tokenizer)  # its layer 1 is plain


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 3), ("hidden_size", 16), ("intermediate_size", 32), ("vocab_size", 300)]
)
def test_reference_of_wrong_size_is_rejected(load, tokenizer, name, value):
    model, reference = load()
    config = BertConfig.from_dict({**reference.config.to_dict(), name: value})
    its = getattr(reference.config, name)
    with pytest.raises(ValueError, match=f"its {name} is {value}; the model has {its}"):
        fit_spherization(model, BertModel(config), sentences(20), tokenizer=tokenizer)


# Texts of padding


def texts_of(count: int) -> list[dict[str, Tensor]]:
    """Batches of four texts of six tokens each."""
    ids = torch.randint(5, 50, (count, 4, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids]


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@pytest.fixture
def pair(family) -> tuple[Any, Any]:
    return family.model(), family.plain()


@pytest.mark.parametrize("position", [0, 3, 7], ids=["first", "middle", "last"])
def test_padding_only_texts_do_not_change_the_fit(pair, position):
    model, reference = pair
    batches = texts_of(8)
    padding = {name: torch.zeros_like(value[:2]) for name, value in batches[0].items()}
    (fit,) = fit_spherization(model, reference, batches, ridge=0.01)
    expected = new_map(model).clone()
    (other,) = fit_spherization(model, reference, [*batches[:position], padding, *batches[position:]], ridge=0.01)
    assert other == fit
    torch.testing.assert_close(new_map(model), expected)


def test_texts_with_tokens_are_held_out_if_every_fifth_is_padding(pair):
    model, reference = pair
    at_once = joined(texts_of(8))
    at_once["attention_mask"][4::5] = 0
    (fit,) = fit_spherization(model, reference, [at_once], ridge=0.01)
    assert fit.num_tokens == int(at_once["attention_mask"].sum())
    assert fit.explained_variance < 1


def test_padding_only_text_does_not_shift_others_in_the_batch(pair):
    model, reference = pair
    batches = texts_of(8)
    for batch in batches:
        batch["attention_mask"][-1] = 0
    (fit,) = fit_spherization(model, reference, batches, ridge=0.01)
    (other,) = fit_spherization(model, reference, [joined(batches)], ridge=0.01)
    assert other.explained_variance == pytest.approx(fit.explained_variance, rel=1e-6)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one long text " * 100, "texts must be a list of texts; got a single one"),
        ({"input_ids": torch.ones(9, 9)}, "texts must be an iterable of texts or batches; got one batch"),
        ([{"text": "a row of a dataset"}], r"with input_ids; got the columns \['text'\]"),
        ([["a", "b"]], "texts must be strings, or batches with input_ids; got a list"),
        ([torch.ones(2, 9)], "texts must be strings, or batches with input_ids; got a Tensor"),
    ],
    ids=["string", "batch", "rows", "lists", "tensors"],
)
def test_inputs_other_than_texts_or_batches_are_rejected(pair, texts, message):
    before = new_map(pair[0]).clone()
    with pytest.raises(ValueError, match=message):
        fit_spherization(*pair, texts)
    assert torch.equal(new_map(pair[0]), before)


def test_bad_input_is_refused(load, tokenizer, pair):
    for ridge in (-1e-3, math.nan):
        with pytest.raises(ValueError, match=rf"ridge must be a number in \[0, inf\); got {ridge}"):
            fit_spherization(*load(), sentences(20), tokenizer=tokenizer, ridge=ridge)
    model, reference = load(spherized_layers=[])
    with pytest.raises(ValueError, match="SphereBertForMaskedLM has no spherized layer to fit; set"):
        fit_spherization(model, reference, sentences(20), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="BertForMaskedLM has no spherized layer"):
        fit_spherization(reference, reference, sentences(20), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the reference must be a distilbert model; got a bert model"):
        fit_spherization(DISTILBERT.model(), BERT.plain(), [])
    with pytest.raises(ValueError, match="texts must be batches with pixel_values; got a str"):
        fit_spherization(VIT.model(), VIT.plain(), ["a text"])
    with pytest.raises(ValueError, match="the reference was not loaded from a checkpoint with a tokenizer"):
        fit_spherization(*pair, ["a text"] * 100)
