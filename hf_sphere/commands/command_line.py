"""Starting a job: errors, signals and the environment. Imports nothing heavy."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from hf_sphere.training.arguments import USUAL
from hf_sphere.training.errors import CheckpointError, TrainingDivergedError, TrainingInterruptedError
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import import_modules, parse_arguments
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.commands import COMMANDS, running
from hf_sphere.utils.texts import PrintableStream, shortage

USER_ERRORS = (
    *(ValueError, OSError, ImportError, SafetensorError, StrictDataclassError),
    *(TrainingDivergedError, CheckpointError),
)
"""Errors with a message for the user; others are defects of the library."""

_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


def train(task_name: str, argv: Sequence[str] | None = None) -> None:
    """Parse the arguments of a task, by default those of `sys.argv`, and train."""
    argv = import_modules(sys.argv[1:] if argv is None else argv)
    task, name = find_task(task_name), task_name.replace("_", "-")
    recipe = dict(zip(COMMANDS.values(), COMMANDS, strict=True)).get(f"train {name}")
    token = running.set(running.get() if recipe is None else f"hf-sphere train {name}")
    try:
        arguments = parse_arguments(task.arguments, argv, f"{task.summary}\n\n{task.example}", recipe, USUAL)

        from hf_sphere.training.run import run_training

        is_single = os.environ.get("WORLD_SIZE", "1") == "1"
        words = ["hf-sphere", "train"] if is_single else ["accelerate", "launch", "-m", "hf_sphere.commands.train"]
        run_training(task, arguments, [*words, name, *argv], recipe or task_name)
    finally:
        running.reset(token)  # a program may train, and go on


def run_job(name: str, argv: Sequence[str] | None = None) -> None:
    """Import the modules of `--import` and that of a job, and call its `main` like a program, see `run_main`."""
    # Bars of downloads would mix with those of the job.
    environment = {} if name == "train" else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if name in ("predict", "index"):  # a thread of the model that waits leaves its core to the decoding processes
        environment["OMP_WAIT_POLICY"] = "passive"

    def main(_: object) -> None:
        words = import_modules(sys.argv[1:] if argv is None else argv)  # before the job parses the others
        import_module(f"hf_sphere.commands.{name}").main(words)

    token = running.set(f"hf-sphere {name}")
    try:
        run_main(main, environment)
    finally:
        running.reset(token)


def run_main(main: Callable[[Sequence[str] | None], None], environment: Mapping[str, str] | None = None) -> None:
    """Call a `main`; print errors that the user can fix without a traceback, and exit with a status.

    Control characters in what is printed or logged, for instance in names of files, do not reach the terminal. The
    environment variables are set before torch is imported, unless they are set; `main` is called with None, for the
    arguments of `sys.argv`.
    """
    # Huge pages for large tensors, where Linux offers them; torch reads this at its first allocation. Training of
    # convolutions on CPUs spends up to a quarter of its time on page faults without them.
    variables = {"THP_MEM_ALLOC_ENABLE": "1", "NO_COLOR": "1", **(environment or {})}
    if not sys.stderr.isatty():  # a file would fill with redrawn bars, ours and those of libraries
        variables |= dict.fromkeys(_BARS, "1")
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    with redirect_stdout(PrintableStream(sys.stdout, False)), redirect_stderr(PrintableStream(sys.stderr, True)):
        try:
            try:
                main(None)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # as in `hf-sphere configs | head`
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter flushes it at its end)
            sys.exit(1)
        except (TrainingInterruptedError, KeyboardInterrupt) as stop:
            if os.environ.get("RANK", "0") == "0":  # of several processes, one tells it
                what = str(stop) or "stopped; files that were finished are complete."
                print(f"\n{what[:1].upper()}{what[1:]}", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            text = shortage(error)
            if os.environ.get("HF_SPHERE_TRACEBACK") or not (text or isinstance(error, USER_ERRORS)):
                raise
            hint = "(Set HF_SPHERE_TRACEBACK=1 for the traceback.)"
            print(f"\nError: {text or error_text(error)}\n{hint}", file=sys.stderr)
            sys.exit(1)
