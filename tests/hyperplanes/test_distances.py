import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from hf_sphere.hyperplanes import LayerDistance, distance_from_initialization
from hf_sphere.utils.snapshots import Snapshot


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 2))


def changed(model, factor):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data *= factor
    return other


def test_values_match_the_reference_implementation(root):
    folder = root / "tests" / "golden"
    known = json.loads((folder / "projections.json").read_text())["raw"]
    tensors = load_file(folder / "projections.safetensors")
    initial, trained = (
        {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(part)}
        for part in ("init", "trained")
    )
    distances = distance_from_initialization(trained, initial).layers
    cells = {"features.0": known["0"]["0"], "features.2": known["0"]["1"], "features.7": known["1"]["0"]}
    assert distances.keys() == cells.keys()
    for name, cell in cells.items():
        assert distances[name].l2 == pytest.approx(cell["l2_dist"], abs=1e-6)
        assert distances[name].l_inf == pytest.approx(cell["l_inf_dist"], abs=1e-6)


def test_a_layer_initialized_with_zeros_has_absolute_distances(model):
    initial = copy.deepcopy(model)
    initial[0].weight.data.zero_()
    distances = distance_from_initialization(model, initial).layers
    weight = model[0].weight.detach().double()
    assert distances["0"] == LayerDistance(
        pytest.approx(weight.norm().item()), pytest.approx(weight.abs().max().item()), relative=False
    )
    assert distances["1"] == LayerDistance(0, 0, relative=True)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_weights_has_distance_zero():
    for layer in (nn.Linear(0, 3), nn.Linear(3, 0)):
        distances = distance_from_initialization(layer, copy.deepcopy(layer), "linear")
        assert distances.layers[""] == LayerDistance(0, 0, relative=False)


def test_weight_sources_and_dtypes_can_be_mixed(model, tmp_path):
    save_model(model, str(tmp_path / "model.safetensors"))
    trained = changed(model, 1.5)
    expected = distance_from_initialization(trained, model, "all").to_dict()
    assert distance_from_initialization(trained, tmp_path, "all").to_dict() == expected
    assert distance_from_initialization(trained.state_dict(), model, "all").to_dict() == expected
    snapshot = Snapshot(tmp_path / "model.safetensors", 0)
    assert distance_from_initialization(trained, snapshot, "all").to_dict() == expected
    half = distance_from_initialization(copy.deepcopy(model).bfloat16(), model, "all").layers
    assert all(0 < layer.l2 < 0.01 for layer in half.values())


def test_other_architectures_and_weights_that_are_not_finite_are_named(model):
    other, infinite = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 5, 3), nn.Linear(4, 2)), copy.deepcopy(model)
    infinite[1].weight.data[0] = torch.nan
    missing = r"only one of the model and its initialization has 1\."
    for pair, message in (
        ((model, other), r"1 has filters of shape \(4, 27\), but \(5, 27\)"),
        ((model, model[:1]), missing),
        ((model[:1], model), missing),
        ((infinite, model), "1 has a weight that is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            distance_from_initialization(*pair)


def test_the_table_has_a_row_per_layer(model):
    lines = str(distance_from_initialization(changed(model, 1.25), model, "all")).splitlines()
    assert [line.split() for line in lines[::3]] == [["l2", "l_inf", "relative"], ["2", "0.25", "0.25", "True"]]
