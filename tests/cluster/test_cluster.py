import math
import pickle
import sys
import warnings
from copy import deepcopy

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from case_selection import some_rows
from fresh_python import run_fresh
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from hf_sphere.cluster import SphericalKMeans, VonMisesFisherMixture, spherical_k_means
from hf_sphere.cluster.mixture import expect, maximize, shrink
from hf_sphere.cluster.rows import DirectionRows, all_sums_by_label
from hf_sphere.cluster.spherical_k_means import NearestCenters, assign
from hf_sphere.distributions import HypersphericalUniform, VonMisesFisher
from hf_sphere.geometry import project_to_sphere

ESTIMATORS = [lambda: SphericalKMeans(3, random_state=0), lambda: VonMisesFisherMixture(3, random_state=0)]


def blobs(kappa: float = 50.0, dim: int = 8, count: int = 3, each: int = 100) -> tuple[np.ndarray, np.ndarray]:
    means = project_to_sphere(torch.randn(count, dim, dtype=torch.float64))
    labels = torch.arange(count).repeat(each)
    points = VonMisesFisher(means, torch.full((count,), kappa).double()).sample((each,)).flatten(0, 1)
    return points.numpy(), labels.numpy()


def small_groups(noise: float, groups: int = 60, rows: int = 5, dim: int = 64) -> np.ndarray:
    random = np.random.default_rng(0)
    means = random.normal(size=(groups, dim))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    return means.repeat(rows, 0) + noise * random.normal(size=(groups * rows, dim))


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        case
        for estimator in (SphericalKMeans(), SphericalKMeans("auto"), VonMisesFisherMixture())
        for case in estimator_checks_generator(estimator)
        # As in scikit-learn's KMeans, k-means++ chooses other initial centers if rows are repeated.
        if isinstance(estimator, VonMisesFisherMixture) or "sample_weight_equivalence" not in case[1].func.__name__
    ],
    ids=lambda value: getattr(value, "func", value).__name__ if callable(getattr(value, "func", None)) else None,
)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.mark.parametrize("make", ESTIMATORS)
class TestInput:
    def test_clusters_are_found_whatever_the_norms(self, make):
        points, labels = blobs()
        scales = np.random.default_rng(0).uniform(1e-3, 1e3, (len(points), 1))
        assert adjusted_rand_score(labels, make().fit_predict(points)) == 1
        np.testing.assert_array_equal(make().fit_predict(points), make().fit_predict(scales * points))

    def test_tensors_in_give_tensors_out(self, make):
        points = torch.from_numpy(blobs()[0]).float()
        estimator = make().fit(points)
        assert isinstance(estimator.labels_, torch.Tensor)
        assert torch.equal(estimator.predict(points), estimator.labels_)
        np.testing.assert_array_equal(estimator.predict(points.numpy()), estimator.labels_)
        np.testing.assert_array_equal(make().fit(points.numpy()).labels_, estimator.labels_)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, np.float16, np.int64])
    def test_half_and_integer_rows_are_accepted(self, make, dtype):
        points = 100 * blobs()[0]
        rows = torch.from_numpy(points).to(dtype) if isinstance(dtype, torch.dtype) else points.astype(dtype)
        assert adjusted_rand_score(make().fit(points).labels_, make().fit(rows).labels_) == 1

    def test_zero_rows_warn_and_get_the_lowest_label(self, make):
        points, _ = blobs()
        points[[3, 7]] = 0
        with pytest.warns(UserWarning, match="2 of 300 rows of X are zero"):
            estimator = make().fit(points)
        assert (estimator.labels_[[3, 7]] == 0).all()
        loaded = pickle.loads(pickle.dumps(make().fit(points, y=None)))  # as BERTopic calls it
        np.testing.assert_array_equal(loaded.predict(points), estimator.labels_)
        with pytest.warns(UserWarning, match="1 of 1 rows"):
            assert estimator.predict(points[[3]]) == 0

    @pytest.mark.parametrize("rows", [np.zeros((5, 4)), np.ones((10, 4))])
    def test_rows_of_zeros_or_duplicates_only_do_not_fail(self, make, rows):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(set(make().fit(rows).labels_)) == 1

    def test_rows_must_be_as_many_as_clusters_and_the_estimator_fitted(self, make):
        with pytest.raises(ValueError, match="n_samples=2 must be at least"):
            make().fit(np.eye(2))
        with pytest.raises(NotFittedError):
            make().predict(np.eye(3))
        assert type(make())(1).fit(np.ones((1, 4))).labels_.tolist() == [0]


class TestSphericalKMeans:
    def test_sparse_rows_give_the_clusters_of_dense_ones(self):
        points = load_digits().data
        dense = SphericalKMeans(10, random_state=0).fit(points)
        for kind in (sp.csr_matrix, sp.csr_array, sp.coo_array):
            sparse = SphericalKMeans(10, random_state=0).fit(kind(points))
            np.testing.assert_array_equal(sparse.labels_, dense.labels_)
            np.testing.assert_allclose(sparse.cluster_centers_, dense.cluster_centers_)
            np.testing.assert_array_equal(sparse.predict(kind(points)), dense.labels_)

    def test_duplicate_entries_of_sparse_rows_are_added(self):
        matrix = sp.csr_matrix(([1, 1, 1, 2, 0.5, 2], [0, 0, 1, 0, 1, 1], [0, 3, 4, 6]), shape=(3, 2))
        k_means = SphericalKMeans(1).fit(matrix)
        units = project_to_sphere(torch.tensor([[2.0, 1.0], [2.0, 0.0], [0.0, 2.5]]).double())
        expected = 2 * (3 - torch.linalg.vector_norm(units.sum(0)).item())
        assert k_means.inertia_ == pytest.approx(expected, rel=1e-12)
        assert k_means.score(matrix) == pytest.approx(-expected, rel=1e-12)
        assert matrix.data.tolist() == [1, 1, 1, 2, 0.5, 2]

    @pytest.mark.parametrize("convert", [np.asarray, torch.tensor, sp.csr_matrix, sp.csc_array, sp.coo_matrix])
    @pytest.mark.parametrize("factor", [1e-310, 1e-170, 1e200, 1e308])
    def test_rows_of_any_norm_have_directions(self, convert, factor):
        rows = np.where(np.random.default_rng(0).random((30, 6)) < 0.5, 1.0, 0.25)
        rows[15:, 3] = 0
        matrix = rows.copy()
        matrix[::2] *= factor  # others have the usual norms
        matrix = convert(matrix)
        before = deepcopy(matrix)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            k_means = SphericalKMeans(2, random_state=0).fit(matrix)
            score = k_means.score(matrix)
        assert k_means.inertia_ == pytest.approx(SphericalKMeans(2, random_state=0).fit(rows).inertia_, rel=1e-9)
        assert score == pytest.approx(-k_means.inertia_, rel=1e-12)
        assert abs(matrix - before).max() == 0

    def test_the_result_is_a_fixed_point(self):
        points = load_digits().data
        k_means = SphericalKMeans(10, tol=0.0, random_state=0).fit(points)
        units = points / np.linalg.norm(points, axis=1, keepdims=True)
        cosines = units @ k_means.cluster_centers_.T
        np.testing.assert_array_equal(cosines.argmax(1), k_means.labels_)
        assert k_means.inertia_ == pytest.approx(2 * (1 - cosines.max(1)).sum())
        for label, center in enumerate(k_means.cluster_centers_):
            mean = units[k_means.labels_ == label].mean(0)
            np.testing.assert_allclose(center, mean / np.linalg.norm(mean), atol=1e-12)

    def test_more_starts_are_not_worse(self):
        points = load_digits().data
        one, three = (SphericalKMeans(10, n_init=n, random_state=0).fit(points).inertia_ for n in (1, 3))
        assert three <= one

    def test_empty_clusters_are_mended(self):
        points, labels = blobs(kappa=500.0)
        first = points[labels == 0].mean(0)
        assert {*SphericalKMeans(3, init=np.stack([first, -first, -first])).fit(points).labels_} == {0, 1, 2}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            *(({name: value}, name) for name, value in (("n_clusters", 0), ("init", "x"), ("tol", -1.0))),
            ({"n_clusters": 3, "init": np.ones((2, 8))}, "init must have the shape"),
            ({"n_clusters": 3, "init": np.full((3, 8), np.nan)}, "init must be finite; 3 of 3"),
            ({"n_clusters": "auto", "init": np.ones((3, 8))}, "without 'auto'"),
            ({"n_clusters": "many"}, "n_clusters"),
        ],
    )
    def test_invalid_options_are_an_error(self, options, message):
        with pytest.raises(ValueError, match=message):
            SphericalKMeans(**options).fit(blobs()[0])


class TestUnknownNumber:
    @pytest.mark.parametrize("convert", [np.asarray, np.float32, sp.csr_matrix, torch.from_numpy])
    @pytest.mark.parametrize(("dim", "each"), [(2, 20), (16, 5), (16, 300), (384, 20)])
    def test_separated_clusters_are_counted(self, dim, each, convert):
        angles = torch.arange(7).double() * 2 * math.pi / 7
        means = torch.stack([angles.cos(), angles.sin()], 1) if dim == 2 else torch.randn(7, dim).double()
        labels = torch.arange(7).repeat(each)
        means = project_to_sphere(means)[labels]
        points = VonMisesFisher(means, torch.full((len(labels),), 400.0).double()).sample().numpy()
        found = SphericalKMeans("auto", random_state=0).fit(convert(points))
        assert found.cluster_centers_.shape == (7, dim)
        assert adjusted_rand_score(labels, found.labels_) > 0.99
        assert (found.predict(convert(points)) == found.labels_).all()

    @some_rows("count")
    @pytest.mark.parametrize(("count", "each", "noise"), [(60, 5, 0.0125), (60, 5, 0.05), (60, 3, 0.05), (120, 9, 0.1)])
    def test_many_small_groups_are_counted(self, count, each, noise):
        found = SphericalKMeans("auto", random_state=0).fit_predict(small_groups(noise, count, each))
        assert adjusted_rand_score(np.arange(count).repeat(each), found) == 1

    @pytest.mark.parametrize(
        ("estimator", "points", "message"),
        [
            (SphericalKMeans(3), np.repeat(np.eye(2), 5, axis=0), "only 2 of 3"),
            (VonMisesFisherMixture(5, max_iter=1, random_state=0), load_digits().data, "still increased"),
            (
                SphericalKMeans("auto", random_state=0),
                np.eye(20).repeat(2, axis=0) + 0.01 * np.random.default_rng(0).normal(size=(40, 20)),
                "found 20 clusters, near its bound of 20; there may be more",
            ),
            # Groups of too few rows for the criterion.
            (SphericalKMeans("auto", random_state=0), small_groups(0.1), "found 1 clusters, but 60 are more compact"),
            (SphericalKMeans("auto", random_state=0), small_groups(0.12), "found 1 clusters, but 60 are more compact"),
            (SphericalKMeans("auto", random_state=0), small_groups(0.1, 100, 3), "but 100 are more compact"),
        ],
    )
    def test_results_in_doubt_are_reported(self, estimator, points, message):
        with pytest.warns(UserWarning, match=message):
            clone(estimator).fit(points)

    def test_groups_that_are_not_one_distribution_are_counted(self):
        points, labels = blobs(kappa=200.0, dim=16, count=20, each=50)
        points += 6 * np.eye(16)[labels // 2]  # ten groups of two clusters each
        found = SphericalKMeans("auto", random_state=0).fit_predict(points)
        assert adjusted_rand_score(labels // 2, found) == 1

    @pytest.mark.parametrize(
        "points",
        [
            HypersphericalUniform(8).sample((1000,)),
            VonMisesFisher(torch.eye(1, 64)[0].double(), torch.tensor(300.0).double()).sample((1000,)),
            torch.ones(10, 4),
            torch.linspace(0.1, 9, 1000)[:, None] * torch.ones(40),
            torch.ones(1, 4),
            torch.ones(50, 1),
            torch.eye(10),
        ],
        ids=["uniform", "one cluster", "equal", "equal but for the norm", "one row", "one column", "orthogonal"],
    )
    def test_rows_without_groups_are_one_cluster(self, points):
        assert len(SphericalKMeans("auto", random_state=0).fit(points).cluster_centers_) == 1

    @pytest.mark.filterwarnings("ignore:60 uniform rows")
    @pytest.mark.parametrize("kind", [SphericalKMeans, VonMisesFisherMixture])
    def test_weights_that_sum_to_one_are_reported_where_they_count_as_rows(self, kind):
        weights = np.full(60, 1 / 60)
        with pytest.warns(UserWarning, match="weights count as numbers of rows, and those of 60 rows sum to 1;"):
            kind("auto" if kind is SphericalKMeans else 2).fit(small_groups(0.05, 2, 30), sample_weight=weights)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind(2).fit(small_groups(0.05, 2, 30), sample_weight=60 * weights)

    @pytest.mark.parametrize("dim", [2, 3, 5, 8, 16, 64, 256])
    @pytest.mark.parametrize("count", [60, 300])
    def test_unstructured_rows_are_one_cluster_without_a_doubt(self, dim, count, recwarn):
        points = np.random.default_rng(0).normal(size=(count, dim))
        assert len(SphericalKMeans("auto", random_state=0).fit(points).cluster_centers_) == 1
        assert not recwarn.list


def weighted() -> tuple[np.ndarray, np.ndarray]:
    """Rows of three clusters, and weights from 0 to 3."""
    return blobs(kappa=30.0)[0], np.random.default_rng(0).integers(0, 4, 300)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, sp.csr_matrix])
@pytest.mark.parametrize("make", ESTIMATORS)
class TestWeights:
    def test_a_weight_is_the_number_of_equal_rows(self, make, convert):
        points, weights = weighted()
        if convert is sp.csr_matrix and make is not ESTIMATORS[0]:
            pytest.skip("densities of sparse rows are not supported")
        once = make().fit(convert(points), sample_weight=weights)
        often = make().fit(convert(points.repeat(weights, axis=0)))
        for name in {"cluster_centers_", "means_", "concentrations_", "weights_"} & vars(once).keys():
            values = [np.asarray(getattr(each, name)).reshape(3, -1) for each in (once, often)]
            ours, theirs = (each[each[:, 0].argsort()] for each in values)
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        scores = once.score(convert(points), sample_weight=weights), once.score(convert(points.repeat(weights, axis=0)))
        assert scores[0] == pytest.approx(scores[1], rel=1e-9)


def test_inertia_and_centers_of_given_starts_are_those_of_repeated_rows():
    points, weights = weighted()
    k_means = SphericalKMeans(3, init=points[:3], random_state=0, tol=1e-12)
    once, often = clone(k_means).fit(points, sample_weight=weights), k_means.fit(points.repeat(weights, axis=0))
    np.testing.assert_allclose(once.cluster_centers_, often.cluster_centers_, atol=1e-9)
    assert once.inertia_ == pytest.approx(often.inertia_, rel=1e-9)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, sp.csr_matrix])
def test_transform_returns_the_distances_of_directions_to_the_centers(convert):
    points, _ = blobs()
    k_means = SphericalKMeans(3, random_state=0).fit(convert(points))
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    expected = np.linalg.norm(directions[:, None] - np.asarray(k_means.cluster_centers_), axis=2)
    np.testing.assert_allclose(k_means.transform(convert(points)), expected, atol=1e-7)


@pytest.mark.parametrize("make", ESTIMATORS)
def test_a_pipeline_transforms_and_names_the_columns(make):
    points, labels = blobs()
    pipeline = make_pipeline(make(), LogisticRegression()).fit(points, labels)
    assert pipeline.score(points, labels) == 1
    names = [f"{type(make()).__name__.lower()}{n}" for n in range(3)]
    assert pipeline[:1].get_feature_names_out().tolist() == names
    assert make().set_output(transform="pandas").fit_transform(points).columns.tolist() == names


class TestMixture:
    def test_parameters_are_recovered(self):
        means = project_to_sphere(torch.randn(3, 32, dtype=torch.float64))
        kappas, counts = torch.tensor([20.0, 100.0, 1e5]).double(), [6000, 3000, 1000]
        parts = [VonMisesFisher(m, k).sample((n,)) for m, k, n in zip(means, kappas, counts, strict=True)]
        mixture = VonMisesFisherMixture(3, random_state=0, n_init=2).fit(torch.cat(parts))
        order = (means @ mixture.means_.T).argmax(1)
        torch.testing.assert_close(mixture.concentrations_[order], kappas, rtol=0.02, atol=0)
        torch.testing.assert_close(mixture.weights_[order], torch.tensor([0.6, 0.3, 0.1]).double(), rtol=0.03, atol=0)

    def test_concentrations_of_few_rows_are_not_biased(self):
        loc, kappa = torch.eye(1, 256)[0].double(), torch.tensor(60.0).double()
        points = VonMisesFisher(loc, kappa).sample((20, 100))
        found = torch.stack([VonMisesFisherMixture().fit(part).concentrations_ for part in points])
        assert abs(found.mean() / kappa - 1) < 0.02
        assert VonMisesFisher.fit(points).concentration.mean() / kappa > 1.05

    @pytest.mark.parametrize("concentration_type", ["own", "shared"])
    def test_no_iteration_decreases_the_likelihood(self, concentration_type):
        points = load_digits().data
        mixture = VonMisesFisherMixture(4, concentration_type=concentration_type, random_state=0)
        rows = DirectionRows(mixture, points, reset=True)
        parameters = maximize(*all_sums_by_label(rows, torch.arange(len(rows)) % 4, 4))
        likelihoods = []
        for _ in range(20):
            likelihood, _, sums, counts, _ = expect(rows, parameters)
            likelihoods.append(likelihood)
            parameters = maximize(sums, counts, shared=concentration_type == "shared")
        assert (np.diff(likelihoods) > -1e-10).all()
        if concentration_type == "shared":
            assert len(set(parameters.concentrations.tolist())) == 1

    def test_densities_are_those_of_torch_mixtures(self):
        points, _ = blobs()
        mixture = VonMisesFisherMixture(3, random_state=0).fit(points)
        means, kappas, weights = (
            torch.from_numpy(part) for part in (mixture.means_, mixture.concentrations_, mixture.weights_)
        )
        joint = VonMisesFisher(means, kappas).log_prob(torch.from_numpy(points)[:, None]) + weights.log()
        np.testing.assert_allclose(mixture.score_samples(points), joint.logsumexp(1), rtol=1e-9)
        np.testing.assert_allclose(mixture.predict_proba(points), joint.softmax(1), atol=1e-9)
        assert mixture.score(points) == pytest.approx(mixture.lower_bound_)
        total = -2 * mixture.score_samples(points).sum()
        assert mixture.bic(points) == pytest.approx(total + (3 * 7 + 3 + 2) * math.log(300))

    def test_zero_rows_do_not_count_in_the_criteria(self):
        points, _ = blobs(each=20)
        padded = np.concatenate([points, np.zeros_like(points)])
        mixture = VonMisesFisherMixture(3, random_state=0).fit(points)
        for criterion in (mixture.bic, mixture.score):
            with pytest.warns(UserWarning, match="60 of 120 rows of X are zero"):
                assert criterion(padded) == pytest.approx(criterion(points), rel=1e-12)
            with pytest.warns(UserWarning, match="2 of 2"), pytest.raises(ValueError, match="all rows of X are zero"):
                criterion(np.zeros((2, 8)))
        with pytest.warns(UserWarning, match="zero"):
            density, shares = mixture.score_samples(np.zeros((1, 8))), mixture.predict_proba(np.zeros((1, 8)))
        assert density[0] == pytest.approx(-HypersphericalUniform(8, dtype=torch.float64).entropy().item())
        np.testing.assert_allclose(shares, 1 / 3)
        scores = [VonMisesFisherMixture(k, random_state=0).fit(points).bic(points) for k in (1, 2, 3, 4)]
        assert np.argmin(scores) == 2

    def test_a_component_of_balanced_rows_is_uniform(self):
        mixture = VonMisesFisherMixture().fit(np.concatenate([np.eye(4), -np.eye(4)]))
        assert mixture.concentrations_.tolist() == [0.0]
        assert np.linalg.norm(mixture.means_) == 1

    def test_samples_follow_the_mixture(self):
        mixture = VonMisesFisherMixture(3, random_state=0).fit(blobs()[0])
        points, labels = mixture.sample(3000)
        assert (points.shape, labels.shape) == ((3000, 8), (3000,))
        assert (mixture.predict(points) == labels).mean() > 0.99
        with pytest.raises(ValueError, match="n_samples must be an integer of at least 1; got nan"):
            mixture.sample(np.nan)
        refit = clone(mixture).fit(points)
        np.testing.assert_allclose(np.sort(refit.concentrations_), np.sort(mixture.concentrations_), rtol=0.1)

    def test_single_point_components_and_high_concentrations_are_finite(self):
        points = np.concatenate([blobs(kappa=1e5)[0], np.eye(8)[:2]])
        mixture = VonMisesFisherMixture(5, random_state=0, n_init=3).fit(points)
        assert sorted(np.bincount(mixture.labels_)) == [1, 1, 100, 100, 100]
        for value in (mixture.concentrations_, mixture.score_samples(points), mixture.predict_proba(points)):
            assert np.isfinite(value).all()

    def test_sparse_rows_are_an_error(self):
        with pytest.raises(TypeError, match=r"dense data is required"):
            VonMisesFisherMixture(2).fit(sp.csr_matrix(np.eye(3)))


BLOCKED = ["transformers", "timm", "datasets", "accelerate", "torchvision", "huggingface_hub", "peft", "safetensors"]


def test_only_torch_numpy_scipy_and_scikit_learn_are_needed(root):
    program = f"""
import sys
sys.modules |= dict.fromkeys({BLOCKED})  # cannot be imported
import torch
from hf_sphere.cluster import SphericalKMeans, VonMisesFisherMixture, spherical_k_means
from hf_sphere.distributions import PowerSpherical, VonMisesFisher
from hf_sphere.geometry import exp_map, log_vmf_normalizer, separation
from hf_sphere.ood import OODDetector, compare_scores
x = VonMisesFisher(torch.eye(3), torch.tensor(9.0)).sample((20,)).flatten(0, 1)
OODDetector("knn", k=1).fit_embeddings(x)
print(SphericalKMeans(3).fit(x).labels_.shape, VonMisesFisherMixture(3).fit(x.numpy()).weights_.shape)
"""
    run = run_fresh([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, hugging_face=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "torch.Size([60]) (3,)"


@pytest.mark.parametrize("estimator", [SphericalKMeans(2), VonMisesFisherMixture(2)])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ma.masked_array(np.ones(60), np.arange(60) > 9), "sample_weight must be dense, without masked values"),
        (math.nan, "sample_weight must have finite real numbers"),
        (1j, "sample_weight must have finite real numbers"),
        (np.zeros(60), "zero"),
        (torch.full((60,), torch.inf), "infinity"),
    ],
)
def test_weights_that_are_masked_zero_or_not_finite_are_errors(estimator, weights, message):
    with pytest.raises((TypeError, ValueError), match=message):
        clone(estimator).fit(np.random.default_rng(0).normal(size=(60, 4)), sample_weight=weights)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: sp.csr_matrix(x.numpy()), lambda x: 1e-3 * x.float()])
def test_labels_of_moving_centers_are_those_of_all_cosines(make, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2_000, 6, dtype=torch.float64, generator=generator)
    x[5] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = DirectionRows(SphericalKMeans(), make(x), reset=True)
    tracked, centers = NearestCenters(rows), project_to_sphere(torch.randn(9, 6, generator=generator)).to(rows.dtype)
    sizes, compare, compared = [], spherical_k_means.compare, []

    def count(rows, parts, centers):
        for part in compare(rows, parts, centers):
            sizes.append(len(part[-1]) if len(centers) == 9 else 0)  # not of the centers that move far
            yield part

    def update(centers):
        sizes.clear()
        labels = tracked.update(centers)
        compared.append(sum(sizes))
        assert torch.equal(labels, assign(rows, centers)[0])

    monkeypatch.setattr(spherical_k_means, "compare", count)
    for step in (1.0, 0.1, 0.01, 1e-3, 1e-4, 1.0, 0.0):
        update(centers)
        centers = project_to_sphere(centers + step * torch.randn(9, 6, generator=generator).to(rows.dtype))
    assert compared[0] == compared[1] == compared[6] == len(x)
    assert compared[5] < 200
    centers = tracked.centers.clone()
    centers[3] = -centers[3]  # the only one that moves
    update(centers)
    assert compared[7] < len(x)


def overlapping(kappa: float, each: int = 400, count: int = 3, dim: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    means = project_to_sphere(torch.randn(count, dim, dtype=torch.float64)).repeat_interleave(each, 0)
    return VonMisesFisher(means, torch.full((len(means),), kappa).double(), validate_args=False).sample()


@pytest.mark.parametrize(("kappa", "error"), [(10.0, 0.07), (40.0, 0.04)])
def test_concentrations_of_overlapping_components_are_not_those_of_their_noise(kappa, error):
    mixture = VonMisesFisherMixture(3, random_state=0).fit(overlapping(kappa))
    assert (mixture.concentrations_ / kappa - 1).abs().max() < error  # 0.11 without the spectrum at 10


def test_components_that_uniform_rows_could_have_are_reported_and_shrunk():
    with pytest.warns(UserWarning, match="1200 uniform rows in 64 dimensions could have these 3 components"):
        mixture = VonMisesFisherMixture(3, random_state=0).fit(overlapping(4.0))
    assert (mixture.concentrations_ < 4).all()  # 9 without the spectrum, which shows less than there is
    with pytest.warns(UserWarning, match="could have these 3 components"):
        mixture = VonMisesFisherMixture(3, random_state=0).fit(HypersphericalUniform(100).sample((2_000,)).double())
    assert (mixture.concentrations_ < 8).all()  # 9 to 15 without the spectrum


def test_weights_count_as_rows_for_overlapping_components():
    x = overlapping(10.0)
    mixture, weights = VonMisesFisherMixture(3, random_state=0), torch.full((len(x),), 2.0)
    start = mixture.fit(x, sample_weight=weights)._fitted()
    rows, weighted = (
        DirectionRows(mixture, values, reset=False, for_density=True, sample_weight=weight)
        for values, weight in ((x.repeat(2, 1), None), (x, weights))
    )
    torch.testing.assert_close(shrink(rows, start), shrink(weighted, start))
