import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hf_sphere.comparison import compare_runs, power, pseudo_values
from hf_sphere.comparison.significance import difference_test, image_variance

TESTS = ["welch", "paired"]


def simulate(seeds: int = 4, images: int = 30, random: int = 0, noise: float = 1.0) -> list[np.ndarray]:
    """Outcomes (seeds, images) of two runs that differ in their effects of images, with a standard deviation of 1."""
    generator = np.random.default_rng(random)
    effects = [generator.normal(scale=scale, size=shape) for scale, shape in ((0.1, (seeds, 1)), (1.0, images))]
    first = generator.normal(scale=0.1, size=(seeds, 1)) + effects[1] + generator.normal(size=(seeds, images)) * noise
    return [first, effects[0] + generator.normal(size=(seeds, images)) * noise]


def named(table: np.ndarray) -> dict[int, dict[str, float]]:
    """Outcomes by seed and id; those that are NaN are not tested."""
    return {
        seed: {f"image {n}": float(value) for n, value in enumerate(row) if not math.isnan(value)}
        for seed, row in enumerate(table)
    }


def compare(ours: Any, theirs: Any, **options: Any):
    runs = {"reference": theirs, "run": ours}
    return compare_runs(runs, **{"reference": "reference", "higher_is_better": True, **options})["run"]


def interaction(table: np.ndarray) -> float:
    """Mean square of the interaction of seeds and images, by the textbook's formula."""
    seeds, images = table.shape
    total = 0.0
    for s in range(seeds):
        for i in range(images):
            total += (table[s, i] - table[s].mean() - table[:, i].mean() + table.mean()) ** 2
    return total / ((seeds - 1) * (images - 1))


def plain(ours: np.ndarray, theirs: np.ndarray, test: str) -> tuple[float, float]:
    """Variances by seeds and by images of a difference on one test set."""
    groups = [ours - theirs] if test == "paired" else [ours, theirs]
    seeds = sum(statistics.variance(group.mean(1).tolist()) / len(group) for group in groups)
    by_image = (ours.mean(0) - theirs.mean(0)).tolist()
    noise = sum(interaction(group) / len(group) for group in groups)
    return seeds, (statistics.variance(by_image) - noise) / ours.shape[1]


@pytest.mark.parametrize("test", TESTS)
def test_one_test_set_gives_the_variance_of_a_two_way_table(test):
    ours, theirs = simulate()
    turned = {seed: dict(reversed(row.items())) for seed, row in reversed(named(ours).items())}  # in any order
    found = compare(turned, named(theirs), test=test, minimum=0.5, margin=2.0)
    seeds, images = plain(ours, theirs, test)
    error = math.sqrt(seeds + images)
    groups = [ours - theirs] if test == "paired" else [ours, theirs]
    parts = [group.mean(1).var(ddof=1) / 4 for group in groups]
    freedom = error**4 / (sum(v**2 / 3 for v in parts) + images**2 / 29)
    difference = ours.mean() - theirs.mean()
    assert images > 0.01
    assert found.variation == "seeds and test images"
    assert found.difference == pytest.approx(difference)
    assert found.interval == pytest.approx(stats.t.interval(0.95, freedom, difference, error), rel=1e-9)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(difference) / error, freedom), rel=1e-9)
    assert found.p_equivalence == pytest.approx(stats.t.sf((2.0 - abs(difference)) / error, freedom), rel=1e-9)
    deviation = error * math.sqrt(4 if test == "paired" else 2)
    assert found.power == pytest.approx(power(0.5, deviation, 4, test=test), rel=1e-9)


def test_groups_may_have_different_numbers_of_seeds():
    ours, theirs = simulate(seeds=5)
    found, _ = image_variance([*named(ours).values()], [*named(theirs[:3]).values()], "welch")
    assert found == pytest.approx(plain(ours, theirs[:3], "welch")[1], rel=1e-9)


def test_the_whole_variance_is_that_of_the_difference_if_each_seed_has_a_split_of_its_own():
    """Of 40 images each seed tests 20; images come from a population, with noise per seed and effects of seeds."""
    generator, found, differences, expected = np.random.default_rng(0), [], [], []
    for _ in range(2_000):
        table = generator.normal(size=(4, 1)) * 0.1 + generator.normal(size=40) + generator.normal(size=(4, 40)) * 0.5
        tested = generator.random((4, 40)).argsort(1) < 20
        rows = [*named(np.where(tested, table, math.nan)).values()]
        values = [statistics.mean(row.values()) for row in rows]
        zeros = [dict.fromkeys(row, 0.0) for row in rows]
        found.append(statistics.variance(values) / 4 + image_variance(rows, zeros, "paired")[0])
        differences.append(statistics.mean(values))
        expected.append((tested.sum(0) ** 2).sum() / 80**2 + 0.25 / 80 + 0.01 / 4)
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.03)
    assert np.var(differences) == pytest.approx(np.mean(expected), rel=0.1)


def test_splits_of_their_own_give_the_pooled_products_of_different_seeds():
    ours, theirs = simulate(seeds=3, images=6)
    tested = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 1, 1]], dtype=bool)
    ours, theirs = (np.where(tested, table, math.nan) for table in (ours, theirs))
    difference, expected = ours - theirs, 0.0
    for s in range(3):
        for t in range(3):
            both = [i for i in range(6) if s != t and tested[s, i] and tested[t, i]]
            n, m = tested[s].sum(), tested[t].sum()
            products = [
                (difference[s, i] - np.nanmean(difference[s])) * (difference[t, i] - np.nanmean(difference[t]))
                for i in both
            ]
            expected += sum(products) / (1 - 1 / n - 1 / m + len(both) / (n * m)) / (n * m) / 6
    found = image_variance([*named(ours).values()], [*named(theirs).values()], "paired")
    assert found == (pytest.approx(max(0.0, expected), rel=1e-9), 4)


def test_test_sets_without_a_common_image_add_no_variance():
    table = np.random.default_rng(0).normal(size=(3, 30))
    rows = named(np.where(np.arange(30) // 10 == np.arange(3)[:, None], table, math.nan))
    zeros = {seed: dict.fromkeys(row, 0.0) for seed, row in rows.items()}
    found = compare(rows, zeros, test="paired")
    values = [statistics.mean(row.values()) for row in rows.values()]
    assert found.variation == "seeds"
    assert found.interval == difference_test(values, [0.0] * 3, "paired").interval


@pytest.mark.parametrize("test", TESTS)
def test_equal_predictions_of_all_seeds_leave_the_variance_of_images(test):
    ours, theirs = (np.tile(table[0], (3, 1)) for table in simulate())
    found = compare(named(ours), named(theirs), test=test, minimum=0.5)
    expected = stats.ttest_rel(ours[0], theirs[0])
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(expected.confidence_interval(0.95), rel=1e-9)
    assert 0 < found.power < 1


def test_correctness_gives_the_accuracies_of_the_seeds():
    predictions = {0: {1: True, 2: False, 3: np.True_, 4: 0}, 1: {1: 1, 2: 1.0, 3: True, 4: np.False_}}
    assert compare(predictions, predictions).values == {0: 0.5, 1: 0.75}


OURS, THEIRS = {0: 93.8, 1: 93.9, 2: 94.1}, {0: 93.1, 1: 93.5, 2: 93.2}


@pytest.mark.parametrize("test", TESTS)
def test_redrawn_splits_have_the_variance_of_nadeau_and_bengio(test):
    found = compare(OURS, THEIRS, test=test, test_fraction=0.2, minimum=0.5)
    result = difference_test([*OURS.values()], [*THEIRS.values()], test)
    error = result.error * math.sqrt(1 + 3 * 0.2 / 0.8)
    assert found.variation == "resampled splits"
    expected = stats.t.interval(0.95, result.freedom, result.difference, error)
    assert found.interval == pytest.approx(expected, rel=1e-9)
    deviation = result.error * math.sqrt(3 if test == "paired" else 1.5)
    assert found.power == pytest.approx(power(0.5, deviation * math.sqrt(1 + 3 * 0.2 / 0.8), 3, test=test))


@pytest.mark.parametrize(("fraction", "variation"), [(0.01, "seeds and test images"), (0.9, "resampled splits")])
def test_the_widest_interval_decides(fraction, variation):
    ours, theirs = map(named, simulate())
    crossed = compare(ours, theirs)
    means = [{seed: statistics.mean(row.values()) for seed, row in run.items()} for run in (ours, theirs)]
    resampled = compare(*means, test_fraction=fraction)
    found = compare(ours, theirs, test_fraction=fraction)
    widest = max(crossed, resampled, key=lambda run: run.interval[1] - run.interval[0])
    assert (found.variation, found.p_value) == (variation, pytest.approx(widest.p_value, rel=1e-12))


def test_the_table_names_the_variation_unless_it_is_that_of_seeds():
    ours, theirs = map(named, simulate())
    runs = {"reference": theirs, "run": ours, "one": {0: theirs[0]}}
    text = str(compare_runs(runs, reference="reference", higher_is_better=True, seeds=4))
    assert text.endswith("\n\nVariation of the intervals: run: seeds and test images; one: test images.")
    runs = {"a": OURS, "b": {seed: value + 0.1 for seed, value in OURS.items()}, "reference": THEIRS}
    assert "Variation" not in str(compare_runs(runs, reference="reference", higher_is_better=True))
    text = str(compare_runs(runs, reference="reference", higher_is_better=True, test_fraction=0.2))
    assert text.endswith("\n\nVariation of the intervals: resampled splits.")


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_one_seed_with_outcomes_is_a_paired_test_over_images(test, seeds):
    rng = np.random.default_rng(0)
    ours, theirs = rng.random((len(seeds), 500)) < 0.92, rng.random(500) < 0.66
    runs = {"a": {0: dict(enumerate(theirs))}, "b": {seed: dict(enumerate(ours[seed])) for seed in seeds}}
    comparison = compare_runs(runs, reference="a", higher_is_better=True, perfect=1, test=test)
    found, used = comparison["b"], ours[:1] if test == "paired" else ours
    expected = stats.ttest_rel(used.mean(0), theirs)
    assert (found.verdict, found.variation) == ("better", "test images")
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    deviation = (used.mean(0) - theirs).std(ddof=1)
    assert found.power == pytest.approx(power(comparison.minimum, deviation, 500, test="paired"))
    assert "p (paired, Holm)" in str(comparison)


def test_one_seed_of_other_images_is_not_tested():
    found = compare({1: {"x": 1, "z": 0}}, {0: {"x": 1, "y": 0}})
    assert (found.verdict, found.interval) == ("not tested: one seed", None)


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    ours, others = scores[positive].unsqueeze(1), scores[~positive]
    return ((ours > others).double() + (ours == others).double() / 2).mean().item()


def test_pseudo_values_of_a_mean_are_the_values_and_images_of_a_block_are_left_out_together():
    values = torch.tensor([1.0, 4.0, 2.0, 9.0, 3.0, 5.0], dtype=torch.float64)
    found = pseudo_values(lambda rows: values[rows].mean().item(), [*"abcdef"])
    assert [*found] == [*"abcdef"]
    assert [*found.values()] == pytest.approx(values.tolist(), rel=1e-12)
    found = pseudo_values(lambda rows: values[rows].median().item(), [0, 1, 2, 0, 1, 2])
    without = [values[[1, 2, 4, 5]].median(), values[[0, 2, 3, 5]].median(), values[[0, 1, 3, 4]].median()]
    expected = [3.0 + 2 * (sum(without) / 3 - each) for each in without]
    assert [*found.values()] == pytest.approx([float(each) for each in expected])


def test_pseudo_values_of_auroc_have_the_variance_of_delong():
    """They agree but for factors of n / (n - 1) of each kind: within 3 % for 40 images of the smaller kind."""
    scores = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positive = torch.arange(100) < 40
    scores[positive] += 0.8
    found = pseudo_values(lambda rows: auroc(scores[rows], positive[rows]), range(100))
    wins = (scores[positive].unsqueeze(1) > scores[~positive]).double()
    parts = [(wins.mean(dim).var().item(), count) for dim, count in ((1, 40), (0, 60))]
    variance = statistics.variance(found.values()) / 100
    assert statistics.mean(found.values()) == pytest.approx(auroc(scores, positive), rel=1e-12)
    assert variance == pytest.approx(sum(v / n for v, n in parts), rel=0.03)
    assert variance == pytest.approx(sum(v / (n - 1) for v, n in parts) * 99 / 100, rel=1e-9)
