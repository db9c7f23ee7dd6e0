import json

import pytest
from reproduction.layers import compare_layers, read_layers


def layer(mass: float, p_value: float, drop: float) -> dict[str, float]:
    return {"mass": mass, "sign_p_value_adjusted": p_value, "reset_accuracy": 1 - drop, "drop": drop}


def test_layers_with_a_projection_have_the_relative_loss_of_a_reset(tmp_path):
    # The folders of both recipes: two convolutions, and a classifier that is not projected
    projected = {name: {"mass": mass, "sign_p_value_adjusted": 0.01} for name, mass in (("conv1", 1.0), ("conv2", 0.5))}
    robustness = {name: {"snapshots": {"0": 0.4, "1": 0.8}} for name in ("conv1", "conv2", "classifier")}
    for name, content in (
        ("projections/projections", {"layers": projected}),
        ("reset/reinitialization", {"accuracy": 0.8, "layers": robustness}),
    ):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir()
        path.write_text(json.dumps(content))
    found = read_layers(tmp_path)
    assert list(found) == ["conv1", "conv2"]
    assert found["conv1"] == {"mass": 1.0, "sign_p_value_adjusted": 0.01, "reset_accuracy": 0.4, "drop": 0.5}


def test_the_rank_correlation_is_that_of_bias_and_loss():
    masses, losses = (0.1, 0.6, 0.8, 0.5), (0.9, 0.1, 0.3, 0.2)
    layers = {name: layer(mass, 0.5, loss) for name, mass, loss in zip("abcd", masses, losses, strict=True)}
    # Ranks of |mass - 1/2|: 4, 2, 3, 1; of the loss: 4, 1, 3, 2. 1 - 6 * (0 + 1 + 0 + 1) / (4 * 15).
    assert compare_layers(layers)["layers/rank_correlation"] == pytest.approx(0.8)


def test_the_mean_loss_is_taken_with_and_without_bias_if_there_are_such_layers():
    layers = {"a": layer(0.9, 0.01, 0.8), "b": layer(0.1, 0.04, 0.4), "c": layer(0.6, 0.05, 0.3)}
    found = compare_layers(layers)
    assert (found["layers/drop_biased"], found["layers/drop_unbiased"]) == pytest.approx((0.6, 0.3))
    biased = {name: layer(0.9 + 0.01 * number, 0.01, 0.5 + 0.1 * number) for number, name in enumerate("abc")}
    assert "layers/drop_unbiased" not in compare_layers(biased)
