import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import make_batches, make_model
from torch import nn

from hf_sphere.nn import HeadOutput
from hf_sphere.optim.optimizers import optimizer_names
from hf_sphere.training import (
    CheckpointError,
    TrainingDivergedError,
    TrainingInterruptedError,
    TrainingLoop,
    loop as loop_module,
)
from hf_sphere.training.output_dir import list_checkpoints
from hf_sphere.utils.files import write_manifest

PLATEAU = "reduce_lr_on_plateau"

# The data is 40 images in batches of 8: 5 steps per epoch.


def weights(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


def everything(loop: TrainingLoop) -> dict:
    """Final state of a run, except its duration."""
    return {
        "weights": weights(loop),
        "average": {name: value.clone() for name, value in loop.trained_model.state_dict().items()},
        "optim": loop.optimizer.state_dict(),
        "scheduler": loop.scheduler.state_dict(),
        "history": loop.state.history,
        "best": (loop.state.best_metric, loop.state.best_epoch),
        "random numbers": torch.get_rng_state(),
    }


def differences(first, second, name: str = "") -> list[str]:
    """Names of the entries that are not bitwise equal in two nested structures."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [d for key in first for d in differences(first[key], second[key], f"{name}/{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [d for index, (a, b) in pairs for d in differences(a, b, f"{name}/{index}")]
    same = torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
    return [] if same else [name]


def checkpoints(loop: TrainingLoop) -> list[str]:
    return [path.name for path in list_checkpoints(loop.output_dir)]


def scores(*values: float) -> Callable[[nn.Module], dict[str, float]]:
    """Evaluation that returns the given accuracies in order."""
    left = iter(values)
    return lambda model: {"accuracy": next(left)}


class Signalling:
    """Batches that send signals to this process before one of them is yielded."""

    def __init__(self, batches, *, epoch: int, number: int, signals: tuple[int, ...] = (signal.SIGINT,)) -> None:
        self.batches, self.at, self.signals = batches, (epoch, number), signals
        self.num_examples = batches.num_examples

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(self.batches.epoch(epoch, start=start), start):
            if (epoch, number) == self.at:
                for which in self.signals:
                    os.kill(os.getpid(), which)
            yield batch


class Noting:
    """Batches that note how many different images each epoch yields."""

    def __init__(self, batches) -> None:
        self.batches, self.seen = batches, {}

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        rows = self.batches.epoch_rows(epoch)[start * self.batches.batch_size :]
        self.seen[epoch] = len(rows.unique())
        yield from self.batches.epoch(epoch, start=start)


@pytest.mark.parametrize("bf16", [True, False])
def test_training_reduces_the_loss_on_learnable_data_also_in_bf16(make_loop, bf16):
    model = make_model(dropout=0.0)
    options = {"num_train_epochs": 15, "learning_rate": 0.01, "save_epochs": 15, "bf16": bf16}
    history = make_loop(model, make_batches(augment=False), **options).run().history
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    assert model.hidden_dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


SCHEDULES = {"adam": "constant", "sgd": "reduce_lr_on_plateau"}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", *optimizer_names()])
def test_run_resumed_mid_epoch_is_bitwise_equal_to_an_uninterrupted_one(make_loop, tmp_path, optimizer):
    options = {"optim": optimizer, "lr_scheduler_type": SCHEDULES.get(optimizer, "cosine"), "learning_rate": 0.02}
    options |= {"lr_patience": 0} if optimizer == "sgd" else {"ema_decay": 0.9}
    options |= {"num_train_epochs": 4, "weight_decay": 0.01, "gradient_accumulation_steps": 2}
    unbroken = make_loop(make_model(seed=1), output_dir=str(tmp_path / "unbroken"), **options)
    unbroken.run()
    expected = everything(unbroken)

    # 3 steps per epoch, of 2, 2 and 1 batches: step 5 is in the middle of the second epoch.
    broken = make_loop(make_model(seed=1), output_dir=str(tmp_path / "broken"), save_steps=5, **options)
    broken.run()
    resumed = make_loop(
        make_model(seed=2),
        output_dir=str(tmp_path / "resumed"),
        resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-5"),
        **options,
    )
    assert (resumed.state.step, resumed.state.batch) == (5, 4)
    resumed.run()
    assert differences(expected, everything(resumed)) == []


def test_run_resumed_after_a_signal_max_steps_or_its_end_is_bitwise_equal_to_an_uninterrupted_one(make_loop, tmp_path):
    unbroken = make_loop(num_train_epochs=3, output_dir=str(tmp_path / "unbroken"))
    unbroken.run()
    expected = everything(unbroken)
    with pytest.raises(TrainingInterruptedError):
        make_loop(batches=Signalling(make_batches(), epoch=1, number=2), num_train_epochs=3).run()
    resumed = make_loop(num_train_epochs=3, resume_from_checkpoint="latest")
    resumed.run()
    assert differences(expected, everything(resumed)) == []
    first, options = make_model(), {"num_train_epochs": 3, "output_dir": str(tmp_path / "steps")}
    stopped = make_loop(first, stop_after_steps=7, **options)
    state = stopped.run()
    assert (state.step, state.epoch, state.batch, checkpoints(stopped)[-1]) == (7, 1, 2, "checkpoint-7")
    assert state.history[-1]["epoch"] == pytest.approx(1.4)
    resumed = make_loop(model := make_model(), resume_from_checkpoint="latest", **options)
    assert resumed.state.seconds == state.seconds
    resumed.run()
    assert (first.observer.epochs, model.observer.epochs) == ([0, 1], [1, 2])
    finished = make_loop(resume_from_checkpoint="latest", **options)
    finished.run()
    for loop in (resumed, finished):
        assert differences(expected["weights"], weights(loop)) == []
    other = make_loop(make_model(seed=2), num_train_epochs=3, output_dir=str(tmp_path / "other"))
    other.run()
    assert "/hidden.weight" in differences(expected["weights"], weights(other))


def plain_training(model: nn.Module, groups: list[list[dict]], lr: float) -> None:
    """Manual SGD with one step per group of batches, on the mean of their losses."""
    for group in groups:
        loss = sum(model(**batch).loss for batch in group) / len(group)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient


SGD = {"optim": "sgd", "momentum": 0.0, "learning_rate": 0.1, "num_train_epochs": 1}
PLAIN_MODEL = {"dropout": 0.0, "norm": False}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_epoch_matches_plain_sgd_also_with_accumulation_and_a_short_last_group(make_loop, accumulation):
    loop = make_loop(make_model(**PLAIN_MODEL), gradient_accumulation_steps=accumulation, **SGD)
    loop.run()
    expected = make_model(**PLAIN_MODEL)
    batches = list(make_batches().epoch(0))
    plain_training(expected, [batches[n : n + accumulation] for n in range(0, 5, accumulation)], 0.1)
    torch.testing.assert_close(weights(loop), expected.state_dict())


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    ("count", "size", "part", "parts", "steps"), [(64, 16, 8, 2, 4), (36, 36, 8, 5, 1), (16, 16, 6, 3, 1)]
)
@pytest.mark.settings(summed=lambda summed: {"summed": summed}, part=lambda part: {"part": part})
def test_accumulated_batches_match_one_full_batch_by_their_numbers_of_examples(
    make_loop, tmp_path, count, size, part, parts, steps, summed
):
    """The batches of the last case are 6 + 6 + 4 of 16 images."""
    sgd, make = SGD | ({"learning_rate": 0.01} if summed else {}), Summed if summed else lambda model: model
    whole = make_loop(make(make_model(**PLAIN_MODEL)), make_batches(count, size, augment=False), **sgd)
    options = {"gradient_accumulation_steps": parts, "output_dir": str(tmp_path / "parts"), **sgd}
    divided = make_loop(make(make_model(**PLAIN_MODEL)), make_batches(count, part, augment=False), **options)
    states = [loop.run() for loop in (whole, divided)]
    assert [state.step for state in states] == [steps, steps]
    torch.testing.assert_close(weights(whole), weights(divided))
    losses = [state.history[0]["train_loss"] for state in states]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Summed(nn.Module):
    """Classifier whose loss is the sum over the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.loss_reduction = "sum"
        self.model = model

    def forward(self, pixel_values, labels):
        output = self.model(pixel_values, labels)
        return HeadOutput(logits=output.logits, loss=output.loss * len(labels))


def test_summed_loss_matches_mean_loss_with_a_scaled_learning_rate_and_is_reported_as_the_mean(make_loop, tmp_path):
    """The means of the metrics of an epoch are over its examples."""
    plain = make_model(**PLAIN_MODEL)
    outputs = [(plain(**batch), batch["labels"]) for batch in make_batches(36, 8).epoch(0)]
    (expected,) = make_loop(plain, make_batches(36, 8), **SGD | {"learning_rate": 0.0}).run().history
    total = sum(output.loss.item() * len(labels) for output, labels in outputs)
    correct = sum((output.logits.argmax(-1) == labels).sum().item() * len(labels) for output, labels in outputs)
    assert expected["train_loss"] == pytest.approx(total / 36)
    assert expected["train_correct"] == pytest.approx(correct / 36)
    for rate, count in ((0.0, 36), (SGD["learning_rate"], 40)):
        mean = make_loop(
            make_model(**PLAIN_MODEL),
            make_batches(count, 8),
            overwrite_output_dir=True,
            **SGD | {"learning_rate": rate},
        )
        options = SGD | {"learning_rate": rate / 8, "output_dir": str(tmp_path / f"sum {count}")}
        summed = make_loop(Summed(make_model(**PLAIN_MODEL)), make_batches(count, 8), **options)
        (of_mean,), (of_sum,) = (loop.run().history for loop in (mean, summed))
        names = ("train_loss", "loss")
        assert [of_sum[name] for name in names] == pytest.approx([of_mean[name] for name in names], rel=1e-5)
        own = {name.removeprefix("model."): value for name, value in weights(summed).items()}
        torch.testing.assert_close(weights(mean), own)


@pytest.mark.parametrize(
    ("options", "bad_at", "step", "last"),
    [
        ({}, (1,), 1, None),
        ({"logging_steps": 1}, (5,), 5, None),
        ({"gradient_accumulation_steps": 2}, (3,), 2, None),
        ({"save_steps": 1}, (8,), 8, 7),
        ({}, (8,), 8, 5),
    ],
)
def test_nonfinite_loss_error_names_the_step_and_the_last_checkpoint_after_which_nothing_is_saved(
    make_loop, options, bad_at, step, last
):
    loop = make_loop(make_model(bad_at=bad_at), **options)
    good = f"The last good checkpoint is {loop.output_dir}/checkpoint-{last}" if last else "There is no checkpoint yet"
    with pytest.raises(TrainingDivergedError, match=f"the loss is not finite at step {step}\\. {good}\\."):
        loop.run()
    assert checkpoints(loop)[-1:] == ([f"checkpoint-{last}"] if last else [])


def test_bad_input_is_refused(make_loop):
    with pytest.raises(ValueError, match=r"metric_for_best_model must be one of .*accuracy.*; got 'nonsense'"):
        make_loop(loop={"metric": "nonsense"}).run()
    with pytest.raises(ValueError, match="there is no training batch"):
        make_loop(batches=make_batches(0))
    model, passes = make_model(), itertools.count(1)
    model.out.weight.register_hook(lambda gradient: gradient * float("nan") if next(passes) == 5 else gradient)
    loop = make_loop(model)  # the loss of the epoch's fifth and last step is still finite
    with pytest.raises(TrainingDivergedError, match=r"the weights are not finite after step 5\. There is no"):
        loop.run()
    loop = make_loop(make_model(bad_at=(2,)), Signalling(make_batches(), epoch=0, number=3))
    with pytest.raises(TrainingDivergedError):
        loop.run()
    assert checkpoints(loop) == []


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_signal_also_repeated_at_once_by_a_launcher_finishes_the_step_and_writes_a_checkpoint(
    make_loop, tmp_path, signals
):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop = make_loop(batches=Signalling(make_batches(), epoch=0, number=2, signals=signals), num_train_epochs=2)
    with pytest.raises(TrainingInterruptedError) as stop:
        loop.run()
    assert checkpoints(loop) == ["checkpoint-3"]
    for words in ("step 3 of 10", str(tmp_path / "run" / "checkpoint-3"), "--resume_from_checkpoint latest"):
        assert words in str(stop.value)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_second_signal_stops_immediately_without_a_checkpoint(make_loop, monkeypatch):
    seconds = itertools.count(100.0, 2.0)  # the clock advances two seconds per call
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: next(seconds))
    loop = make_loop(batches=Signalling(make_batches(), epoch=0, number=2, signals=(signal.SIGINT, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert checkpoints(loop) == []


def test_signal_in_the_last_step_of_an_epoch_keeps_the_evaluation_and_that_of_the_run_lets_it_finish(
    make_loop, tmp_path
):
    with pytest.raises(TrainingInterruptedError):
        make_loop(batches=Signalling(make_batches(), epoch=0, number=4), num_train_epochs=2).run()
    resumed = make_loop(num_train_epochs=2, resume_from_checkpoint="latest")
    assert [entry["epoch"] for entry in resumed.run().history] == [1.0, 2.0]
    last, folder = Signalling(make_batches(), epoch=1, number=4), str(tmp_path / "last")
    assert len(make_loop(batches=last, num_train_epochs=2, output_dir=folder).run().history) == 2


def test_training_runs_outside_the_main_thread_without_a_head_and_restores_signal_handlers(make_loop):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop = make_loop(Unaware(36, 3), num_train_epochs=1, stop_after_steps=99)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join()
    assert loop.state.step == 5  # those of the epoch
    make_loop(num_train_epochs=2, resume_from_checkpoint="latest", model=Unaware(36, 3)).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_early_stopped_run_says_so_once_and_has_a_final_checkpoint_from_which_it_does_not_train(make_loop, caplog):
    caplog.set_level("INFO", "hf_sphere")
    options = {"num_train_epochs": 20, "early_stopping_patience": 2, "save_epochs": 20}
    loop = make_loop(evaluate=scores(0.5, 0.6, 0.6, 0.6, 0.9), **options)
    assert loop.run().epoch == 4
    assert checkpoints(loop) == ["checkpoint-20"]
    stopping = [record.message for record in caplog.records if "stopping" in record.message]
    assert stopping == ["No improvement for 2 epochs; stopping."]
    assert make_loop(evaluate=scores(0.9, 0.9), resume_from_checkpoint="latest", **options).run().epoch == 4


@pytest.mark.parametrize(
    ("values", "higher_is_better", "improved"),
    [([0.5, 0.4, 0.6, 0.6, 0.55], True, [1, 3]), ([0.5, 0.3, 0.4, 0.3, 0.35], False, [1, 2])],
)
@pytest.mark.settings(higher_is_better=lambda higher: {"higher_is_better": higher})
def test_best_model_is_recorded_and_saved_only_if_the_metric_improves(make_loop, values, higher_is_better, improved):
    options = {"num_train_epochs": 5, "early_stopping_patience": 4, "load_best_model_at_end": True, "save_epochs": 9}
    options["loop"], left = {"metric": "score", "higher_is_better": higher_is_better}, iter(values)
    loop = make_loop(evaluate=lambda model: {"score": next(left)}, **options)
    state = loop.run()
    assert (checkpoints(loop), state.epoch) == ([f"checkpoint-{5 * epoch}" for epoch in [*improved, 5]], 5)
    assert (state.best_epoch, state.best_metric) == (improved[-1], values[improved[-1] - 1])


def test_checkpoints_are_saved_by_the_intervals_up_to_the_limit(make_loop, tmp_path):
    for name, options, steps in (
        ("epochs", {"num_train_epochs": 5, "save_epochs": 2}, [10, 20, 25]),  # the end is always saved
        ("steps", {"num_train_epochs": 2, "save_steps": 3}, [3, 5, 6, 9, 10]),
        ("limit", {"num_train_epochs": 4, "save_total_limit": 2}, [15, 20]),
    ):
        loop = make_loop(output_dir=str(tmp_path / name), **options)
        loop.run()
        assert checkpoints(loop) == [f"checkpoint-{step}" for step in steps]


def one_step(make_loop, folder: Path, limit: float | None) -> float:
    """Norm of the first SGD step with learning rate 1, which is the norm of the gradient used."""
    model = make_model(**PLAIN_MODEL)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    options = {"learning_rate": 1.0, "stop_after_steps": 1, "max_grad_norm": limit, "output_dir": str(folder)}
    make_loop(model, **SGD | options).run()
    return (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()


def test_only_a_gradient_above_the_limit_is_clipped(make_loop, tmp_path):
    free, clipped, limited = (one_step(make_loop, tmp_path / str(at), at) for at in (None, 0.01, 1e3))
    assert free > 0.01
    assert clipped == pytest.approx(0.01, rel=1e-3)
    assert limited == pytest.approx(free, rel=1e-6)


class Unaware(nn.Linear):
    """Model without a head."""

    def forward(self, pixel_values, labels):
        logits = super().forward(pixel_values.flatten(1))
        return type("Output", (), {"loss": F.cross_entropy(logits, labels), "logits": logits})


def test_resumed_run_uses_changed_settings(make_loop):
    make_loop(num_train_epochs=1).run()
    resumed = make_loop(num_train_epochs=2, resume_from_checkpoint="latest", learning_rate=1e-5, weight_decay=0.5)
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.0]
    assert resumed.run().history[-1]["learning_rate"] == 1e-5


def drawn(change: str, **options):
    batches = make_batches(**options)
    if change == "digest_of_labels":
        batches.labels = batches.labels.flip(0)
    return batches


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("per_device_train_batch_size", {"per_device_train_batch_size": 16}),
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
        ("seed", {"seed": 1}),
        ("batches_per_epoch", {"batches": {"count": 32}}),
        ("digest_of_images", {"batches": {"rows": torch.arange(1, 41)}}),
        ("class_balanced_sampling", {"batches": {"balanced": True}}),
        ("digest_of_labels", {"batches": {}}),
        ("num_processes", {}),
    ],
)
def test_changing_what_is_drawn_in_the_middle_of_an_epoch_is_rejected(make_loop, change, options):
    first = make_loop(stop_after_steps=4, per_device_train_batch_size=8)
    first.run()
    if change == "num_processes":
        path = first.output_dir / "checkpoint-4" / "trainer_state.json"
        path.write_text(path.read_text().replace('"num_processes": 1', '"num_processes": 2'))
        write_manifest(path.parent)
    if "batches" in options:
        options = {"batches": drawn(change, **options["batches"])}
    with pytest.raises(CheckpointError, match=rf"middle of an epoch with {change} \w+ \(now \w+\).*; resume with"):
        make_loop(**{"per_device_train_batch_size": 8, "resume_from_checkpoint": "latest"} | options)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "step"])
@pytest.mark.settings(schedule=lambda schedule: {"schedule": schedule})
def test_run_resumed_with_other_batches_trains_whole_epochs_and_its_schedule_depends_on_the_epoch(
    make_loop, schedule, tmp_path
):
    options = {"lr_scheduler_type": schedule, "num_train_epochs": 4, "output_dir": str(tmp_path / "first")}
    options |= {"lr_step_epochs": 2} if schedule == "step" else {}
    first = make_loop(**options)
    expected = [entry["learning_rate"] for entry in first.run().history]
    options |= {"resume_from_checkpoint": str(first.output_dir / "checkpoint-10")}
    for batch_size, accumulation, steps in ((4, 1, 10), (16, 1, 3), (8, 3, 2), (20, 2, 1), (8, 1, 5)):
        batches = Noting(make_batches(batch_size=batch_size))
        options["output_dir"] = str(tmp_path / f"{batch_size} {accumulation}")
        resumed = make_loop(batches=batches, gradient_accumulation_steps=accumulation, **options)
        state = resumed.run()
        assert [entry["epoch"] for entry in state.history] == [1, 2, 3, 4]
        assert batches.seen == {2: 40, 3: 40}
        assert state.step == resumed.total_steps == 10 + 2 * steps
        found = [entry["learning_rate"] for entry in state.history]
        assert found == pytest.approx(expected, abs=1e-12)


def test_resumed_run_keeps_the_plateau_decays_in_proportion_to_its_peak_rate_and_adopts_its_options(make_loop):
    options = {"lr_scheduler_type": PLATEAU, "lr_patience": 0}
    first = make_loop(num_train_epochs=3, evaluate=scores(0.9, 0.5, 0.4), **options)
    first.run()
    decayed = first.optimizer.param_groups[0]["lr"]
    assert decayed == pytest.approx(1e-5)
    options |= {"num_train_epochs": 4, "resume_from_checkpoint": "latest"}
    for changes, rate in (({}, decayed), ({"learning_rate": 1e-4}, pytest.approx(1e-6))):
        resumed = make_loop(**options, **changes)
        assert resumed.optimizer.param_groups[0]["lr"] == rate
    resumed = make_loop(**options | {"lr_patience": 3, "lr_gamma": 0.5})
    assert (resumed.scheduler.patience, resumed.scheduler.factor) == (3, 0.5)


@pytest.mark.parametrize(("first", "then"), [("reduce_lr_on_plateau", "cosine"), ("cosine", "reduce_lr_on_plateau")])
def test_resuming_with_or_without_plateau_is_rejected(make_loop, first, then):
    make_loop(num_train_epochs=1, lr_scheduler_type=first).run()
    with pytest.raises(CheckpointError, match="has another lr_scheduler_type; keep it"):
        make_loop(num_train_epochs=2, lr_scheduler_type=then, resume_from_checkpoint="latest")


def test_average_of_the_steps_is_evaluated_and_saved_and_does_not_change_the_training(make_loop, tmp_path):
    evaluated = []

    def evaluate(model) -> dict[str, float]:
        evaluated.append(model)
        return {"accuracy": float(len(evaluated))}

    options = {"num_train_epochs": 2, "learning_rate": 0.1}
    plain = make_loop(make_model(dropout=0.0), output_dir=str(tmp_path / "plain"), **options)
    plain.run()
    loop = make_loop(make_model(dropout=0.0), ema_decay=0.8, evaluate=evaluate, **options)
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
        torch.testing.assert_close(loop.trained_model.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)
    assert [model is loop.average.module for model in evaluated] == [True] * 2
    for name, value in plain.model.state_dict().items():
        assert torch.equal(loop.model.state_dict()[name], value)


# Diagnostics of steps


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


def test_hidden_matrices_keep_their_norm_on_request(make_loop):
    model = make_model(norm=False)
    before = model.hidden.weight.norm().item()
    make_loop(model, optim="adamw_hyperball", hyperball_on="matrices", learning_rate=0.1, num_train_epochs=1).run()
    assert model.hidden.weight.norm().item() == pytest.approx(before, rel=1e-5)
