"""Does a rejection compute its p-values by the formula, keep its level, and belong to its model?"""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification, SphereVisionModel
from hf_sphere.nn.rejection import SCORES
from hf_sphere.ood import Rejection, fit_rejection, model_outputs

DIM, CLASSES = 6, 3


class Identity(nn.Module):
    """A classifier whose inputs are the logits."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


@pytest.fixture(scope="module")
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, CLASSES)


def draw(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    means = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    return 2 * means[labels] + torch.randn(count, DIM, generator=generator), labels


def decide(rejection: Rejection, model: nn.Linear, x: torch.Tensor):
    return rejection(x, model(x), x.norm(dim=1))


@pytest.fixture
def classifier() -> SphereVisionForImageClassification:
    torch.manual_seed(0)
    options = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "num_channels": 1, "image_size": 4}
    return SphereVisionForImageClassification(SphereVisionConfig(**options, num_labels=CLASSES, head="softmax")).eval()


def images(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return pixels, torch.arange(count) % CLASSES


# The formula


def plain_p_value(scores: np.ndarray, value: float) -> float:
    return (1 + sum(score <= value for score in scores)) / (len(scores) + 1)


def plain_log_softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.detach().double().numpy()
    shifted = values - values.max(1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(1, keepdims=True))).astype(np.float32)


PLAIN = {
    "max_softmax": lambda x, logits: plain_log_softmax(logits).max(1),
    "max_logit": lambda x, logits: logits.detach().numpy().max(1),
    "norm": lambda x, logits: np.sqrt((x.double().numpy() ** 2).sum(1)).astype(np.float32),
}


@pytest.mark.parametrize("score", PLAIN)
def test_pooled_p_values_are_those_of_the_formula(score, linear):
    (x, labels), (new, _) = draw(90), draw(50, seed=2)
    rejection = fit_rejection(linear, [(x, labels)], 0.1, score)
    decision = decide(rejection, linear, new)
    scores = PLAIN[score](x, linear(x))
    expected = [plain_p_value(scores, value) for value in PLAIN[score](new, linear(new))]
    assert decision.p_value.tolist() == pytest.approx(expected, abs=1e-6)
    assert decision.known.tolist() == [p > 0.1 for p in expected]
    assert 0 < decision.known.sum() < len(new)
    own = plain_log_softmax(linear(x))[np.arange(90), labels]
    own[np.argsort(scores)[:9]] = -np.inf  # the nine that are called unknown at the level 0.1
    expected = [[plain_p_value(own, value) for value in row] for row in plain_log_softmax(linear(new))]
    np.testing.assert_allclose(decision.class_p_values, expected, atol=1e-6)


@pytest.mark.parametrize("score", ["max_softmax", "max_logit"])
def test_p_values_by_class_are_those_of_the_formula(score, linear):
    (x, labels), (new, _) = draw(91), draw(50, seed=2)  # with a class of another size
    decision = decide(fit_rejection(linear, [(x, labels)], 0.1, score, by_class=True), linear, new)
    of_classes = plain_log_softmax if score == "max_softmax" else lambda logits: logits.detach().numpy()
    own = [of_classes(linear(x))[labels == k, k] for k in range(CLASSES)]
    values = of_classes(linear(new))
    expected = np.array([[plain_p_value(own[k], row[k]) for k in range(CLASSES)] for row in values])
    np.testing.assert_allclose(decision.class_p_values, expected, atol=1e-6)
    np.testing.assert_allclose(decision.p_value, expected.max(1), atol=1e-6)
    assert decision.known.tolist() == (expected > 0.1).any(1).tolist()


def test_a_fitted_score_uses_one_half_and_the_level_the_other(linear):
    (x, labels), (new, _) = draw(101), draw(50, seed=2)
    rejection = fit_rejection(linear, [(x, labels)], 0.1, "knn")
    assert (len(rejection.references), rejection.settings["num_images"]) == (50, 51)
    x, new = (points.double() / points.double().norm(dim=1, keepdim=True) for points in (x, new))
    is_reference = (x[:, None] - rejection.references).abs().amax(2).amin(1) < 1e-6
    assert is_reference.sum() == 50
    k = rejection.settings["options"]["k"]
    own, scores = (
        -np.sort(np.linalg.norm(points[:, None] - x[is_reference], axis=2))[:, k - 1]
        for points in (x[~is_reference], new)
    )
    p_values = rejection(new, linear(new.float())).p_value
    assert p_values.tolist() == pytest.approx([plain_p_value(own, score) for score in scores], abs=1e-6)


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_are_unknown(value, by_class, linear):
    x, labels = draw(90)
    rejection = fit_rejection(linear, [(x, labels)], 0.1, "max_logit", by_class=by_class)
    logits = linear(x[:3])
    logits[1] = value
    decision = rejection(None, logits)
    assert not decision.known[1]
    assert decision.known.tolist()[::2] == rejection(None, logits[::2]).known.tolist()


# The level


def test_the_level_is_kept_in_every_class_over_many_calibrations():
    model, generator = Identity(), torch.Generator().manual_seed(0)
    missed, rejected = torch.zeros(2, 300, CLASSES)
    labels = torch.arange(100 * CLASSES) % CLASSES
    fitted = 19 * CLASSES
    for index in range(len(missed)):
        logits = torch.randn(100 * CLASSES, CLASSES, generator=generator)
        logits += nn.functional.one_hot(labels) * (labels * 3)[:, None]  # the first class is harder than the others
        known = [(logits[:fitted], labels[:fitted])]
        decision = fit_rejection(model, known, 0.05, "max_softmax", by_class=True)(None, logits[fitted:])
        own = decision.class_p_values.gather(1, labels[fitted:, None])
        missed[index] = (own <= 0.05 + 1e-6).view(-1, CLASSES).float().mean(0)
        rejected[index] = (~decision.known).view(-1, CLASSES).float().mean(0)
    error = 3 * missed.std(0) / math.sqrt(len(missed))
    assert ((missed.mean(0) - 0.05).abs() < error).all()
    assert (rejected.mean(0) < 0.05 + error).all()


# Prediction sets


def test_a_set_by_class_has_the_classes_above_the_level_and_a_pooled_one_the_prediction(linear):
    (x, labels), (new, _) = draw(90), draw(300, seed=2)
    prediction = linear(new).argmax(1)
    rejection = fit_rejection(linear, [(x, labels)], 0.1, "max_softmax", by_class=True)
    decision = decide(rejection, linear, new)
    chosen = rejection.prediction_set(decision.known, decision.class_p_values, prediction, 0.9)
    assert torch.equal(chosen.any(1), decision.known)
    assert torch.equal(chosen, decision.class_p_values > 0.1 + 1e-6)
    smaller = rejection.prediction_set(decision.known, decision.class_p_values, prediction, 0.6)
    assert smaller.sum() < chosen.sum()
    assert not (smaller & ~chosen).any()
    rejection = fit_rejection(linear, [(x, labels)], 0.1, "norm")
    decision = decide(rejection, linear, new)
    chosen = rejection.prediction_set(decision.known, decision.class_p_values, prediction, 0.5)
    assert torch.equal(chosen.any(1), decision.known)
    assert chosen[decision.known].gather(1, prediction[decision.known, None]).all()


def test_equal_scores_count_as_at_most_and_a_p_value_that_equals_one_minus_the_coverage_is_not_above_it(linear):
    x = torch.ones(40, DIM)
    rejection = fit_rejection(linear, [x], 0.1, "max_logit")
    assert decide(rejection, linear, x).p_value.unique().tolist() == [1.0]
    logits = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.0])
    rejection = fit_rejection(Identity(), [(logits, torch.zeros(9).long())], 0.1, "max_softmax")
    decision = rejection(None, torch.tensor([[-1.0, 0.0]]))  # below all but the rejected one: p is 2 / 10
    assert decision.class_p_values[0, 0] == pytest.approx(0.2)
    chosen = rejection.prediction_set(torch.tensor([True]), decision.class_p_values, torch.tensor([1]), 0.8)
    assert chosen.tolist() == [[False, True]]


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_pooled_sets_have_the_class_in_the_stated_share_though_unknown_images_have_none(coverage):
    torch.manual_seed(0)
    covered = []
    for _ in range(150):
        labels = torch.randint(3, (160,))
        logits = torch.nn.functional.one_hot(labels, 3) * torch.rand(160, 1) * 4 + torch.randn(160, 3)
        rejection = fit_rejection(Identity(), [(logits[:99], labels[:99])], 0.1, "energy")
        known, _, class_p_values = rejection(None, logits[99:])
        sets = rejection.prediction_set(known, class_p_values, logits[99:].argmax(1), coverage)
        covered.append(sets[torch.arange(61), labels[99:]].double().mean().item())
    assert np.mean(covered) >= coverage - 2 * np.std(covered) / len(covered) ** 0.5


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 0}, r"level must be a number in \(0, 1\)"),
        ({"level": 1.0}, r"level must be a number in \(0, 1\)"),
        ({"level": 0.01, "score": "energy"}, "level 0.01 needs 99 images; there are 90"),
        ({"level": 0.02, "score": "knn"}, "needs 49 images, and as many to choose or fit the score, so 98"),
        ({"level": 0.02, "by_class": True, "score": "max_logit"}, "49 images of each class; class 0 has 30"),
        ({"score": "entropy"}, "score must be one of auto, .*; got 'entropy'"),
        ({"score": "energy", "by_class": True}, "energy is not one of each class"),
        ({"score": "concentration"}, "concentration needs concentrations, which the data do not have"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_options_are_an_error(options, message, linear):
    with pytest.raises(ValueError, match=message):
        fit_rejection(linear, [draw(90)], **options)


def test_bad_input_is_refused(linear):
    for options in ({}, {"score": "mahalanobis"}, {"score": "max_logit", "by_class": True}):
        with pytest.raises(ValueError, match="needs labels"):
            fit_rejection(linear, [draw(90)[0]], **options)
    rejection = fit_rejection(linear, [draw(90)], 0.1, "norm")
    for coverage in (0, 1, 90, math.nan):
        with pytest.raises(ValueError, match=r"coverage must be a number in \(0, 1\)"):
            rejection.check_coverage(coverage)
    with pytest.raises(ValueError, match=r"at most 0\.9, since up to 0.1 .* a level of 0.05"):
        rejection.check_coverage(0.95)
    with pytest.raises(ValueError, match="no p-values of classes"):
        fit_rejection(linear, [draw(90)[0]], 0.1, "norm").check_coverage(0.5)
    for score in ("knn", "norm"):
        with pytest.raises(ValueError, match=f"{score} needs embeddings"):
            fit_rejection(Identity(), [(torch.randn(90, CLASSES), draw(90)[1])], 0.1, score)
    with pytest.raises(ValueError, match=r"the score vim is not finite .* name another"):
        fit_rejection(linear, [(torch.zeros(90, DIM), draw(90)[1])], 0.1, "vim")
    for label in (CLASSES, -1):
        x, labels = draw(90)
        labels[7] = label
        with pytest.raises(ValueError, match="1 of 90 labels are none of the model's classes, 0 to 2"):
            fit_rejection(linear, [(x, labels)], 0.1)


@pytest.mark.parametrize("score", ["auto", "mahalanobis", "vmf"])
def test_twice_the_images_of_each_class_that_the_level_needs_are_enough(score, linear):
    for seed in range(5):
        rejection = fit_rejection(linear, [draw(54)], 0.1, score, by_class=True, seed=seed)
        assert rejection.class_calibration.isfinite().all()
    with pytest.raises(ValueError, match="18 of each class; class 2 has 8"):
        fit_rejection(linear, [draw(53)], 0.1, score, by_class=True)


def test_memory_does_not_grow_with_the_product_of_classes_and_images():
    logits = torch.randn(20000, 2, generator=torch.Generator().manual_seed(0))
    rejection = fit_rejection(Identity(), [(logits, torch.zeros(20000).long())], 0.05, "max_logit")
    with torch.profiler.profile(profile_memory=True) as profile:
        rejection(None, torch.zeros(1, 1000))
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 1e6


# The choice of the score


@pytest.mark.parametrize("has_unknown", [False, True])
def test_auto_is_deterministic_for_a_seed(has_unknown, linear):
    unknown = [3 * torch.randn(60, DIM, generator=torch.Generator().manual_seed(3))] if has_unknown else None
    first, same = (fit_rejection(linear, [draw(200)], 0.1, unknown=unknown, seed=4) for _ in range(2))
    assert first.settings == same.settings
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), same.buffers(), strict=True))
    assert first.settings["score"] == max(first.settings["ranking"], key=first.settings["ranking"].get)
    assert set(first.settings["ranking"]) <= set(SCORES) - {"concentration"}
    assert first.settings["ranked_by"] == ("unknown inputs" if has_unknown else "left-out classes")
    if has_unknown:
        shares = first.settings["unknown"]
        assert shares["num_images"] == 30
        assert shares["low"] <= shares["rejected"] <= shares["high"]
        known, others = (model_outputs(linear, batches) for batches in ([draw(200)], unknown))  # computed before
        assert fit_rejection(linear, known, 0.1, unknown=others, seed=4).settings == first.settings


# Files


@pytest.mark.parametrize("score", sorted(set(SCORES) - {"concentration"}))
def test_a_saved_rejection_decides_the_same(score, linear, tmp_path):
    rejection = fit_rejection(linear, [draw(120)], 0.1, score)
    rejection.save(tmp_path / "rejection.safetensors")
    loaded = Rejection.load(tmp_path / "rejection.safetensors")
    for a, b in zip(*(decide(each, linear, draw(50, 2)[0]) for each in (rejection, loaded)), strict=True):
        assert torch.equal(a, b)
    assert loaded.settings == rejection.settings


# It belongs to the model


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_gets_the_rejection_of_the_model(wrap, classifier):
    classifier.config.calibration = {"temperature": 0.3}
    expected = fit_rejection(copy.deepcopy(classifier), [images(100)], 0.1, "knn")
    wrapped = wrap(classifier)
    wrapped(images(3)[0])
    fit_rejection(wrapped, [images(100)], 0.1, "knn")
    assert torch.equal(classifier.rejection.calibration, expected.calibration)
    assert "rejection" not in classifier.find_outdated()


@pytest.mark.parametrize("by_class", [False, True])
def test_a_new_model_of_the_configuration_calls_all_images_unknown_until_it_loses_the_rejection(by_class, classifier):
    fit_rejection(classifier, [images(100)], 0.1, "max_logit", by_class=by_class)
    new = SphereVisionForImageClassification(classifier.config)
    assert not new.rejection(None, classifier(images(30)[0]).logits).known.any()
    assert new.to("meta").to_empty(device="cpu").rejection.class_calibration.device.type == "cpu"
    assert new.eval().rejection is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": 0.001}, "level 0.001 needs 999 images; there are 100"),
        ({"level": 2.0}, r"level must be a number in \(0, 1\); got 2.0"),
    ],
    ids=str,
)
def test_invalid_settings_are_an_error(settings, message, classifier, tmp_path):
    fit_rejection(classifier, [images(100)], 0.1, "max_logit")
    classifier.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rejection"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        SphereVisionForImageClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("score", ["max_softmax", "knn"])
def test_a_saved_model_and_copies_decide_the_same(score, classifier, tmp_path):
    fit_rejection(classifier, [images(100)], 0.1, score)
    classifier.save_pretrained(tmp_path)
    loaded, expected = SphereVisionForImageClassification.from_pretrained(tmp_path), classifier(images(30, 1)[0])
    for model in (loaded, copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier))):
        output = model(images(30, 1)[0])
        for name in ("known", "p_value", "class_p_values"):
            assert torch.equal(output[name], expected[name])
    assert loaded.train()(images(30, 1)[0]).known is None


@pytest.mark.parametrize("change", ["weights", "classes", "weights in the state", "weights after encoder was saved"])
def test_a_changed_model_is_saved_without_the_rejection_and_not_exported(change, classifier, tmp_path):
    fit_rejection(classifier, [images(100)], 0.1, "max_logit")
    state = None
    if "encoder" in change:
        classifier.base_model.save_pretrained(tmp_path / "encoder")
    if change == "classes":
        classifier.config.id2label = {0: "a", 1: "b", 2: "d"}
    elif "state" in change:
        state = {name: value if "rejection" in name else 2 * value for name, value in classifier.state_dict().items()}
    else:
        nn.init.normal_(next(classifier.parameters()))
    from hf_sphere.export import export_onnx

    if state is None:
        with pytest.raises(ValueError, match=f"the {change.split()[0]} of the model .* rejection was fitted"):
            export_onnx(classifier, tmp_path / "model.onnx")
    classifier.save_pretrained(tmp_path, state_dict=state)
    assert SphereVisionForImageClassification.from_pretrained(tmp_path).rejection is None


def test_an_encoder_or_a_model_with_another_classifier_has_no_rejection(classifier, tmp_path):
    fit_rejection(classifier, [images(100)], 0.1, "max_logit", by_class=True)
    classifier.save_pretrained(tmp_path / "classifier")
    SphereVisionModel.from_pretrained(tmp_path / "classifier").save_pretrained(tmp_path / "encoder")
    assert SphereVisionForImageClassification.from_pretrained(tmp_path / "encoder").rejection is None
    classifier.base_model.save_pretrained(tmp_path / "base")
    classifier.save_pretrained(tmp_path / "again")
    assert SphereVisionForImageClassification.from_pretrained(tmp_path / "again").rejection is not None
    for options in ({"num_labels": 5, "ignore_mismatched_sizes": True}, {"head": "cosine"}):
        model = SphereVisionForImageClassification.from_pretrained(tmp_path / "classifier", **options).eval()
        assert model(images(3)[0]).known is None
        assert model.config.rejection is None
    weights = load_file(tmp_path / "classifier" / "model.safetensors")
    del weights["rejection.class_calibration"]
    save_file(weights, tmp_path / "classifier" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no values of its rejection"):
        SphereVisionForImageClassification.from_pretrained(pretrained_model_name_or_path=tmp_path / "classifier")


@pytest.mark.parametrize("by_class", [False, True])
def test_the_rejection_is_that_of_the_uncalibrated_logits(by_class, classifier):
    plain = fit_rejection(copy.deepcopy(classifier), [images(100)], 0.1, "max_softmax", by_class=by_class)
    classifier.config.calibration = {"temperature": 0.3}
    rejection = fit_rejection(classifier, [images(100)], 0.1, "max_softmax", by_class=by_class)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), rejection.buffers(), strict=True))
    assert classifier.config.calibration == {"temperature": 0.3}
    before = classifier(images(30, 1)[0])
    classifier.config.calibration = {"temperature": [3.0, 1.0, 2.0], "shift": [1.0, 0.0, 0.0]}
    after = classifier(images(30, 1)[0])
    assert not torch.equal(before.logits, after.logits)
    assert all(torch.equal(before[name], after[name]) for name in ("known", "p_value", "class_p_values"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_keeps_its_rejection_in_float32(dtype, classifier, tmp_path):
    classifier.to(dtype)
    fit_rejection(classifier, [images(100)], 0.1, "max_logit")
    calibration = classifier.rejection.calibration
    classifier.save_pretrained(tmp_path)
    for options in ({"dtype": dtype}, {"dtype": torch.float32}):
        loaded = SphereVisionForImageClassification.from_pretrained(tmp_path, **options)
        assert torch.equal(loaded.rejection.calibration, calibration)
        loaded.save_pretrained(tmp_path / "again")  # the same weights in another dtype are no change
        assert loaded.rejection is not None
    x = images(30, 1)[0]
    assert torch.equal(SphereVisionForImageClassification.from_pretrained(tmp_path)(x).p_value, classifier(x).p_value)


@pytest.mark.parametrize("by_class", [False, True])
def test_a_compiled_model_decides_the_same(by_class, classifier):
    fit_rejection(classifier, [images(100)], 0.1, "max_softmax", by_class=by_class)
    x = images(30, 1)[0]
    with torch.no_grad():
        output, expected = torch.compile(classifier, backend="aot_eager")(x), classifier(x)
    for name in ("known", "p_value", "class_p_values"):
        torch.testing.assert_close(output[name], expected[name])


def test_a_trainer_predicts_logits_alone_and_training_removes_the_rejection_and_says_so(classifier, tmp_path, caplog):
    fit_rejection(classifier, [images(100)], 0.1, "max_logit")
    x, labels = images(6)
    rows = [{"pixel_values": pixels, "labels": label} for pixels, label in zip(x, labels, strict=True)]
    for trainer_class in (Trainer, SphereTrainer):
        trainer = trainer_class(classifier, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
        np.testing.assert_allclose(trainer.predict(rows).predictions, classifier(x).logits.detach(), atol=1e-6)
    classifier.train().eval()
    assert classifier.rejection is not None
    nn.init.normal_(next(classifier.train().parameters()))
    classifier.eval()
    assert classifier.rejection is None
    assert "weights of the model are not those that its rejection was fitted to, so it is removed" in caplog.text
