import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_sphere.data import ImagesFromDisk, ImageShape
from hf_sphere.data.decoding import EncodedImages
from hf_sphere.data.sources import load_splits
from hf_sphere.nn import HeadOutput
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


@pytest.mark.parametrize("bf16", [False, True])
def test_training_reduces_the_loss_on_learnable_data_also_in_bf16(make_loop, make_model, make_batches, bf16):
    model = make_model(dropout=0.0)
    options = {"num_train_epochs": 15, "learning_rate": 0.01, "save_epochs": 15, "bf16": bf16}
    history = make_loop(model, make_batches(augment=False), **options).run().history
    assert history[-1]["train_loss"] < 0.5 * history[0]["train_loss"]
    assert model.hidden_dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "reduce_lr_on_plateau"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_run_resumed_mid_epoch_is_bitwise_equal_to_an_uninterrupted_one(
    make_loop, make_model, tmp_path, optimizer, schedule
):
    options = {"optim": optimizer, "lr_scheduler_type": schedule, "learning_rate": 0.02}
    options |= {"lr_patience": 0} if schedule == "reduce_lr_on_plateau" else {}
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


def test_run_resumed_after_a_signal_or_max_steps_is_bitwise_equal_to_an_uninterrupted_one(
    make_loop, make_model, make_batches, tmp_path
):
    unbroken = make_loop(num_train_epochs=3, output_dir=str(tmp_path / "unbroken"))
    unbroken.run()
    expected = everything(unbroken)
    with pytest.raises(TrainingInterruptedError):
        make_loop(batches=Signalling(make_batches(), epoch=1, number=2), num_train_epochs=3).run()
    resumed = make_loop(num_train_epochs=3, resume_from_checkpoint="latest")
    resumed.run()
    assert differences(expected, everything(resumed)) == []
    options = {"num_train_epochs": 3, "output_dir": str(tmp_path / "steps")}
    make_loop(stop_after_steps=7, **options).run()
    resumed = make_loop(resume_from_checkpoint="latest", **options)
    resumed.run()
    assert differences(expected["weights"], weights(resumed)) == []
    other = make_loop(make_model(seed=2), num_train_epochs=3, output_dir=str(tmp_path / "other"))
    other.run()
    assert "/hidden.weight" in differences(expected["weights"], weights(other))


def test_run_on_image_files_resumes_bitwise_equal_mid_epoch(make_loop, tmp_path):
    rows = load_splits("digits")["train"].select(range(40))
    encoded = EncodedImages(rows, "image", ImageShape(1, 6, 6))
    labels = torch.tensor(rows["label"][:]) % 3

    def loop_on_disk(name: str, **options) -> TrainingLoop:
        batches = ImagesFromDisk(encoded, labels, num_workers=0, batch_size=8, mean=[0.5], std=[0.3], shuffle=True)
        return make_loop(batches=batches, num_train_epochs=2, output_dir=str(tmp_path / name), **options)

    unbroken, broken = loop_on_disk("unbroken"), loop_on_disk("broken", stop_after_steps=7)
    torch.manual_seed(0)
    unbroken.run()
    torch.manual_seed(0)
    broken.run()
    resumed = loop_on_disk("resumed", resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-7"))
    resumed.run()
    assert differences(weights(unbroken), weights(resumed)) == []


def test_resuming_a_finished_run_changes_nothing(make_loop):
    finished = make_loop(num_train_epochs=2)
    finished.run()
    again = make_loop(num_train_epochs=2, resume_from_checkpoint="latest")
    again.run()
    assert differences(weights(finished), weights(again)) == []


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
def test_epoch_matches_plain_sgd_also_with_accumulation_and_a_short_last_group(
    make_loop, make_model, make_batches, accumulation
):
    loop = make_loop(make_model(**PLAIN_MODEL), gradient_accumulation_steps=accumulation, **SGD)
    loop.run()
    expected = make_model(**PLAIN_MODEL)
    batches = list(make_batches().epoch(0))
    plain_training(expected, [batches[n : n + accumulation] for n in range(0, 5, accumulation)], 0.1)
    torch.testing.assert_close(weights(loop), expected.state_dict())


@pytest.mark.parametrize(("count", "size", "parts", "steps"), [(64, 16, 2, 4), (36, 36, 5, 1)])
def test_accumulated_batches_match_one_full_batch_by_their_numbers_of_examples(
    make_loop, make_model, make_batches, tmp_path, count, size, parts, steps
):
    whole = make_loop(make_model(**PLAIN_MODEL), make_batches(count, size, augment=False), **SGD)
    options = {"gradient_accumulation_steps": parts, "output_dir": str(tmp_path / "parts"), **SGD}
    divided = make_loop(make_model(**PLAIN_MODEL), make_batches(count, 8, augment=False), **options)
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


def test_summed_loss_matches_mean_loss_with_a_scaled_learning_rate(make_loop, make_model, make_batches, tmp_path):
    mean = make_loop(make_model(**PLAIN_MODEL), make_batches(40, 8, augment=False), **SGD)
    options = SGD | {"learning_rate": SGD["learning_rate"] / 8, "output_dir": str(tmp_path / "sum")}
    summed = make_loop(Summed(make_model(**PLAIN_MODEL)), make_batches(40, 8, augment=False), **options)
    mean.run(), summed.run()
    torch.testing.assert_close(weights(mean), {name.removeprefix("model."): w for name, w in weights(summed).items()})


@pytest.mark.parametrize("parts", [8, 6])
def test_accumulated_sums_match_the_sum_over_the_full_batch(make_loop, make_model, make_batches, tmp_path, parts):
    """The batches are 8 + 8 or 6 + 6 + 4 of 16 images."""
    options = SGD | {"learning_rate": 0.01}
    whole = make_loop(Summed(make_model(**PLAIN_MODEL)), make_batches(16, 16, augment=False), **options)
    options |= {"gradient_accumulation_steps": math.ceil(16 / parts), "output_dir": str(tmp_path / "parts")}
    pieces = make_loop(Summed(make_model(**PLAIN_MODEL)), make_batches(16, parts, augment=False), **options)
    assert whole.run().step == pieces.run().step == 1
    torch.testing.assert_close(weights(whole), weights(pieces))


def test_summed_loss_is_reported_as_the_mean_over_images(make_loop, make_model, make_batches, tmp_path):
    options = SGD | {"learning_rate": 0.0}
    (mean,) = make_loop(make_model(**PLAIN_MODEL), make_batches(36, 8), **options).run().history
    options |= {"output_dir": str(tmp_path / "sum")}
    (summed,) = make_loop(Summed(make_model(**PLAIN_MODEL)), make_batches(36, 8), **options).run().history
    assert [summed[name] for name in ("train_loss", "loss")] == pytest.approx([mean["train_loss"], mean["loss"]])


def test_training_metrics_of_an_epoch_are_means_over_its_examples(make_loop, make_model, make_batches):
    loop = make_loop(make_model(**PLAIN_MODEL), **SGD | {"learning_rate": 0.0})
    (entry,) = loop.run().history
    outputs = [(make_model(**PLAIN_MODEL)(**batch), batch["labels"]) for batch in make_batches().epoch(0)]
    assert entry["train_loss"] == pytest.approx(sum(output.loss.item() for output, _ in outputs) / 5)
    correct = sum((output.logits.argmax(-1) == labels).sum().item() for output, labels in outputs)
    assert entry["train_correct"] == pytest.approx(correct / 5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bad_pass", [3, 4, 5])
@pytest.mark.parametrize("logging_steps", [1, 50])
def test_nonfinite_loss_error_names_the_step(make_loop, make_model, accumulation, bad_pass, logging_steps):
    loop = make_loop(
        make_model(bad_at=(bad_pass,)), gradient_accumulation_steps=accumulation, logging_steps=logging_steps
    )
    step = math.ceil(bad_pass / accumulation)
    with pytest.raises(TrainingDivergedError, match=f"the loss is not finite at step {step}\\."):
        loop.run()


def test_divergence_error_names_the_last_good_checkpoint(make_loop, make_model, tmp_path):
    loop = make_loop(make_model(bad_at=(8,)), save_steps=2)
    with pytest.raises(TrainingDivergedError) as failure:
        loop.run()
    assert f"The last good checkpoint is {tmp_path / 'run' / 'checkpoint-6'}." in str(failure.value)


def test_bad_input_is_refused(make_loop, make_batches, make_model):
    with pytest.raises(ValueError, match="there is no training batch"):
        make_loop(batches=make_batches(0))
    with pytest.raises(TrainingDivergedError, match="at step 2\\."):
        make_loop(make_model(bad_at=(2, 3, 5))).run()
    with pytest.raises(TrainingDivergedError, match="There is no checkpoint yet"):
        make_loop(make_model(bad_at=(1,))).run()


@pytest.mark.parametrize("save_steps", [1, 2, None])
def test_nothing_is_saved_after_a_nonfinite_loss(make_loop, make_model, save_steps):
    loop = make_loop(make_model(bad_at=(8,)), save_steps=save_steps)
    with pytest.raises(TrainingDivergedError):
        loop.run()
    saved = [path / "model.safetensors" for path in list_checkpoints(loop.output_dir)]
    assert max(int(path.parent.name.split("-")[1]) for path in saved) < 8


def test_signal_after_a_nonfinite_loss_saves_nothing(make_loop, make_model, make_batches):
    loop = make_loop(make_model(bad_at=(2,)), Signalling(make_batches(), epoch=0, number=3))
    with pytest.raises(TrainingDivergedError):
        loop.run()
    assert checkpoints(loop) == []


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_writes_a_checkpoint_and_says_how_to_resume(make_loop, make_batches, tmp_path, which):
    loop = make_loop(batches=Signalling(make_batches(), epoch=0, number=2, signals=(which,)), num_train_epochs=2)
    with pytest.raises(TrainingInterruptedError) as stop:
        loop.run()
    assert checkpoints(loop) == ["checkpoint-3"]
    for words in ("step 3 of 10", str(tmp_path / "run" / "checkpoint-3"), "--resume_from_checkpoint latest"):
        assert words in str(stop.value)


def test_signal_repeated_immediately_by_a_launcher_counts_once(make_loop, make_batches):
    with pytest.raises(TrainingInterruptedError):
        make_loop(batches=Signalling(make_batches(), epoch=0, number=2, signals=(signal.SIGINT, signal.SIGTERM))).run()


def test_second_signal_stops_immediately_without_a_checkpoint(make_loop, make_batches, monkeypatch):
    seconds = itertools.count(100.0, 2.0)  # the clock advances two seconds per call
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: next(seconds))
    loop = make_loop(batches=Signalling(make_batches(), epoch=0, number=2, signals=(signal.SIGINT, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert checkpoints(loop) == []


def test_signal_in_the_last_step_of_an_epoch_keeps_the_evaluation_and_that_of_the_run_lets_it_finish(
    make_loop, make_batches, tmp_path
):
    with pytest.raises(TrainingInterruptedError):
        make_loop(batches=Signalling(make_batches(), epoch=0, number=4), num_train_epochs=2).run()
    resumed = make_loop(num_train_epochs=2, resume_from_checkpoint="latest")
    assert [entry["epoch"] for entry in resumed.run().history] == [1.0, 2.0]
    last, folder = Signalling(make_batches(), epoch=1, number=4), str(tmp_path / "last")
    assert len(make_loop(batches=last, num_train_epochs=2, output_dir=folder).run().history) == 2


@pytest.mark.parametrize("interrupted", [True, False])
def test_signal_handlers_are_restored(make_loop, make_batches, interrupted):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop = make_loop(batches=Signalling(make_batches(), epoch=0 if interrupted else 99, number=1), num_train_epochs=1)
    try:
        loop.run()
    except TrainingInterruptedError:
        assert interrupted
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_runs_outside_the_main_thread_and_without_a_head(make_loop):
    loop = make_loop(Unaware(36, 3), num_train_epochs=1, stop_after_steps=99)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join()
    assert loop.state.step == 5  # those of the epoch


def test_early_stopping_stops_after_the_patience(make_loop):
    values = scores(0.5, 0.6, 0.6, 0.6, 0.9)
    assert make_loop(num_train_epochs=20, early_stopping_patience=2, evaluate=values, save_epochs=20).run().epoch == 4
    improving = {"evaluate": scores(0.1, 0.2, 0.3, 0.4), "overwrite_output_dir": True}
    assert make_loop(num_train_epochs=4, early_stopping_patience=1, **improving).run().epoch == 4


def test_an_early_stopped_run_says_so_once_and_has_a_final_checkpoint_from_which_it_does_not_train(make_loop, caplog):
    caplog.set_level("INFO", "hf_sphere")
    options = {"num_train_epochs": 20, "early_stopping_patience": 1, "save_epochs": 20}
    loop = make_loop(evaluate=scores(0.5, 0.5), **options)
    loop.run()
    assert checkpoints(loop) == ["checkpoint-10"]
    stopping = [record.message for record in caplog.records if "stopping" in record.message]
    assert stopping == ["No improvement for 1 epochs; stopping."]
    assert make_loop(evaluate=scores(0.9, 0.9), resume_from_checkpoint="latest", **options).run().epoch == 2


def test_best_model_is_recorded_and_saved_only_if_the_metric_improves(make_loop):
    saved = []
    options = {"loop": {"save_best": lambda model: saved.append(len(loop.state.history))}}
    loop = make_loop(num_train_epochs=5, evaluate=scores(0.5, 0.4, 0.6, 0.6, 0.55), **options)
    state = loop.run()
    assert saved == [1, 3]
    assert (state.best_epoch, state.best_metric) == (3, 0.6)


def test_lower_is_better_metric_is_best_at_the_minimum(make_loop):
    losses = iter([0.5, 0.3, 0.4])
    options = {"loop": {"metric": "perplexity", "higher_is_better": False}}
    loop = make_loop(num_train_epochs=3, evaluate=lambda model: {"perplexity": next(losses)}, **options)
    assert loop.run().best_epoch == 2


def test_model_is_evaluated_in_eval_mode_and_trained_in_training_mode_in_each_epoch(make_loop, make_model):
    modes, model = [], make_model()
    options = {"evaluate": lambda model: modes.append(model.training) or {"accuracy": 0.0}}
    history = make_loop(model, num_train_epochs=2, **options).run().history
    assert (modes, model.passes) == ([False, False], 10)
    assert [(entry["epoch"], entry["step"]) for entry in history] == [(1.0, 5), (2.0, 10)]


def test_plateau_reduces_the_learning_rate_based_on_the_metric(make_loop):
    options = {"lr_scheduler_type": PLATEAU, "lr_patience": 0, "lr_gamma": 0.5, "learning_rate": 0.4}
    loop = make_loop(num_train_epochs=3, evaluate=scores(0.5, 0.5, 0.5), **options)
    # The learning rate of each epoch, and the one after the last epoch.
    rates = [entry["learning_rate"] for entry in loop.run().history]
    assert [*rates, loop.optimizer.param_groups[0]["lr"]] == pytest.approx([0.4, 0.4, 0.2, 0.1])


def test_max_steps_stops_mid_epoch_where_the_run_is_evaluated_and_saved(make_loop):
    loop = make_loop(num_train_epochs=3, stop_after_steps=7)
    state = loop.run()
    assert (state.step, state.epoch, state.batch) == (7, 1, 2)
    assert state.history[-1]["epoch"] == pytest.approx(1.4)
    assert checkpoints(loop)[-1] == "checkpoint-7"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"num_train_epochs": 5, "save_epochs": 2}, [10, 20, 25]),  # the end is always saved
        ({"num_train_epochs": 2, "save_steps": 3}, [3, 5, 6, 9, 10]),
        ({"num_train_epochs": 4, "save_total_limit": 2}, [15, 20]),
    ],
)
def test_checkpoints_are_saved_by_the_intervals_up_to_the_limit(make_loop, options, steps):
    loop = make_loop(**options)
    loop.run()
    assert checkpoints(loop) == [f"checkpoint-{step}" for step in steps]


def one_step(make_loop, make_model, folder: Path, limit: float | None) -> float:
    """Norm of the first SGD step with learning rate 1, which is the norm of the gradient used."""
    model = make_model(**PLAIN_MODEL)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    options = {"learning_rate": 1.0, "stop_after_steps": 1, "max_grad_norm": limit, "output_dir": str(folder)}
    make_loop(model, **SGD | options).run()
    return (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()


def test_only_a_gradient_above_the_limit_is_clipped(make_loop, make_model, tmp_path):
    free, clipped, limited = (one_step(make_loop, make_model, tmp_path / str(at), at) for at in (None, 0.01, 1e3))
    assert free > 0.01
    assert clipped == pytest.approx(0.01, rel=1e-3)
    assert limited == pytest.approx(free, rel=1e-6)


def test_set_epoch_is_called_each_epoch_also_with_the_resumed_one(make_loop, make_model):
    first, model = make_model(), make_model()
    make_loop(first, num_train_epochs=2, stop_after_steps=7).run()
    make_loop(model, num_train_epochs=3, resume_from_checkpoint="latest").run()
    assert (first.observer.epochs, model.observer.epochs) == ([0, 1], [1, 2])


class Unaware(nn.Linear):
    """Model without a head."""

    def forward(self, pixel_values, labels):
        logits = super().forward(pixel_values.flatten(1))
        return type("Output", (), {"loss": F.cross_entropy(logits, labels), "logits": logits})


def test_training_time_before_resuming_is_counted(make_loop):
    first = make_loop(num_train_epochs=2, stop_after_steps=7).run().seconds
    resumed = make_loop(num_train_epochs=2, resume_from_checkpoint="latest")
    assert resumed.state.seconds == first


def test_resumed_run_uses_changed_settings(make_loop):
    make_loop(num_train_epochs=1).run()
    resumed = make_loop(num_train_epochs=2, resume_from_checkpoint="latest", learning_rate=1e-5, weight_decay=0.5)
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.0]
    assert resumed.run().history[-1]["learning_rate"] == 1e-5


@pytest.mark.parametrize("schedule", ["constant", "cosine", "reduce_lr_on_plateau"])
def test_resumed_run_with_unchanged_settings_keeps_the_learning_rate(make_loop, schedule):
    first = make_loop(num_train_epochs=2, stop_after_steps=5, lr_scheduler_type=schedule)
    first.run()
    resumed = make_loop(num_train_epochs=2, lr_scheduler_type=schedule, resume_from_checkpoint="latest")
    assert resumed.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]


def test_nonfinite_weights_are_not_saved(make_loop, make_model):
    model, passes = make_model(), itertools.count(1)
    model.out.weight.register_hook(lambda gradient: gradient * float("nan") if next(passes) == 5 else gradient)
    loop = make_loop(model)  # the loss of the epoch's fifth and last step is still finite
    with pytest.raises(TrainingDivergedError, match=r"the weights are not finite after step 5\. There is no"):
        loop.run()
    assert checkpoints(loop) == []


def test_checkpoints_after_the_resumed_one_are_removed(make_loop):
    first = make_loop(num_train_epochs=4)
    first.run()
    earlier = str(first.output_dir / "checkpoint-10")
    resumed = make_loop(num_train_epochs=3, resume_from_checkpoint=earlier)
    resumed.run()
    assert checkpoints(resumed) == ["checkpoint-5", "checkpoint-10", "checkpoint-15"]


CHANGES = {
    "per_device_train_batch_size": {"per_device_train_batch_size": 16},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "seed": {"seed": 1},
}


@pytest.mark.parametrize("name", [*CHANGES, "batches_per_epoch"])
def test_changing_the_batches_in_the_middle_of_an_epoch_is_rejected(make_loop, make_batches, name):
    make_loop(stop_after_steps=4, per_device_train_batch_size=8).run()
    options = CHANGES.get(name, {"batches": make_batches(32)})
    with pytest.raises(CheckpointError, match=rf"middle of an epoch with {name} \d \(now \d+\).*; resume with"):
        make_loop(**{"per_device_train_batch_size": 8, "resume_from_checkpoint": "latest"} | options)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"rows": torch.arange(1, 41)}, r"digest_of_images \d+ \(now \d+\)"),
        ({"balanced": True}, r"class_balanced_sampling False \(now True\)"),
    ],
)
def test_drawing_other_images_in_the_middle_of_an_epoch_is_rejected(make_loop, make_batches, options, change):
    make_loop(stop_after_steps=4).run()
    with pytest.raises(CheckpointError, match=rf"middle of an epoch with {change}; resume with"):
        make_loop(batches=make_batches(40, **options), resume_from_checkpoint="latest")


def test_training_on_other_labels_in_the_middle_of_an_epoch_is_rejected(make_loop, make_batches):
    make_loop(stop_after_steps=4).run()
    batches = make_batches(40)
    batches.labels = batches.labels.flip(0)
    with pytest.raises(CheckpointError, match=r"middle of an epoch with digest_of_labels \d+ \(now \d+\); resume"):
        make_loop(batches=batches, resume_from_checkpoint="latest")


def test_changing_the_number_of_processes_in_the_middle_of_an_epoch_is_rejected(make_loop):
    first = make_loop(save_steps=3, stop_after_steps=4)
    first.run()
    path = first.output_dir / "checkpoint-3" / "trainer_state.json"
    path.write_text(path.read_text().replace('"num_processes": 1', '"num_processes": 2'))
    write_manifest(path.parent)
    with pytest.raises(CheckpointError, match=r"middle of an epoch with num_processes 2 \(now 1\); resume with"):
        make_loop(resume_from_checkpoint=str(path.parent))


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "steps"), [(16, 1, 3), (4, 1, 10), (8, 2, 3), (8, 3, 2), (20, 2, 1), (8, 1, 5)]
)
def test_run_resumed_after_an_epoch_with_other_batches_trains_whole_epochs(
    make_loop, make_batches, batch_size, accumulation, steps
):
    make_loop(num_train_epochs=1).run()
    batches = Noting(make_batches(batch_size=batch_size))
    options = {"num_train_epochs": 4, "gradient_accumulation_steps": accumulation}
    resumed = make_loop(batches=batches, resume_from_checkpoint="latest", **options)
    state = resumed.run()
    assert [entry["epoch"] for entry in state.history] == [1, 2, 3, 4]
    assert batches.seen == {1: 40, 2: 40, 3: 40}
    assert state.step == resumed.total_steps == 5 + 3 * steps


@pytest.mark.parametrize("schedule", ["linear", "cosine", "step"])
@pytest.mark.parametrize("batch_size", [4, 20])
def test_schedule_of_a_run_resumed_with_other_batches_depends_on_the_epoch(
    make_loop, make_batches, schedule, batch_size
):
    options = {"lr_scheduler_type": schedule, "num_train_epochs": 4}
    options |= {"lr_step_epochs": 2} if schedule == "step" else {}
    first = make_loop(**options)
    expected = [entry["learning_rate"] for entry in first.run().history]
    batches = make_batches(batch_size=batch_size)
    after_two = str(first.output_dir / "checkpoint-10")
    resumed = make_loop(batches=batches, resume_from_checkpoint=after_two, **options)
    found = [entry["learning_rate"] for entry in resumed.run().history]
    assert found == pytest.approx(expected, abs=1e-12)


def test_resumed_run_keeps_the_plateau_decays_in_proportion_to_its_peak_rate(make_loop):
    options = {"lr_scheduler_type": PLATEAU, "lr_patience": 0}
    first = make_loop(num_train_epochs=3, evaluate=scores(0.9, 0.5, 0.4), **options)
    first.run()
    decayed = first.optimizer.param_groups[0]["lr"]
    assert decayed == pytest.approx(1e-5)
    for changes, rate in (({}, decayed), ({"learning_rate": 1e-4}, pytest.approx(1e-6))):
        resumed = make_loop(num_train_epochs=4, resume_from_checkpoint="latest", **options, **changes)
        assert resumed.optimizer.param_groups[0]["lr"] == rate


def test_resumed_run_adopts_the_patience_and_factor_of_plateau(make_loop):
    make_loop(num_train_epochs=1, lr_scheduler_type=PLATEAU).run()
    changes = {"lr_patience": 3, "lr_gamma": 0.5, "resume_from_checkpoint": "latest"}
    resumed = make_loop(num_train_epochs=2, lr_scheduler_type=PLATEAU, **changes)
    assert (resumed.scheduler.patience, resumed.scheduler.factor) == (3, 0.5)


@pytest.mark.parametrize(("first", "then"), [("reduce_lr_on_plateau", "cosine"), ("cosine", "reduce_lr_on_plateau")])
def test_resuming_with_or_without_plateau_is_rejected(make_loop, first, then):
    make_loop(num_train_epochs=1, lr_scheduler_type=first).run()
    with pytest.raises(CheckpointError, match="has another lr_scheduler_type; `reduce_lr_on_plateau` cannot be"):
        make_loop(num_train_epochs=2, lr_scheduler_type=then, resume_from_checkpoint="latest")
