import json
import math

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn

from hf_sphere.hyperplanes import projection_statistics
from hf_sphere.hyperplanes.projections import mass_band, projection_cdf, sign_test


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def statistics_of(weight, **options):
    """Statistics of a single layer with these filters."""
    return projection_statistics(linear(weight), "linear", **options).layers[""]


def test_values_match_the_reference_implementation_and_p_values_are_those_of_normalized_projections(root):
    # The trained network of the golden file
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(12, 16, 1), nn.ReLU(), nn.Conv2d(16, 20, 3), nn.ReLU()]
    model = nn.ModuleDict({"features": nn.Sequential(*layers)})
    tensors = load_file(root / "tests" / "golden" / "projections.safetensors")
    model.load_state_dict({name[8:]: tensor for name, tensor in tensors.items() if name.startswith("trained.")})
    known = json.loads((root / "tests" / "golden" / "projections.json").read_text())
    p_values = []
    for kind in ("raw", "normalized"):
        found, expected = projection_statistics(model, normalize=kind == "normalized"), known[kind]
        cells = [expected["0"]["0"], expected["0"]["1"], expected["1"]["0"], expected["net"]]
        for ours, theirs in zip([*found.layers.values(), found.net], cells, strict=True):
            for key in ("projections", "mean", "mass"):
                assert getattr(ours, key) == pytest.approx(theirs[key], abs=1e-6), key
        p_values.append([(layer.ks_p_value, layer.sign_p_value) for layer in found.layers.values()])
    assert p_values[0] == p_values[1]


@pytest.mark.parametrize("initialize", [nn.init.normal_, lambda weight: weight], ids=["normal", "torch default"])
def test_p_values_are_uniform_for_random_initializations(initialize):
    torch.manual_seed(3)
    layers = [nn.Conv2d(2 + number % 9, 40, 3, bias=False) for number in range(200)]
    for layer in layers:
        initialize(layer.weight)
    statistics = projection_statistics(nn.ModuleList(layers))
    p_values = [layer.ks_p_value for layer in statistics.layers.values()]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.01
    assert min(layer.ks_p_value_adjusted for layer in statistics.layers.values()) > 0.05
    # The sign test is discrete and therefore conservative under the null.
    assert np.mean([layer.sign_p_value <= 0.05 for layer in statistics.layers.values()]) <= 0.1


def test_a_biased_layer_is_detected_among_unbiased_ones():
    model = nn.Sequential(*(nn.Conv2d(16, 64, 3) for _ in range(4)))
    for layer in model:
        nn.init.normal_(layer.weight)
    model[2].weight.data -= 0.2
    statistics = projection_statistics(model)
    found = {name for name, layer in statistics.layers.items() if layer.ks_p_value_adjusted < 1e-6}
    assert found == {name for name, layer in statistics.layers.items() if layer.sign_p_value_adjusted < 1e-6} == {"2"}
    assert statistics.layers["2"].mass > statistics.layers["2"].null_mass_high
    assert statistics.net.ks_p_value < 1e-6
    assert "biased to negative projections" in str(statistics)
    model[2].weight.data *= -1
    assert "biased to positive projections" in str(projection_statistics(model))


def test_network_statistics_pool_layers_of_any_dimension():
    model = nn.Sequential(nn.Conv2d(1, 200, (1, 2)), nn.Conv2d(200, 200, 3), nn.Conv2d(200, 30, (2, 1)))
    for layer in model:
        nn.init.normal_(layer.weight)
    net = projection_statistics(model).net
    assert net.num_filters == len(net.projections) == 430
    assert 0.01 < net.ks_p_value == net.ks_p_value_adjusted


weights = st.integers(0, 2**31).map(
    lambda seed: torch.randn(6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
)


@given(weights, st.floats(-140, 140), st.permutations(range(8)))
def test_projections_are_opposite_for_opposite_filters_of_any_norm_and_order_of_the_weights(weight, exponent, order):
    ours, other = statistics_of(weight), statistics_of(-weight[:, order] * 10.0**exponent)
    assert other.projections == pytest.approx([-value for value in ours.projections], abs=1e-12)
    assert (other.num_dead, other.mass) == (0, pytest.approx(1 - ours.mass))
    assert other.sign_p_value == ours.sign_p_value


def test_dead_filters_are_counted_and_excluded():
    weight = torch.randn(5, 4)
    expected = statistics_of(weight[[0, 2, 4]])
    weight[[1, 3]] = 0
    layer = statistics_of(weight)
    assert (layer.num_filters, layer.num_dead, layer.dead) == (5, 2, [1, 3])
    for name in ("projections", "mean", "mass", "ks_p_value", "sign_p_value", "null_mass_low"):
        assert getattr(layer, name) == getattr(expected, name)


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 3), (0, 3), (3, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_dead_filters_has_no_statistics(inputs, outputs):
    dead = linear(torch.zeros(outputs, inputs))
    statistics = projection_statistics(nn.Sequential(dead, nn.Linear(2, 5)), "linear")
    layer = statistics.layers["0"]
    assert (layer.num_filters, layer.num_dead, layer.dim) == (outputs, outputs, inputs)
    assert (layer.projections, layer.mean, layer.mass, layer.null_mass_low, layer.ks_p_value) == ([], *[None] * 4)
    assert statistics.net.num_filters - statistics.net.num_dead == len(statistics.net.projections) == 5
    assert "no live filters" not in str(statistics)
    assert "no live filters" in str(projection_statistics(dead, "linear"))
    assert "NaN" not in json.dumps(statistics.to_dict())


def test_a_single_filter_is_supported_and_equal_weights_have_the_largest_projection():
    layer = statistics_of(torch.tensor([[1.0, 2.0, -5.0]]))
    assert layer.projections == pytest.approx([-2 / math.sqrt(90)])
    assert (layer.mass, layer.sign_p_value) == (1, 1)
    assert layer.ks_p_value == pytest.approx(1 - abs(layer.projections[0]), abs=1e-12)  # N = 3 is uniform
    (largest,) = statistics_of(torch.full((1, 7), 0.1)).projections
    assert 1 - 1e-15 <= largest <= 1


def test_projections_in_one_dimension_are_signs():
    statistics = projection_statistics(linear(torch.tensor([[2.0], [-1.0], [-3.0]])), "linear")
    layer = statistics.layers[""]
    assert (layer.projections, layer.sign_p_value) == ([1, -1, -1], 1)
    assert layer.ks_p_value is layer.ks_p_value_adjusted is statistics.net.ks_p_value is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_upcast_to_double_in_chunks(dtype, monkeypatch):
    weight = torch.randn(4, 3000).mul_(100).to(dtype)  # the sum of squares overflows float16
    expected = statistics_of(weight.double()).projections
    assert statistics_of(weight).projections == expected
    monkeypatch.setattr("hf_sphere.hyperplanes.layers.NUMBERS_AT_A_TIME", 100)
    assert statistics_of(weight).projections == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_error_for_non_finite_weights_names_the_layer(value):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data[1, 2] = value
    with pytest.raises(ValueError, match=f"1 has a weight that is {value}"):
        projection_statistics(model, "linear")


def test_zero_projections_count_for_neither_sign():
    zero_sum, positive = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    weight = torch.cat([zero_sum.repeat(60, 1), positive.repeat(30, 1), -positive.repeat(10, 1)])
    statistics = projection_statistics(linear(weight), "linear")
    assert statistics.net.mass == 0.7
    assert "biased to positive" in str(statistics)
    assert str(statistics).endswith("60 of the 100 projections are 0, which counts for neither side.")
    statistics = projection_statistics(linear(-weight), "linear")
    assert "biased to negative" in str(statistics)
    assert max(map(len, str(statistics).splitlines())) <= 100


def test_the_table_fits_a_terminal_and_statistics_are_saved_as_json(tmp_path):
    model = nn.ModuleDict({"a_long_name_" * 4: nn.Conv2d(3, 5, 3), "short": nn.Linear(1, 2)})
    model["short"].weight.data = torch.tensor([[1e8], [0.0]])
    statistics = projection_statistics(model, "all", normalize=False)
    lines = str(statistics).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 6
    assert "projections=" not in repr(statistics)
    statistics.save(tmp_path / "projections.json")
    assert json.loads((tmp_path / "projections.json").read_text()) == statistics.to_dict()


POINTS = np.linspace(-1, 1, 41)


def test_two_dimensions_follow_the_arcsine_law_and_three_the_uniform_law():
    np.testing.assert_allclose(projection_cdf(POINTS, 2), 0.5 + np.arcsin(POINTS) / math.pi, atol=1e-14)
    np.testing.assert_allclose(projection_cdf(POINTS, 3), (1 + POINTS) / 2, atol=1e-15)


@pytest.mark.parametrize("dim", [9, 576, 25_088, 10**7])
def test_the_cdf_matches_the_integrated_density(dim):
    """The density of the cosine is proportional to (1 - p^2)^((N-3)/2); integrated with 40 digits."""
    with mpmath.workdps(40):
        power = mpmath.mpf(dim - 3) / 2
        norm = mpmath.beta(mpmath.mpf(1) / 2, mpmath.mpf(dim - 1) / 2)
        for scaled in (-5, -1, -0.01, 0, 0.3, 2):
            p = scaled / math.sqrt(dim + 20)
            # quad over a finite interval in units of the standard deviation, starting at the mode, zero
            inside = mpmath.quad(lambda x: (1 - x**2) ** power, mpmath.linspace(0, p, 6)) / norm
            expected = float(mpmath.mpf(1) / 2 + inside)
            assert projection_cdf(np.array(p), dim) == pytest.approx(expected, rel=1e-8, abs=1e-13)


@pytest.mark.parametrize("dim", [2, 3, 4, 9])
def test_uniform_weights_nearly_follow_the_distribution(dim):
    weights = np.random.default_rng(dim).uniform(-1, 1, (200_000, dim))
    projections = weights.sum(1) / (np.linalg.norm(weights, axis=1) * math.sqrt(dim))
    distance = scipy.stats.kstest(projection_cdf(projections, dim), "uniform").statistic
    assert distance < 0.06 / dim + 0.003  # 0.003 is sampling error: the KS statistic at level 0.05 or so


@given(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), max_size=60))
def test_the_sign_test_is_a_binomial_test_of_nonzero_values(values):
    negative, positive = values.count(-1.0), values.count(2.0)
    if negative + positive == 0:
        assert sign_test(np.array(values)) is None
    else:
        expected = scipy.stats.binomtest(negative, negative + positive).pvalue
        assert sign_test(np.array(values)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [1, 6, 20, 64, 501])
def test_the_mass_band_is_the_narrowest_with_95_percent_coverage(count):
    low, high = mass_band(count)
    inside = [math.comb(count, k) * 0.5**count for k in range(count + 1) if low <= k / count <= high]
    narrower = [math.comb(count, k) * 0.5**count for k in range(count + 1) if low < k / count < high]
    assert sum(inside) >= 0.95
    assert sum(narrower) < 0.95
    assert low + high == pytest.approx(1)
