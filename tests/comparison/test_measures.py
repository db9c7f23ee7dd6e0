import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
import torch
from case_selection import some_rows
from sklearn.metrics import roc_auc_score

from hf_sphere.comparison.measures import BLOCKS, EPISODES, MEASURES, SHOT, Evaluated, mean_or_none, measure
from hf_sphere.comparison.plan import METRICS, UNSEEN
from hf_sphere.metrics import retrieval_scores
from hf_sphere.ood import Outputs


def outputs(count: int, classes: int, first: int = 0, seed: int = 0) -> Outputs:
    """Noisy embeddings and logits of balanced classes from `first` on, with ids that are not their rows."""
    generator = torch.Generator().manual_seed(seed)
    labels = first + torch.arange(count) % classes
    embeddings = torch.eye(16)[labels] + 0.35 * torch.randn(count, 16, generator=generator)
    return Outputs(embeddings, 4 * embeddings[:, :6], labels, ids=1000 * (1 + seed) + torch.arange(count))


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return Evaluated(outputs(60, 6), outputs(48, 4, first=6, seed=1), {"distance": "cosine"})


def softmax(logits: torch.Tensor) -> np.ndarray:
    exponentials = np.exp(logits.double().numpy())
    return exponentials / exponentials.sum(1, keepdims=True)


def accuracy(data: Evaluated) -> float:
    return 100 * float((data.known.logits.numpy().argmax(1) == data.known.labels.numpy()).mean())


def calibration_error(data: Evaluated) -> float:
    """15 bins of equal width."""
    probabilities, labels, bins = softmax(data.known.logits), data.known.labels.tolist(), defaultdict(list)
    for row, label in zip(probabilities, labels, strict=True):
        bins[math.ceil(row.max() * 15)].append(row.max() - (row.argmax() == label))
    return 100 * sum(abs(math.fsum(gaps)) for gaps in bins.values()) / len(labels)


def retrieval(part: Outputs, score: str) -> float:
    return 100 * retrieval_scores(part.embeddings, part.labels, distance="cosine")[score]


def auroc(data: Evaluated) -> float:
    confidences = np.concatenate([softmax(part.logits).max(1) for part in (data.known, data.unseen)])
    return 100 * roc_auc_score(np.arange(len(confidences)) < len(data.known.labels), confidences)


EXPECTED = {
    "accuracy": accuracy,
    "calibration_error": calibration_error,
    "recall_at_1": lambda data: retrieval(data.known, "recall_at_1"),
    "map_at_r": lambda data: retrieval(data.known, "map_at_r"),
    "unseen_recall_at_1": lambda data: retrieval(data.unseen, "recall_at_1"),
    "unseen_map_at_r": lambda data: retrieval(data.unseen, "map_at_r"),
    "unseen_auroc": auroc,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_measure_has_the_value_of_its_definition(evaluated, name):
    assert 1 < EXPECTED[name](evaluated) < 99.9
    assert mean_or_none(name, evaluated) == pytest.approx(EXPECTED[name](evaluated), abs=1e-5)


@pytest.mark.parametrize("name", MEASURES)
def test_the_mean_of_the_outcomes_is_the_measure(evaluated, name):
    outcomes = measure(name, evaluated, per_image=True)
    assert statistics.fmean(outcomes.values()) == pytest.approx(mean_or_none(name, evaluated), abs=1e-9)
    assert len({*outcomes.values()}) > 1
    known, unseen = ({*part.ids.tolist()} for part in (evaluated.known, evaluated.unseen))
    ids = known | unseen if "auroc" in name else unseen if name.startswith(UNSEEN) else known
    is_mean = name in ("accuracy", f"{UNSEEN}few_shot_accuracy")
    assert outcomes.keys() == (ids if is_mean else {image % BLOCKS for image in ids})


@some_rows("name")
@pytest.mark.parametrize(("name", "largest"), [("recall_at_1", 3.0), ("map_at_r", 1.3)])
def test_the_outcomes_of_retrieval_vary_at_least_as_test_sets_do(name, largest):
    """The variance of the mean over queries is 0.8 and 0.3 of the true one, since images are also the gallery."""
    generator, count = torch.Generator().manual_seed(0), 60
    means, variances = [], []
    for _ in range(40):
        labels = torch.arange(count) % 4
        centers = torch.eye(4, 8)[labels]
        embeddings = centers + 0.5 * torch.randn(count, 8, generator=generator)
        outcomes = measure(name, Evaluated(Outputs(embeddings, labels=labels, ids=torch.arange(count))), per_image=True)
        means.append(statistics.fmean(outcomes.values()))
        variances.append(statistics.variance(outcomes.values()) / len(outcomes))
    assert 0.8 < statistics.fmean(variances) / statistics.variance(means) < largest


def test_few_shot_accuracy_is_that_of_nearest_class_means(evaluated):
    """With other random episodes, within three standard errors of fewer ones."""
    generator, part = np.random.default_rng(5), evaluated.unseen
    vectors, labels, correct = part.embeddings.double().numpy(), part.labels.numpy(), []
    for _ in range(10 * EPISODES):
        orders = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        means = np.stack([vectors[order[:SHOT]].mean(0) for order in orders])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        for label, order in enumerate(orders):
            correct += [*((vectors[order[SHOT:]] @ means.T).argmax(1) == label)]
    assert mean_or_none("unseen_few_shot_accuracy", evaluated) == pytest.approx(100 * np.mean(correct), abs=1.0)


@pytest.mark.parametrize(
    ("name", "count", "classes", "message"),
    [
        ("unseen_few_shot_accuracy", 8, 4, "2 of them with at least 6; got 4 and 0"),
        ("unseen_few_shot_accuracy", 11, 2, "2 of them with at least 6; got 2 and 1"),
        ("unseen_map_at_r", 4, 4, "1 of them with at least 2; got 4 and 0"),
        ("unseen_recall_at_1", 4, 1, "images of 2 classes, .*; got 1 and 1"),
    ],
)
def test_a_measure_that_is_not_defined_has_no_value(evaluated, name, count, classes, message):
    few = Evaluated(evaluated.known, outputs(count, classes, first=6), evaluated.metric)
    with pytest.raises(ValueError, match=f"{name} needs .*{message}"):
        measure(name, few)
    assert mean_or_none(name, few) is None


def test_the_command_names_all_measures_and_only_the_calibration_error_is_better_when_lower():
    assert (*MEASURES,) == METRICS
    assert [name for name, each in MEASURES.items() if not each.higher_is_better] == ["calibration_error"]
