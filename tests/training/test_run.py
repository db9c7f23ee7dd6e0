import errno
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import SafetensorError
from tqdm import tqdm

from hf_sphere.commands.command_line import run_main
from hf_sphere.training import CheckpointError, RunState, TrainingDivergedError, TrainingInterruptedError, start_run
from hf_sphere.training.checkpoints import save_checkpoint
from hf_sphere.training.output_dir import LOCK_FILE
from hf_sphere.training.run import Run
from hf_sphere.training.tasks.classification import ImageDataArguments
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.texts import printable


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch):
    """Restore the level of the library's logger, which a run sets, and train on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    logger = logging.getLogger("hf_sphere")
    level = logger.level
    yield
    logger.setLevel(level)


def read(folder: Path | str, name: str) -> dict:
    return json.loads(Path(folder, name).read_text())


def prepared(*args) -> Run:
    run = start_run(*args)
    run.prepare_output_dir()
    return run


def test_a_run_creates_the_output_dir_flushes_denormal_numbers_and_writes_all_settings(make_args, tmp_path):
    smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny)
    assert smallest_normal / 2 > 0
    args, lock = make_args(learning_rate=0.25), tmp_path / "run" / LOCK_FILE
    start_run(args)
    assert smallest_normal / 2 == 0
    assert not (tmp_path / "run").exists()
    with prepared(args, ImageDataArguments(crop_padding=3)):
        assert lock.exists()
    assert not lock.exists()
    settings = read(tmp_path / "run", "run.json")
    assert (settings["learning_rate"], settings["crop_padding"]) == (0.25, 3)


def test_a_run_is_overwritten_only_on_request_and_when_the_next_one_is_prepared(make_args):
    prepared(args := make_args())
    with pytest.raises(FileExistsError, match="already contains a run"):
        start_run(make_args())
    with pytest.raises(ValueError, match=r"momentum 0\.5 has no effect with optim adam"):
        start_run(make_args(optim="adam", momentum=0.5, overwrite_output_dir=True))
    assert read(args.output_dir, "run.json")["momentum"] == 0.9
    again = make_args(learning_rate=0.25, overwrite_output_dir=True)
    start_run(again)
    assert read(args.output_dir, "run.json")["learning_rate"] == 0.001
    prepared(again)
    assert read(args.output_dir, "run.json")["learning_rate"] == 0.25


def test_bad_input_is_refused_before_anything_is_written(make_args, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="output_dir must not be empty"):
        make_args(output_dir="")
    with pytest.raises(ValueError, match="notebook"):
        start_run(make_args(report_to=["notebook"]))
    with pytest.raises(CheckpointError, match="latest is not a complete checkpoint"):
        start_run(make_args(resume_from_checkpoint="latest"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    for resume in (None, "latest"):
        with pytest.raises(FileExistsError, match="files that no run wrote"):
            start_run(make_args(resume_from_checkpoint=resume))
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    monkeypatch.setattr("hf_sphere.training.run.start_accelerator", pytest.fail)  # which would warn
    with pytest.raises(ImportError, match="tensorboard is not installed: pip install tensorboard"):
        start_run(make_args(report_to=["tensorboard"]))


def test_resuming_logs_the_settings_that_differ_and_refuses_another_recipe(make_args, caplog):
    run = start_run(make_args(), recipe="train_few_shot")
    run.prepare_output_dir()
    save_checkpoint(run.accelerator, run.output_dir, RunState(step=1), keep=1)

    def resume(recipe: str = "train_few_shot", **changes) -> None:
        run = start_run(make_args(resume_from_checkpoint="latest", **changes), recipe=recipe)
        run.prepare_output_dir()

    for changes in ({}, {"save_steps": 3}, {"stop_after_steps": 9, "disable_tqdm": False}):
        resume(**changes)
        assert "differs" not in caplog.text
    resume(learning_rate=0.25)
    assert "learning_rate (0.001 -> 0.25)" in caplog.text
    assert read(run.output_dir, "run.json")["learning_rate"] == 0.25
    with pytest.raises(FileExistsError, match="train few-shot, which hf-sphere train masked-lm does not resume"):
        resume(recipe="train_masked_lm")


def test_trackers_receive_the_metrics_of_each_epoch(make_args, make_loop):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = make_args(report_to=["tensorboard"])
    run = prepared(args)
    loop = make_loop(num_train_epochs=2)
    loop.accelerator = run.accelerator
    loop.run()
    run.accelerator.end_training()
    events = EventAccumulator(str(Path(args.output_dir, "logs", "run"))).Reload()
    assert [event.step for event in events.Scalars("accuracy")] == [5, 10]


def failing(error: BaseException):
    def main(argv):
        raise error

    return main


MENDABLE = [
    ValueError("a bad value"),
    TrainingDivergedError("the loss is not finite"),
    CheckpointError("no checkpoint"),
    FileExistsError("contains another run"),
    FileNotFoundError("no such data"),
    OSError("no such model"),
    SafetensorError("Error while deserializing header"),
    StrictDataclassClassValidationError("validate_images", ValueError("a bad size")),
    ValueError(" \n"),  # named by its type
]


def test_user_errors_print_one_line_and_exit_with_status_1_and_internal_ones_keep_their_traceback(capsys, monkeypatch):
    monkeypatch.delenv("HF_SPHERE_TRACEBACK", raising=False)
    for text, error in {**{error_text(error): error for error in MENDABLE}, **SHORTAGES}.items():
        with pytest.raises(SystemExit) as stop:
            run_main(failing(error))
        assert stop.value.code == 1
        more, hint = " " if text in SHORTAGES else "\n", "(Set HF_SPHERE_TRACEBACK=1 for the traceback.)\n"
        printed = capsys.readouterr().err
        assert printed.startswith(f"\nError: {text}{more}")
        assert (printed.count("\n"), printed.endswith(hint)) == (3, True)
    with pytest.raises(KeyError):
        run_main(failing(KeyError("a bug")))
    monkeypatch.setenv("HF_SPHERE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="a bad value"):
        run_main(failing(ValueError("a bad value")))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


IMPORT = "Could not import module 'AutoProcessor'. Are this object's requirements defined correctly?"
OWN_CAUSE = RuntimeError("out of memory, its own cause")
OWN_CAUSE.__cause__ = OWN_CAUSE
SHORTAGES = {
    "the disk or its quota is full: Error while serializing: I/O error: No space left on device (os error 28).": (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    ),
    "the disk or its quota is full: x cannot be read as a dataset.": (
        caused(ValueError("x cannot be read as a dataset."), OSError(errno.EDQUOT, "Disk quota exceeded"))
    ),
    "not enough memory: out of memory, its own cause.": OWN_CAUSE,
    "not enough memory: [Errno 12] Cannot allocate memory.": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "not enough memory: MemoryError.": caused(ImportError(IMPORT), MemoryError()),
    "not enough memory: DefaultCPUAllocator: can't allocate memory.": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory"
    ),
}


def test_control_characters_do_not_reach_the_terminal(capsys):
    name = "cat\x1b[2Jdog\r!\u202e\x9b"

    def main(argv: object) -> None:
        print(name)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": f"read {name}"}))
        for _ in tqdm([name], name, file=sys.stderr):
            pass
        raise ValueError(name)

    with pytest.raises(SystemExit):
        run_main(main)
    out, err = capsys.readouterr()
    assert out == "cat\\x1b[2Jdog\\r!\\u202e\\x9b\n"
    assert not any(character in err for character in "\x1b\u202e\x9b")
    assert f"read {printable(name)}\n" in err
    assert f"\r{printable(name)}: " in err  # the progress bar
    assert r"Error: cat\x1b[2Jdog !\u202e\x9b" in err  # on one line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TrainingInterruptedError("stopped at step 3"), "Stopped at step 3"),
        (KeyboardInterrupt(), "Stopped; files that were finished are complete."),
    ],
)
def test_interruption_exits_with_status_130_and_reports_the_position(capsys, error, words):
    with pytest.raises(SystemExit) as stop:
        run_main(failing(error))
    assert stop.value.code == 130
    assert words in capsys.readouterr().err
