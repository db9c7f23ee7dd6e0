import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from scipy.optimize import minimize, minimize_scalar
from sklearn.metrics import brier_score_loss, log_loss
from torch.optim.swa_utils import AveragedModel

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, models
from hf_sphere.export import export_onnx
from hf_sphere.metrics import calibration_errors, probability_scores
from hf_sphere.nn import fit_calibration
from hf_sphere.nn.calibration import calibrate, fit_and_validate
from hf_sphere.nn.rejection import Rejection

TEMPERATURE = {"temperature": 4.0}
VECTOR = {"temperature": [0.5, 2.0, 4.0], "shift": [1.0, -1.0, 0.0]}


def draw(count, factor, seed=0):
    """Draw labels of five classes, and logits that are `factor` times those of their distribution."""
    generator = torch.Generator().manual_seed(seed)
    true = 2 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return factor * true, true.softmax(1).multinomial(1, generator=generator)[:, 0]


@pytest.fixture
def overconfident() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are three times as large as those that the labels are drawn from, and shifted."""
    logits, labels = draw(4000, 3.0)
    return logits + torch.tensor([3.0, 0.0, 0.0, 0.0, -3.0]), labels


def nll(logits, labels) -> float:
    """The objective, with an additional example whose label is uniform, spread over the others."""
    share = 1 / (len(labels) + 1)
    logs = logits.log_softmax(1)
    own = logs.gather(1, labels[:, None])[:, 0]
    return float(-((1 - share) * own + share * logs.mean(1)).mean())


def test_the_temperature_minimizes_the_likelihood(overconfident):
    logits, labels = overconfident
    found = fit_calibration(logits, labels)["temperature"]
    options = {"bounds": (0.1, 20.0), "method": "bounded", "options": {"xatol": 1e-10}}
    assert found == pytest.approx(minimize_scalar(lambda t: nll(logits / t, labels), **options).x, rel=1e-5)
    assert 2.5 < found < 4.0


def test_vector_scaling_recovers_factors_and_shifts(overconfident):
    logits, labels = overconfident
    found = fit_calibration(logits, labels, "vector")
    assert found["temperature"] == pytest.approx([3.0] * 5, rel=0.15)
    assert found["shift"] == pytest.approx([-1.0, 0.0, 0.0, 0.0, 1.0], abs=0.25)
    assert sum(found["shift"]) == pytest.approx(0.0, abs=1e-12)

    def objective(values):
        return nll(logits / torch.tensor(values[:5]) + torch.tensor(values[5:]), labels)

    best = minimize(objective, np.r_[found["temperature"], found["shift"]], method="Powell", options={"maxiter": 3})
    assert objective(np.r_[found["temperature"], found["shift"]]) <= best.fun + 1e-9


def test_scores_are_those_of_scikit_learn(overconfident):
    logits, labels = overconfident
    probabilities = logits.softmax(1)
    scores = probability_scores(logits.float(), labels)
    assert scores["nll"] == pytest.approx(log_loss(labels, probabilities), rel=1e-5)
    expected = brier_score_loss(labels, probabilities, scale_by_half=False)
    assert scores["brier"] == pytest.approx(expected, rel=1e-5)
    confidences, predictions = probabilities.max(1)
    for name, value in calibration_errors(confidences, predictions == labels).items():
        assert scores[name] == pytest.approx(value, rel=1e-3)
    with pytest.raises(ValueError, match="labels must be from 0 to 1; got 0 to 2"):
        probability_scores(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="logits must be finite"):
        probability_scores(torch.full((3, 2), np.nan), torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_separable_examples_have_a_finite_calibration(kind):
    labels = torch.arange(300) % 3
    with pytest.warns(UserWarning, match="is not shown to help"):
        calibration = fit_calibration(5.0 * F.one_hot(labels), labels, kind)
    confidence = calibrate(5.0 * F.one_hot(labels), **calibration).softmax(1).amax()
    assert 0.99 < confidence < 1 - 1e-5
    calibration = fit_calibration(torch.tensor([[9.0, 0.0]] * 200), torch.arange(200) % 2)  # without information
    assert calibration["temperature"] == pytest.approx(1000.0)
    with pytest.warns(UserWarning, match="it changes the loss by 0 ± inf"):
        fit_calibration(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))


# In models


def build(**options: object) -> SphereVisionForImageClassification:
    torch.manual_seed(0)
    sizes = {"num_channels": 1, "image_size": 8, "embedding_dim": 6, "num_labels": 3}
    config = SphereVisionConfig(backbone="linear_embedding", head="cosine", **sizes, **options)
    return SphereVisionForImageClassification(config)


def calibrated_model(calibration: object = TEMPERATURE) -> SphereVisionForImageClassification:
    model = build()
    model.set_calibration(calibration)
    return model


@pytest.mark.parametrize("calibration", [{"temperature": 2.5}, VECTOR])
def test_a_loaded_model_returns_calibrated_logits_in_eval_mode_only(calibration, tmp_path):
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    plain = build().eval()(images, labels)
    model = calibrated_model(calibration)
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.calibration == model.config.calibration
    output = loaded.eval()(images, labels)
    assert torch.allclose(output.logits, calibrate(plain.logits, **calibration), atol=1e-6)
    assert output.loss == plain.loss
    assert torch.equal(loaded.train()(images, labels).logits, build().train()(images, labels).logits)


@pytest.mark.parametrize("calibration", [{"temperature": 2.5}, VECTOR])
@pytest.mark.parametrize("other", [{"num_labels": 5}, {"id2label": {0: "cat", 1: "dog"}}, {"head": "softmax"}])
def test_another_classifier_does_not_get_the_calibration_of_the_saved_one(calibration, other, tmp_path):
    calibrated_model(calibration).save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **other)
    assert loaded.config.calibration is None
    logits = loaded.eval()(images := torch.randn(4, 1, 8, 8)).logits
    torch.testing.assert_close(logits, loaded.head(loaded.sphere_vision(images).embeddings).logits)
    same = SphereVisionForImageClassification.from_pretrained(tmp_path, num_labels=3, head="cosine")
    assert same.config.calibration["temperature"] == calibration["temperature"]


def train(model: SphereVisionForImageClassification, part: str = "model") -> None:
    """Take a step on the loss of the model, on a loss of its own logits, or on its encoder alone."""
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if part == "encoder":
        model.sphere_vision(images).embeddings.square().sum().backward()
    elif part == "logits":
        F.cross_entropy(model(images).logits, labels).backward()
    else:
        model(images, labels).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("part", ["model", "logits", "encoder"])
def test_training_removes_the_calibration_in_eval_mode_or_when_it_is_saved_and_says_so(part, tmp_path, caplog):
    model = calibrated_model().train()
    average = AveragedModel(model)
    train(torch.compile(model, backend="eager", fullgraph=True) if part == "model" else model, part)
    average.update_parameters(model)
    assert average.eval().module.config.calibration is None
    assert model.eval().config.calibration is None
    message = "weights of the model are not those that its calibration was fitted to, so it is removed"
    assert caplog.text.count(message) == 2
    model = calibrated_model().eval()
    train(model, part)
    with pytest.raises(ValueError, match=r"not those that its calibration was fitted to; fit it again"):
        export_onnx(model, tmp_path / "model.onnx")
    model.save_pretrained(tmp_path)
    assert SphereVisionConfig.from_pretrained(tmp_path).calibration is None
    assert caplog.text.count(message) == 3


def test_use_without_training_keeps_the_calibration(tmp_path):
    model = calibrated_model()
    with torch.no_grad():
        model.train()(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))
    model.eval()(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.eval().config.calibration["temperature"] == 4.0
    with pytest.raises(ValueError, match="the model's logits are calibrated already"):
        model.set_calibration({"temperature": 1.02})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
@pytest.mark.parametrize("fitted", ["calibration", "rejection"])
def test_what_is_fitted_to_a_model_with_an_adapter_is_reported_not_to_be_saved_with_it(fitted, caplog):
    model = build().eval()
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    rejection = Rejection({"score": "max_logit", "level": 0.05, "by_class": False, "shapes": {"calibration": [40]}})
    value, message = TEMPERATURE if fitted == "calibration" else rejection, f"without the {fitted} of its model"
    getattr(adapted, f"set_{fitted}")(value)
    assert caplog.text.count(message) == 1
    getattr(adapted, f"set_{fitted}")(None)
    getattr(adapted.merge_and_unload(), f"set_{fitted}")(value)
    assert caplog.text.count(message) == 1


@pytest.mark.parametrize("kind", [SphereVisionForImageClassification, models.SphereVisionForJointPrediction, "vit"])
def test_models_of_one_configuration_have_calibrations_of_their_own(kind):
    options = {"num_channels": 1, "image_size": 8, "num_labels": 3, "head": "cosine"}
    if kind == "vit":
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
        kind, config = models.SphereViTForImageClassification, models.SphereViTConfig(**options, **sizes)
    else:
        options |= {"backbone": "linear_embedding", "embedding_dim": 4, "value_range": [0.0, 1.0]}
        config = SphereVisionConfig(**options)
    first, second = kind(config), kind(config).eval()
    first.set_calibration(TEMPERATURE)
    assert getattr(second.config, "calibration", None) is None
    kind(first.config).eval()
    assert first.eval().config.calibration["temperature"] == TEMPERATURE["temperature"]


@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_calibrated_logits_are_refused_probabilities_reported_and_half_dtypes_accepted(overconfident, kind):
    logits, labels = overconfident
    calibrated = calibrate(logits.float(), **fit_calibration(logits.float(), labels, kind))
    with pytest.raises(ValueError, match="the logits are calibrated already"):
        fit_calibration(calibrated, labels, kind)
    with pytest.warns(UserWarning, match="as probabilities do; pass their logarithms"):
        fit_calibration(logits.softmax(1), labels)
    with torch.inference_mode():
        found = fit_calibration(torch.randn(210, 3).half(), torch.arange(210) % 3, kind)
    assert list(found) == (["temperature"] if kind == "temperature" else ["temperature", "shift"])


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_only_models_of_one_class_per_image_have_a_calibration(kind, tmp_path):
    calibrated_model().save_pretrained(tmp_path)
    assert SphereVisionForImageClassification.from_pretrained(tmp_path, problem_type=kind).config.calibration is None


# What it rests on


def test_41_correct_examples_whose_calibration_makes_others_worse_are_reported():
    sure = torch.tensor([4.0, 0.0, 0.0]).expand(41, 3)  # 96 % sure of class 0
    labels, others = torch.zeros(41, dtype=torch.long), (torch.arange(1000) % 100 < 4).long()
    with pytest.warns(UserWarning, match=r"not shown to help 41 examples: it changes the loss by .* ±"):
        fitted = fit_calibration(sure, labels)
    calibrated = calibrate(sure, **fitted)
    assert F.cross_entropy(calibrated, labels) < F.cross_entropy(sure, labels)
    assert F.cross_entropy(calibrated[:1].expand(1000, 3), others) > F.cross_entropy(sure[:1].expand(1000, 3), others)


@pytest.mark.parametrize("kind", ["temperature", "vector"])
@pytest.mark.parametrize("count", [41, 400])
def test_calibrated_logits_are_not_calibrated_again_in_more_than_5_percent_of_cases(kind, count):
    changes = [fit_and_validate(*draw(count, 1.0, seed=seed), kind)[1:] for seed in range(40)]
    assert sum(mean + margin < 0 for mean, margin in changes) <= 2


@pytest.mark.parametrize("kind", ["temperature", "vector"])
@pytest.mark.parametrize("factor", [1.5, 0.6], ids=["overconfident", "underconfident"])
def test_2000_wrong_confidences_are_calibrated(kind, factor, recwarn):
    logits, labels = draw(2000, factor)
    _, mean, margin = fit_and_validate(logits, labels, kind)
    others, true = draw(20_000, factor, seed=1)
    calibrated = calibrate(others, **fit_calibration(logits, labels, kind))
    gain = float(F.cross_entropy(calibrated, true) - F.cross_entropy(others, true))
    assert mean + margin < 0
    assert abs(mean - gain) < margin
    assert not recwarn.list
