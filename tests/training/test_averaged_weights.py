import torch

# The data is 40 images in batches of 8: 5 steps per epoch.


def averaged(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.trained_model.state_dict().items()}


def test_average_of_the_steps_is_evaluated_and_saved_and_does_not_change_the_training(make_loop, make_model, tmp_path):
    evaluated, saved = [], []

    def evaluate(model) -> dict[str, float]:
        evaluated.append(model)
        return {"accuracy": float(len(evaluated))}

    options = {"num_train_epochs": 2, "learning_rate": 0.1}
    plain = make_loop(make_model(dropout=0.0), output_dir=str(tmp_path / "plain"), **options)
    plain.run()
    options |= {"evaluate": evaluate, "loop": {"save_best": saved.append}}
    loop = make_loop(make_model(dropout=0.0), ema_decay=0.8, **options)
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
    assert [model is loop.average.module for model in evaluated + saved] == [True] * 4
    for name, value in plain.model.state_dict().items():
        assert torch.equal(loop.model.state_dict()[name], value)


def test_resumed_average_equals_that_of_an_uninterrupted_run(make_loop, make_model, tmp_path):
    unbroken = make_loop(make_model(), num_train_epochs=3, ema_decay=0.9, output_dir=str(tmp_path / "unbroken"))
    unbroken.run()
    make_loop(make_model(), num_train_epochs=3, ema_decay=0.9, stop_after_steps=7, save_steps=7).run()
    resumed = make_loop(make_model(seed=1), num_train_epochs=3, ema_decay=0.9, resume_from_checkpoint="latest")
    resumed.run()
    for name, value in averaged(unbroken).items():
        assert torch.equal(averaged(resumed)[name], value)
