import pytest
import torch
import torch.nn.functional as F

from hf_sphere.metrics import retrieval_scores, sampled_retrieval_scores

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


def test_the_interval_contains_the_mean_and_grows_with_its_level(directions):
    narrow, wide = (
        sampled_retrieval_scores(directions, torch.full((120,), 20.0), LABELS, interval=share) for share in (0.5, 0.95)
    )
    for name in wide:
        assert wide[name]["mean"] == narrow[name]["mean"]
        assert wide[name]["low"] < narrow[name]["low"] < narrow[name]["high"] < wide[name]["high"]
        assert wide[name]["low"] < wide[name]["mean"] < wide[name]["high"]


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
