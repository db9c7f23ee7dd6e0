import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from hf_sphere.metrics import retrieval_scores, sampled_retrieval_scores
from hf_sphere.metrics.retrieval import Gallery, _largest

DISTANCES = ["cosine", "euclidean", "hyperbolic"]
CURVATURE = 0.1


def random_points(count, dim=4, seed=0, dtype=torch.float64):
    """Points in the ball of curvature -CURVATURE, some near its boundary."""
    generator = torch.Generator().manual_seed(seed)
    directions = F.normalize(torch.randn(count, dim, dtype=dtype, generator=generator), dim=1)
    radii = torch.rand(count, 1, dtype=dtype, generator=generator) ** 0.2
    return 0.999 * radii * directions / CURVATURE**0.5


def plain_distance(distance, a, b):
    if distance == "cosine":
        return -(a @ b) / (a.norm() * b.norm())
    if distance == "euclidean":
        return (a - b).norm()
    shrunk = (1 - CURVATURE * a @ a) * (1 - CURVATURE * b @ b)
    return torch.acosh(1 + 2 * CURVATURE * (a - b) @ (a - b) / shrunk) / CURVATURE**0.5


def plain_scores(embeddings, labels, distance, ks):
    """The definitions, one query and one neighbor at a time; distances within 1e-12 are tied."""
    sums, queries = dict.fromkeys([*(f"recall_at_{k}" for k in ks), "r_precision", "map_at_r"], 0.0), 0
    for query, label in enumerate(labels):
        others = [n for n in range(len(labels)) if n != query]
        relevant = sum(labels[n] == label for n in others)
        if relevant == 0:
            continue
        queries += 1
        near = {n: round(float(plain_distance(distance, embeddings[query], embeddings[n])), 9) for n in others}
        same = [labels[n] == label for n in sorted(others, key=lambda n: (near[n], labels[n] == label))]
        for k in ks:
            sums[f"recall_at_{k}"] += any(same[:k])
        sums["r_precision"] += sum(same[:relevant]) / relevant
        sums["map_at_r"] += sum(sum(same[: j + 1]) / (j + 1) for j in range(relevant) if same[j]) / relevant
    means = {name: value / queries for name, value in sums.items()}
    return {**means, "num_queries": queries, "num_excluded": len(labels) - queries}


def close(scores):
    return {name: pytest.approx(value, abs=1e-6) for name, value in scores.items()}


@pytest.fixture(scope="module")
def clusters(root):
    """The golden embeddings and labels; one class has a single member."""
    tensors = load_file(root / "tests" / "golden" / "metrics.safetensors")
    return tensors["embeddings"], tensors["labels"]


class TestValues:
    def test_scores_match_the_golden_values(self, clusters, root):
        known = json.loads((root / "tests" / "golden" / "metrics.json").read_text())["retrieval"]
        scores = retrieval_scores(*clusters)
        assert scores == {
            "recall_at_1": pytest.approx(known["precision_at_1"], abs=1e-6),
            "r_precision": pytest.approx(known["r_precision"], abs=1e-6),
            "map_at_r": pytest.approx(known["mean_average_precision_at_r"], abs=1e-6),
            "num_queries": 399,
            "num_excluded": 1,
        }

    @given(
        labels=st.lists(st.integers(-2, 3), min_size=2, max_size=24).filter(lambda made: len(set(made)) < len(made)),
        distance=st.sampled_from(DISTANCES),
        ks=st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True),
        seed=st.integers(0, 10_000),
    )
    def test_scores_match_the_definitions(self, labels, distance, ks, seed):
        points = random_points(len(labels), seed=seed)
        scores = retrieval_scores(points, torch.tensor(labels), distance=distance, ks=ks, curvature=CURVATURE)
        assert scores == close(plain_scores(points, labels, distance, ks))

    @given(
        places=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=4, max_size=24),
        distance=st.sampled_from(DISTANCES),
    )
    def test_a_tie_counts_against_the_query(self, places, distance):
        points = random_points(5)[[place for place, _ in places]]
        labels = [0, 0, *(label for _, label in places[2:])]
        scores = retrieval_scores(points, torch.tensor(labels), distance=distance, ks=(1, 3), curvature=CURVATURE)
        assert scores == close(plain_scores(points, labels, distance, (1, 3)))

    @pytest.mark.parametrize("curvature", [1e-5, 0.1, 1.0])
    def test_hyperbolic_neighbors_match_geoopt(self, curvature):
        geoopt = pytest.importorskip("geoopt")
        labels = torch.arange(80) % 8
        centers = random_points(8)[labels] * 0.9
        points = (centers + 0.1 * torch.randn(80, 4)) * (CURVATURE / curvature) ** 0.5 * 0.99
        ball = geoopt.PoincareBall(c=curvature)
        near = ball.dist(points[:, None], points[None]).fill_diagonal_(float("inf")).argsort(dim=1)[:, :9]
        same = labels[near] == labels[:, None]
        scores = retrieval_scores(points, labels, distance="hyperbolic", curvature=curvature)
        assert scores["recall_at_1"] == pytest.approx(same[:, 0].double().mean().item(), abs=1e-6)
        assert scores["r_precision"] == pytest.approx(same.double().mean().item(), abs=1e-6)

    def test_distances_are_accurate_near_the_boundary_of_the_ball(self):
        # The points are at most 1.1e-4 apart, but their hyperbolic distances are large.
        angles = torch.tensor([0.0, 1.0, 10.0, 11.0], dtype=torch.float64) * 1e-5
        points = (1 - 1e-6) * torch.stack([angles.cos(), angles.sin()], dim=1)
        scores = retrieval_scores(points.float(), torch.tensor([0, 0, 1, 1]), distance="hyperbolic", curvature=1.0)
        assert scores["map_at_r"] == 1.0


class TestInvariance:
    @pytest.mark.parametrize("distance", DISTANCES)
    @pytest.mark.parametrize("memory", [1, 30_000, 300_000])
    def test_the_block_size_has_no_effect(self, clusters, distance, memory, monkeypatch):
        embeddings, labels = clusters
        embeddings = torch.cat([embeddings, embeddings[::3]])  # with ties
        labels = torch.cat([labels, labels[::3].roll(1)])
        options = {"distance": distance, "ks": (1, 10), "curvature": 0.5}
        whole = retrieval_scores(embeddings, labels, **options)
        monkeypatch.setattr("hf_sphere.metrics.retrieval.BYTES_IN_MEMORY", memory)
        parts = retrieval_scores(embeddings, labels, **options)
        assert parts == whole

    @pytest.mark.parametrize("distance", DISTANCES)
    def test_the_order_and_ids_of_classes_have_no_effect_with_ties_either(self, clusters, distance):
        tied = 0.2 * torch.randint(-1, 2, (120, 3)), torch.randint(0, 5, (120,))
        for embeddings, labels in (clusters, tied):
            order = torch.randperm(len(labels))
            renamed = torch.randperm(10**6)[: int(labels.max()) + 1][labels] - 500_000
            given, other = (
                retrieval_scores(*data, distance=distance, curvature=0.5)
                for data in ((embeddings, labels), (embeddings[order], renamed[order].int()))
            )
            assert other == close(given)

    @pytest.mark.parametrize("distance", ["cosine", "euclidean"])
    def test_scale_and_translation_have_no_effect(self, clusters, distance):
        embeddings, labels = clusters
        expected = retrieval_scores(embeddings, labels, distance=distance)
        for scale in (1e-30, 1e30):
            assert retrieval_scores(embeddings * scale, labels, distance=distance) == close(expected)
        if distance == "euclidean":
            rounded = (embeddings * 2**10).round()  # so that the translation itself is exact
            expected = retrieval_scores(rounded, labels, distance=distance)
            assert retrieval_scores(rounded + 2**13, labels, distance=distance) == close(expected)

    def test_half_precision_is_upcast_and_embeddings_that_require_gradients_are_unchanged(self, clusters):
        embeddings, labels = clusters
        half = embeddings.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = retrieval_scores(half, labels)
        assert scores == retrieval_scores(half.float(), labels)
        given = embeddings.clone().requires_grad_()
        retrieval_scores(given, labels, distance="euclidean")
        assert given.grad is None
        assert torch.equal(given, embeddings)

    def test_training_settings_are_restored(self, clusters):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            retrieval_scores(*clusters)
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("count", [1, 3, 31, 32, 33, 1024])
def test_grouped_top_k_matches_sorting(count):
    values = torch.randint(0, 200, (7, 1024)).float()  # with ties
    assert torch.equal(_largest(values, count), values.sort(dim=1, descending=True).values[:, :count])


class TestMemory:
    def test_blocks_respect_the_memory_limit(self, monkeypatch):
        held = []
        nearest = Gallery.nearest

        def measured(self, rows, count):
            held.append(len(rows) * len(self.queries) * self.queries.element_size())
            return nearest(self, rows, count)

        monkeypatch.setattr("hf_sphere.metrics.retrieval.BYTES_IN_MEMORY", 2**18)
        monkeypatch.setattr(Gallery, "nearest", measured)
        whole = 4 * 1500**2
        retrieval_scores(torch.randn(1500, 4), torch.arange(1500) % 2)
        assert max(held) <= 2**18 < whole

    @pytest.mark.skipif(sys.platform != "linux", reason="other systems count in other units")
    def test_many_embeddings_do_not_allocate_the_full_distance_matrix(self):
        import resource

        labels = torch.arange(14_000) % 2800
        embeddings = torch.randn(14_000, 16)
        retrieval_scores(embeddings[:2000], labels[:2000] % 50)  # libraries are loaded by now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        retrieval_scores(embeddings, labels, distance="hyperbolic", curvature=1e-3)
        mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert mebibytes < 800  # the distances alone would take 1,495


def test_lists_keep_the_precision_of_python():
    embeddings = [[16777217.0], [16777218.0], [16777219.2], [16777220.0]]
    assert retrieval_scores(embeddings, [0, 0, 1, 1], distance="euclidean")["recall_at_1"] == 1.0


def test_packed_bits_are_an_error_and_their_bits_are_compared_exactly():
    bits = torch.randint(0, 2, (60, 16), dtype=torch.uint8)
    labels, codes = torch.arange(60) // 2, np.packbits(bits.numpy(), axis=1)
    for packed in (codes, torch.from_numpy(codes), (codes - 128).view(np.int8)):
        with pytest.raises(TypeError, match="can be coordinates or packed bits"):
            retrieval_scores(packed, labels)
    hamming = (bits[:, None] != bits).sum(2).fill_diagonal_(99)
    partner = hamming[torch.arange(60), torch.arange(60) ^ 1]
    others = hamming.clone()
    others[torch.arange(60), torch.arange(60) ^ 1] = 99
    unpacked = np.unpackbits(codes, axis=1).astype("float32")
    found = retrieval_scores(unpacked, labels, distance="euclidean")["recall_at_1"]
    assert found == (partner < others.amin(1)).double().mean().item()


LABELS = torch.arange(120) % 12


@pytest.fixture
def directions():
    return F.normalize(torch.randn(12, 8)[LABELS] + 0.3 * torch.randn(120, 8), dim=1)


def test_concentrated_samples_have_the_scores_of_their_mean_directions(directions):
    sampled = sampled_retrieval_scores(directions, torch.full((120,), 1e8), LABELS, num_samples=3)
    plain = retrieval_scores(directions, LABELS)
    for name, values in sampled.items():
        for value in values.values():
            assert value == pytest.approx(plain[name], abs=5e-3)


def test_low_concentration_lowers_the_scores(directions):
    options = {"num_samples": 3, "ks": (1, 5)}
    near, far = (sampled_retrieval_scores(directions, torch.full((120,), c), LABELS, **options) for c in (1e3, 1.0))
    assert set(near) == {"recall_at_1", "recall_at_5", "r_precision", "map_at_r"}
    assert all(far[name]["mean"] < near[name]["mean"] for name in near)


def test_the_interval_has_95_percent_of_two_samples_and_their_mean(directions):
    found = sampled_retrieval_scores(directions, torch.full((120,), 20.0), LABELS, num_samples=2)
    for ends in found.values():
        assert ends["low"] < ends["mean"] < ends["high"]
        assert ends["low"] + ends["high"] == pytest.approx(2 * ends["mean"])


def test_samples_depend_only_on_the_seed(directions):
    first, again, other = (
        sampled_retrieval_scores(directions, torch.full((120,), 20.0), LABELS, num_samples=2, seed=seed)
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    before = torch.get_rng_state()
    sampled_retrieval_scores(directions, torch.full((120,), 20.0), LABELS, num_samples=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_half_precision_and_any_norms_are_accepted(directions):
    half = 3 * directions.bfloat16()
    expected = sampled_retrieval_scores(F.normalize(half.float(), dim=1), torch.full((120,), 20.0), LABELS)
    scores = sampled_retrieval_scores(half, torch.full((120,), 20.0).bfloat16(), LABELS)
    assert scores["map_at_r"] == pytest.approx(expected["map_at_r"], abs=1e-6)
