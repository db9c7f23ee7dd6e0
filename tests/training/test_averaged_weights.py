import copy

import pytest
import torch

from hf_sphere.training import RecipeArguments

# The data is 40 images in batches of 8: 5 steps per epoch.


def averaged(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.trained_model.state_dict().items()}


def test_average_is_the_exponential_moving_average_of_the_steps(make_loop, make_model):
    loop = make_loop(make_model(), num_train_epochs=2, ema_decay=0.8, learning_rate=0.1)
    steps = []
    original = loop.average.update_parameters

    def record(model) -> None:
        steps.append({name: value.double().clone() for name, value in model.state_dict().items()})
        original(model)

    loop.average.update_parameters = record
    loop.run()
    expected = steps[0]
    for step in steps[1:]:
        expected = {name: 0.8 * expected[name] + 0.2 * step[name] for name in expected}
    del expected["norm.num_batches_tracked"]
    for name, value in expected.items():
        torch.testing.assert_close(averaged(loop)[name].double(), value, rtol=1e-5, atol=1e-6)


def test_averaged_model_is_evaluated_and_saved(make_loop, make_model):
    evaluated, saved = [], []

    def evaluate(model) -> dict[str, float]:
        evaluated.append(model)
        return {"accuracy": float(len(evaluated))}

    loop = make_loop(
        make_model(), evaluate=evaluate, loop={"save_best": saved.append}, num_train_epochs=2, ema_decay=0.5
    )
    loop.run()
    assert [model is loop.average.module for model in evaluated + saved] == [True] * 4


def test_training_itself_does_not_depend_on_the_average(make_loop, make_model, tmp_path):
    options = {"model": make_model(dropout=0.0), "num_train_epochs": 2}
    with_average = make_loop(**copy.deepcopy(options), ema_decay=0.9, output_dir=str(tmp_path / "averaged"))
    plain = make_loop(**options, output_dir=str(tmp_path / "plain"))
    for loop in (plain, with_average):
        loop.run()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(with_average.model.state_dict()[name], value)


def test_resumed_average_equals_that_of_an_uninterrupted_run(make_loop, make_model, tmp_path):
    unbroken = make_loop(make_model(), num_train_epochs=3, ema_decay=0.9, output_dir=str(tmp_path / "unbroken"))
    unbroken.run()
    make_loop(make_model(), num_train_epochs=3, ema_decay=0.9, stop_after_steps=7, save_steps=7).run()
    resumed = make_loop(make_model(seed=1), num_train_epochs=3, ema_decay=0.9, resume_from_checkpoint="latest")
    resumed.run()
    for name, value in averaged(unbroken).items():
        assert torch.equal(averaged(resumed)[name], value)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_decay_outside_the_unit_interval_is_rejected(decay):
    with pytest.raises(ValueError, match=f"ema_decay must be above 0 and below 1; got {decay}"):
        RecipeArguments(output_dir="run", ema_decay=decay)
