import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import CASES, EXCLUDED, HEAD_CASES, LOSS_CASES, OPTIMIZER_CASES, TESTED, flatten, public_names
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_sphere.nn import build_head
from hf_sphere.nn.heads import HEADS

WAITS = {
    "geometry.frechet_mean": 9,
    "geometry.separation": 1,
    "geometry.codes.separation": 1,
    "nn.fit_calibration": 2,
    "nn.VMFHead": 4,
    "losses.MetricLearningLoss": 6,
    "distributions.PowerSpherical": 4,
    "metrics.alignment": 3,
    "metrics.uniformity": 2,
    "metrics.class_angles": 3,
    "metrics.class_overlap": 4,
    "metrics.effective_dimension": 2,
    "metrics.energy_test": 4,
    "metrics.reliability_bins": 2,
    "metrics.expected_calibration_error": 2,
    "metrics.calibration_errors": 4,
    "metrics.probability_scores": 3,
    "metrics.detection_scores": 2,
    "metrics.retrieval_scores": 12,
    "metrics.sampled_retrieval_scores": 30,
    "metrics.score_queries": 12,
    "metrics.accuracy_by_certainty": 2,
    "search.EmbeddingSpace": 5,
    "search.read_vectors": 1,
    "search.report_vectors": 1,
    "metrics.area_under_risk_coverage": 2,
    "metrics.risk_coverage": 2,
    "prototypes.measure_order": 2,
    "ood.model_outputs": 3,
    "ood.fit_rejection": 17,
    "search.NeighborSearch": 4,
    # Both check rows twice and choose 4 centers; at most 10 iterations, the mixture after at most 20 of k-means.
    "cluster.SphericalKMeans": 11 + 2 * 4 + 2 * 10,
    "cluster.VonMisesFisherMixture": 9 + 2 * 4 + 2 * 20 + 10 + 2,
    "optim.step_diagnostics": 5,
    "optim.find_scale_invariant_weights": 80,
    **{f"ood.SCORES.{name.rpartition('.')[2]}": 10 for name in CASES if name.startswith("ood.SCORES.")},
}
"""How often a call, after the first one, may wait for the device; never where nothing is stated."""


class RandomNumbersOfTheCPU(TorchDispatchMode):
    """Draws on the CPU what a CUDA device would draw from its own generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        devices = [kwargs.get("device"), *(x.device for x in args if isinstance(x, torch.Tensor))]
        device = next((each for each in devices if each is not None and torch.device(each).type == "cuda"), None)
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()  # without dropout
        if device is None or not is_draw:
            return func(*args, **kwargs)

        def move(to: Any) -> Any:
            return lambda value: value.to(to) if isinstance(value, torch.Tensor) else value

        on_cpu = {"device": torch.device("cpu")} if kwargs.get("device") else {}
        drawn = tree_map(move(device), func(*tree_map(move("cpu"), args), **{**kwargs, **on_cpu}))
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn


def run(name: str, device: str) -> list:
    with RandomNumbersOfTheCPU() if device == "cuda" else nullcontext():
        torch.manual_seed(0)
        compute = CASES[name](device)
        compute()  # initializes, and copies constants once
        torch.manual_seed(0)
        return compute()


def check_close(found: list, expected: list, tolerance: float) -> None:
    torch.testing.assert_close(flatten(found), flatten(expected), rtol=tolerance, atol=tolerance)


def test_every_public_name_is_covered_or_excluded():
    named = {*CASES, *" ".join(TESTED.values()).split()}
    beginnings = tuple(" ".join(EXCLUDED.values()).split())
    missing = {name for name in public_names() - named if not name.startswith(beginnings)}
    assert not missing, f"add a case to tests/devices/cases.py, or a reason: {sorted(missing)}"


@pytest.mark.parametrize("name", sorted(CASES))
def test_results_and_gradients_match_the_cpu(name, device):
    check_close(run(name, device), run(name, "cpu"), 2e-4)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_call_waits_for_the_device_at_most_as_often_as_stated(name, pretend):
    torch.manual_seed(0)
    compute = CASES[name](pretend.NAME)
    compute()
    pretend.reset()
    compute()
    found = pretend.synchronizations()
    assert len(found) <= WAITS.get(name, 0), found


@pytest.mark.parametrize("name", sorted(CASES))
def test_results_without_float64_match_the_cpu(name, narrow):
    check_close(run(name, narrow), run(name, "cpu"), 1e-3)


@pytest.mark.parametrize("name", sorted({**HEAD_CASES, **OPTIMIZER_CASES, **LOSS_CASES}))
def test_two_training_steps_run_the_same_kernels(name, pretend):
    step = CASES[name](pretend.NAME)
    step()
    sequences = []
    for _ in range(2):
        with pretend.recorded_kernels() as kernels:
            step()
        sequences.append([(kernel.name, kernel.shapes) for kernel in kernels])
    assert sequences[0] == sequences[1]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_saved_on_the_device_loads_on_either(name, device):
    torch.manual_seed(0)
    head, file, x = build_head(name, 6, 4).to(device).eval(), io.BytesIO(), torch.randn(5, 6)
    torch.save(head.state_dict(), file)
    for place in ("cpu", device):
        other = build_head(name, 6, 4).to(place).eval()
        file.seek(0)
        other.load_state_dict(torch.load(file, map_location=place, weights_only=True))
        torch.testing.assert_close(
            other(x.to(place)).logits.cpu(), head(x.to(device)).logits.cpu(), rtol=1e-4, atol=1e-5
        )
