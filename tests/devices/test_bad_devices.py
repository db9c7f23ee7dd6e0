import pytest
import torch

from hf_sphere.distributions import PowerSpherical, VonMisesFisher
from hf_sphere.geometry import exp_map, geodesic_distance, slerp
from hf_sphere.losses import ArcFaceLoss, InfoNCELoss, SupConLoss
from hf_sphere.metrics import alignment, retrieval_scores, score_queries
from hf_sphere.nn import (
    AngularLinear,
    PoleRegression,
    PrototypicalClassifier,
    SphericalLinear,
    Spherization,
    build_head,
)
from hf_sphere.nn.heads import HEADS
from hf_sphere.search import NeighborSearch
from hf_sphere.utils.texts import shortage

X = torch.nn.functional.normalize(torch.arange(1.0, 25.0).reshape(4, 6).cos(), dim=-1)
LABELS, KAPPA = torch.tensor([0, 1, 0, 1]), torch.ones(4)

MIXED = {
    **{f"head {name}": lambda d, name=name: build_head(name, 6, 3).to(d)(X) for name in HEADS},
    "labels": lambda d: build_head("cosine", 6, 3).to(d)(X.to(d), LABELS),
    "loss": lambda d: ArcFaceLoss(6, 3).to(d)(X, LABELS),
    "InfoNCE": lambda d: InfoNCELoss()(X.to(d), LABELS),
    "SupCon": lambda d: SupConLoss()(X, LABELS.to(d)),
    "layer": lambda d: SphericalLinear(6, 3).to(d)(X),
    "angular layer": lambda d: AngularLinear(6, 3).to(d)(X),
    "pole": lambda d: PoleRegression(6, (0.0, 1.0)).to(d)(X),
    "targets": lambda d: PoleRegression(6, (0.0, 1.0)).to(d)(X.to(d), KAPPA),
    "prototypes": lambda d: PrototypicalClassifier()(X.to(d), X[:, None]),
    "distance": lambda d: geodesic_distance(X, X.to(d)),
    "map": lambda d: exp_map(X.to(d), X),
    "slerp": lambda d: slerp(X.to(d), X.to(d), KAPPA),
    "density": lambda d: VonMisesFisher(X.to(d), KAPPA.to(d)).log_prob(X),
    "power spherical": lambda d: PowerSpherical(X.to(d), KAPPA.to(d)).log_prob(X),
}
"""Calls with tensors of two devices."""


@pytest.mark.parametrize("call", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_are_refused(call, device):
    with pytest.raises((ValueError, RuntimeError), match=r"must be on one device|on the same device"):
        call(device)


def test_a_number_on_the_cpu_is_no_second_device(device):
    distribution = VonMisesFisher(X.to(device), torch.tensor(3.0))
    assert distribution.log_prob(X.to(device)).device.type == device


@pytest.mark.parametrize("metric", [alignment, retrieval_scores, score_queries])
def test_metrics_accept_labels_on_the_cpu(metric, device):
    assert str(metric(X.to(device), LABELS)) == str(metric(X, LABELS))


def test_a_search_accepts_queries_of_another_device(device):
    search = NeighborSearch(X, kind="torch")
    assert torch.equal(search.search(X.to(device), 2)[1].cpu(), search.search(X, 2)[1])


def test_a_missing_operation_or_float64_is_named_with_what_needs_it(pretend):
    layer, x = Spherization(6).to(pretend.NAME), X.to(pretend.NAME)
    for context, call, lacking in (
        (pretend.without_operations("aten::sigmoid"), lambda: layer(x), "lacks aten::sigmoid"),
        (pretend.without_float64(), x.double, "lacks float64"),
    ):
        with context, pytest.raises((RuntimeError, TypeError)) as error:
            call()
        for part in (lacking, "PYTORCH_ENABLE_MPS_FALLBACK=1", "ACCELERATE_USE_CPU=true"):
            assert part in shortage(error.value)


@pytest.mark.parametrize(
    ("message", "operation"),
    [
        ("The operator 'aten::_linalg_svd.U' is not currently implemented for the MPS device.", "aten::_linalg_svd"),
        ("Could not run 'aten::cumsum.out' with arguments from the 'XPU' backend.", "aten::cumsum"),
        ("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.", "float64"),
        ("Required aspect fp64 is not supported on the device", "fp64"),
        ("shape mismatch", None),
        ("Could not run 'aten::add' with arguments from the 'SparseCPU' backend.", None),
    ],
)
def test_the_messages_of_other_devices_are_understood_and_other_errors_are_none(message, operation):
    found = shortage(RuntimeError(message))
    assert found is None if operation is None else f"the device lacks {operation}: {message[:9]}" in found


def test_integers_that_need_float64_are_refused_without(narrow):
    with pytest.raises((TypeError, RuntimeError), match="float64"):
        retrieval_scores((10 * X).long().to(narrow), LABELS)
