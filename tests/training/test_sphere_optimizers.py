import pytest

NEW = ["muon", "muon_hyperball", "adamw_hyperball"]


def logged(loop) -> dict[int, dict]:
    """Diagnostics by step, as logged to the trackers."""
    seen: dict[int, dict] = {}

    def log(values, step=None):
        invariant = {key: value for key, value in values.items() if key.startswith("scale_invariant/")}
        if invariant:
            seen[step] = invariant

    loop.accelerator.log = log
    loop.run()
    return seen


def test_step_diagnostics_are_logged_every_n_steps_and_only_adam_has_an_anisotropic_second_moment(make_loop):
    options, anisotropy = {"report_to": ["tensorboard"], "num_train_epochs": 1}, {}
    for optimizer in ("adam_srt", "sgd_mrt", "adam", "sgd"):
        seen = logged(make_loop(optim=optimizer, diagnostics_steps=2, **options))
        assert sorted(seen) == [2, 4]
        assert {"scale_invariant/weight_norm", "scale_invariant/step_angle/hidden"} <= set(seen[2])
        anisotropy[optimizer] = seen[4].get("scale_invariant/anisotropy")
    assert anisotropy["adam"] > 0.1
    assert anisotropy["adam_srt"] < 1e-6


def test_no_step_diagnostics_are_logged_by_default_or_without_scale_invariant_weights(make_loop, make_model):
    loop = make_loop(make_model(norm=False), diagnostics_steps=1, report_to=["tensorboard"], num_train_epochs=1)
    assert logged(loop) == {}
    assert logged(make_loop(optim="adam_srt", num_train_epochs=1, overwrite_output_dir=True)) == {}


@pytest.mark.parametrize("optimizer", NEW)
def test_step_diagnostics_of_other_steps_is_rejected(optimizer, make_loop):
    with pytest.raises(ValueError, match=r"step diagnostics .* are for steps x - lr a / b, which \w+ does not take"):
        make_loop(optim=optimizer, diagnostics_steps=2, report_to=["tensorboard"])


def test_hidden_matrices_keep_their_norm_on_request(make_loop, make_model):
    model = make_model(norm=False)
    before = model.hidden.weight.norm().item()
    make_loop(model, optim="adamw_hyperball", hyperball_on="matrices", learning_rate=0.1, num_train_epochs=1).run()
    assert model.hidden.weight.norm().item() == pytest.approx(before, rel=1e-5)
