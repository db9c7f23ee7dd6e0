import itertools
import math
from functools import partial

import clustered
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy.stats import spearmanr

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes import OrderPreservation, measure_order, ordering, place_prototypes
from hf_sphere.prototypes.methods import minimize_on_sphere
from hf_sphere.prototypes.ordering import (
    TripletRanking,
    assign_to_classes,
    class_directions,
    mean_nearest_cosine,
    ranking_loss,
    soft_separation,
)


def structured_vectors(groups=3, each=4):
    """Class vectors in groups: similar within a group, different between groups."""
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(groups, 1, 20, generator=generator)
    return (centers + 0.4 * torch.randn(groups, each, 20, generator=generator)).flatten(0, 1)


unit = partial(clustered.unit, dtype=torch.float64)


def cosines(vectors):
    directions = F.normalize(vectors.double(), dim=1)
    return directions @ directions.T


def neighbors(vectors, count):
    values = cosines(vectors).fill_diagonal_(-2)
    return [set(row.argsort(descending=True)[:count].tolist()) for row in values]


def triplets_of(vectors, seed=0):
    return TripletRanking(class_directions(vectors, len(vectors))).triplets(torch.Generator().manual_seed(seed))


def test_of_equally_similar_classes_the_first_are_the_nearest():
    triplets = triplets_of(torch.eye(40))
    near = {i: sorted({j for k, j, _ in triplets.tolist() if k == i}) for i in range(40)}
    assert near == {i: [j for j in range(5) if j != i][:4] for i in range(40)}


@given(count=st.integers(3, 35), seed=st.integers(0, 1000))
def test_few_triplets_are_enumerated_once(count, seed):
    near = max(1, round(count / 10))
    vectors = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    triplets = triplets_of(vectors)
    nearest = neighbors(vectors, near)
    expected = {
        (i, j, k) for i, j, k in itertools.permutations(range(count), 3) if j in nearest[i] and k not in nearest[i]
    }
    assert sorted(map(tuple, triplets.tolist())) == sorted(expected)


def test_sampled_triplets_are_valid_and_cover_every_negative(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_TRIPLETS", 500)
    vectors = torch.randn(60, 8)
    triplets = triplets_of(vectors, seed=3)
    nearest = neighbors(vectors, 6)
    assert triplets.shape == (500, 3)
    assert all(j in nearest[i] and k not in nearest[i] and k != i for i, j, k in triplets.tolist())
    ranked, generator = TripletRanking(unit(8, 4)), torch.Generator().manual_seed(0)
    assert len(ranked.triplets(generator)) == 48  # 8 * 1 * 6: all triplets
    monkeypatch.setattr(ordering, "MAX_TRIPLETS", 47)
    drawn = {tuple(triplet) for _ in range(20) for triplet in ranked.triplets(generator).tolist()}
    assert len(drawn) == 48


def test_triplets_of_thousands_of_classes_are_sampled_without_enumeration():
    count = 2000
    ranked = TripletRanking(unit(count, 4))
    anchor, near, far = ranked.triplets(torch.Generator().manual_seed(0)).unbind(1)
    assert len(anchor) == ordering.MAX_TRIPLETS
    assert ((near != anchor) & (far != anchor) & (near != far)).all()
    assert (far < count).all()
    assert (far > 0.99 * count).any()
    directions = ranked.directions
    assert ((directions[anchor] * directions[near]).sum(1) > (directions[anchor] * directions[far]).sum(1)).all()


def test_ranking_loss_matches_ranknet():
    triplets = triplets_of(torch.randn(31, 5))
    points = unit(31, 4).requires_grad_()
    i, j, k = triplets.unbind(1)
    plain = torch.log1p(torch.exp((points[i] * points[k]).sum(1) - (points[i] * points[j]).sum(1))).mean()
    value, gradient = ranking_loss(points.detach(), triplets)
    assert value == pytest.approx(plain.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, points)[0], rtol=1e-9, atol=1e-14)


def test_class_vectors_raise_the_triplet_accuracy():
    vectors, options = structured_vectors(), {"method": "lbfgs", "restarts": 1, "max_iterations": 30}
    without = measure_order(place_prototypes(12, 3, **options).prototypes, vectors)
    for kind in ("ranking", "assignment"):
        placed = place_prototypes(12, 3, class_vectors=vectors, ordering=kind, **options)
        assert placed.order.triplet_accuracy > without.triplet_accuracy + 0.1
        assert placed.order.rank_correlation > without.rank_correlation + 0.1


def test_assignment_preserves_points_and_separation():
    vectors = structured_vectors()
    plain = place_prototypes(12, 3)
    assigned = place_prototypes(12, 3, class_vectors=vectors, ordering="assignment")
    assert assigned.separation == pytest.approx(plain.separation, abs=1e-12)
    assert sorted(assigned.prototypes.tolist()) == sorted(plain.prototypes.tolist())
    assert assigned.method.endswith(", assigned")
    placement = place_prototypes(12, 3, method="catalogue", class_vectors=vectors, ordering="assignment")
    assert placement.separation == pytest.approx(separation(placement.prototypes).item())
    assert placement.order.triplet_accuracy > 0.6


def test_assignment_recovers_a_shuffled_order_and_three_classes_are_enough():
    points = unit(9, 3)
    shuffled = points[torch.randperm(9, generator=torch.Generator().manual_seed(2))]
    found = assign_to_classes(shuffled, points, torch.Generator().manual_seed(0))
    assert measure_order(found, points).triplet_accuracy == 1.0
    placement = place_prototypes(3, 2, class_vectors=torch.randn(3, 5), ordering="assignment")
    assert placement.separation == pytest.approx(-1 / 2)
    assert placement.order is not None
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [-1, 0.3]])
    placement = place_prototypes(3, 2, restarts=1, class_vectors=vectors)
    assert placement.order.triplet_accuracy == 1.0


def test_neither_dtype_nor_norms_of_class_vectors_matter_and_lists_keep_the_precision_of_python():
    vectors = structured_vectors()
    scales = torch.logspace(-20, 20, 12, dtype=torch.float64)[:, None]
    torch.testing.assert_close(class_directions(vectors * scales, 12), class_directions(vectors, 12))
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        rounded = (10 * vectors).to(dtype)
        assert torch.equal(class_directions(rounded, 12), class_directions(rounded.double(), 12))
    vectors = [[1.0, 1e-5 * number, 1.0] for number in range(5)]
    expected = class_directions(torch.tensor(vectors, dtype=torch.float64), 5)
    assert torch.equal(class_directions(vectors, 5), expected)
    assert measure_order(torch.eye(5).tolist(), vectors) == measure_order(torch.eye(5), expected)


def brute_force_accuracy(points, vectors):
    ours, theirs = cosines(points).tolist(), cosines(vectors).tolist()
    scores = []
    for i, j, k in itertools.permutations(range(len(points)), 3):
        given, wanted = ours[i][j] - ours[i][k], theirs[i][j] - theirs[i][k]
        scores.append(0.5 if min(abs(given), abs(wanted)) < 1e-9 else float((given > 0) == (wanted > 0)))
    return sum(scores) / len(scores)


def test_order_preservation_matches_triplet_accuracy_and_spearman():
    points, vectors = unit(9, 3), torch.randn(9, 5)
    order = measure_order(points, vectors)
    pairs = torch.triu_indices(9, 9, 1).unbind(0)
    expected = spearmanr(cosines(points)[pairs], cosines(vectors)[pairs]).statistic
    assert order.triplet_accuracy == pytest.approx(brute_force_accuracy(points, vectors), abs=1e-12)
    assert order.rank_correlation == pytest.approx(expected, abs=1e-12)


def test_tied_prototypes_count_one_half():
    order = measure_order(place_prototypes(5, 4).prototypes, torch.randn(5, 3))
    assert order == OrderPreservation(0.5, 0.0)
    points, vectors = place_prototypes(7, 4).prototypes, torch.randn(7, 3)
    assert measure_order(points, vectors).triplet_accuracy == pytest.approx(brute_force_accuracy(points, vectors))
    assert measure_order(torch.randn(6, 3), torch.eye(6)) == OrderPreservation(0.5, 0.0)


def test_identical_geometry_preserves_the_full_order_and_opposite_geometry_none():
    vectors = torch.randn(10, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4)).Q
    order = measure_order(3 * vectors @ rotation, vectors)
    assert (order.triplet_accuracy, order.rank_correlation) == (1.0, pytest.approx(1.0))
    angles = torch.tensor([0.0, 0.3, 1.0])
    ours = torch.stack([angles.cos(), angles.sin()], dim=1)
    theirs = torch.linalg.cholesky(2 * torch.eye(3) - ours @ ours.T + 0.5 * (1 - torch.eye(3)))
    assert measure_order(ours, theirs).triplet_accuracy == 0.0


def test_sampled_triplets_approximate_the_exact_value(monkeypatch):
    points, vectors = unit(30, 3), torch.randn(30, 3)
    exact = measure_order(points, vectors)
    different = ordering._different
    monkeypatch.setattr(ordering, "_different", lambda *arguments: different(*arguments, max_tuples=20_000))
    sampled = measure_order(points, vectors)
    assert sampled.triplet_accuracy == pytest.approx(exact.triplet_accuracy, abs=0.02)
    assert sampled.triplet_accuracy != exact.triplet_accuracy


def changed(rows, value):
    vectors = structured_vectors()
    vectors[rows] = value
    return vectors


WRONG = [
    (torch.randn(12), r"got \(12,\)"),
    (changed([3, 7], float("nan")), "class_vectors must be finite; 2 of 12 are not, the first at index 3"),
    (changed([2], float("inf")), "class_vectors must be finite; 1 of 12 are not, the first at index 2"),
    (changed([0, 11], 0.0), "no direction; 2 of 12 class_vectors are zero, the first at index 0"),
    (changed([4, 9], structured_vectors()[1]), "rows 1, 4, 9 of class_vectors have the same direction"),
    (changed([5], 2 * structured_vectors()[6]), "rows 5, 6 of class_vectors have the same direction"),
]
VECTORS = {"class_vectors": structured_vectors()}
MANY = {"num_classes": 4097, "dim": 2, "class_vectors": torch.randn(4097, 2)}
TWO = {"num_classes": 2, "dim": 2, "class_vectors": torch.randn(2, 5)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"class_vectors": vectors}, message) for vectors, message in WRONG),
        ({"ordering": "assignment"}, "requires class_vectors"),
        (VECTORS | {"ordering": "rank"}, "ordering must be one of ranking, assignment; got 'rank'"),
        *((VECTORS | {"method": m}, f"'{m}' does not support a ranking loss") for m in ("slsqp", "catalogue")),
        (TWO, r"at least 3 classes; got 2\. Leave class_vectors out"),
        (MANY | {"method": "sgd", "max_iterations": 1, "ordering": "assignment"}, "takes up to 4096 classes; got 4097"),
        (VECTORS | {"ordering": "assignment", "num_classes": 5}, "one row for each of 5 classes; got 12"),
    ],
)
def test_invalid_class_vectors_and_orderings_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        place_prototypes(**{"num_classes": 12, "dim": 3, **options})


SHAPES = [(2, 2), (5, 3), (37, 4)]


def off_diagonal(points):
    """Return the cosines of each point with the others, (K, K - 1)."""
    count = len(points)
    return (points @ points.T)[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)


def plain_soft_separation(points, sharpness):
    return torch.logsumexp(sharpness * off_diagonal(points).flatten(), dim=0) / sharpness


@pytest.fixture(params=[None, 40, 1], ids=["one block", "several rows per block", "one row per block"])
def blocks(request, monkeypatch):
    """Set the number of cosines per block; the last block is incomplete."""
    if request.param:
        monkeypatch.setattr(ordering, "BLOCK_ENTRIES", request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharpness", [0.5, 30.0, 1e4])
def test_soft_separation_is_the_log_sum_exp_of_all_cosines(shape, sharpness, blocks):
    points = unit(*shape).requires_grad_()
    expected = plain_soft_separation(points, sharpness)
    value, gradient = soft_separation(points.detach(), sharpness)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, points)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_nearest_cosine_matches_the_loss_of_the_paper(shape):
    points = unit(*shape).requires_grad_()
    expected = off_diagonal(points).max(dim=1).values.mean()
    value, gradient = mean_nearest_cosine(points.detach())
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, points)[0], rtol=1e-12, atol=1e-14)


@given(
    count=st.integers(2, 20), dim=st.integers(2, 8), sharpness=st.floats(1e-2, 1e9), seed=st.integers(0, 1000)
)  # fmt: skip
def test_soft_separation_is_slightly_above_the_largest_cosine(count, dim, sharpness, seed):
    points = unit(count, dim, seed=seed)
    largest = off_diagonal(points).max().item()
    value, gradient = soft_separation(points, sharpness)
    assert gradient.isfinite().all()
    assert largest - 1e-12 <= value <= largest + math.log(count * (count - 1)) / sharpness + 1e-12


def test_minimizer_uses_the_gradient_of_the_normalized_points(monkeypatch):
    functions = []
    minimize = scipy.optimize.minimize
    monkeypatch.setattr(
        scipy.optimize, "minimize", lambda function, *given, **options: functions.append(function)
        or minimize(function, *given, **options)
    )  # fmt: skip
    minimize_on_sphere(lambda points: soft_separation(points, 7.0), unit(6, 3), max_iterations=1)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    expected = plain_soft_separation(F.normalize(x, dim=1), 7.0)
    value, slope = functions[0](x.detach().flatten().numpy())
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(torch.from_numpy(slope).view(6, 3), torch.autograd.grad(expected, x)[0])
