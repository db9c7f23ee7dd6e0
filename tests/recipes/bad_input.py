"""Call recipes with random bad command lines, configurations, damaged files, crafted folders, odd inputs and outputs.

python tests/recipes/bad_input.py --lines 300 --configs 200 --files 100 --folders 300 --inputs 60 --outputs 100
python tests/recipes/bad_input.py --minutes 30

A call must work, or end with an exit code other than 0 and an error of one line; a traceback, an empty message or more
than a minute is a failure. Further failures: a crafted folder that must be refused is not; a file outside the folders
of the command line is opened, created or changed; an output is refused after a model has computed it, or not saved; a
name is printed with its control characters, or begins a cell of a table as a formula. Everything random follows from
the seed of a call. The recipes are called in this process, since importing torch and transformers takes seconds.
"""

import argparse
import contextlib
import csv
import functools
import io
import itertools
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import torch
from accelerate.state import AcceleratorState, GradientState
from bad_calls import (
    OTHER_RECIPES,
    Call,
    crafted_folder,
    load,
    make_specials,
    random_config,
    random_damage,
    random_line,
    special_input,
    special_output,
    valid,
)
from datasets import Dataset
from file_changes import ELSEWHERE, ESCAPE, SECRET
from PIL import Image
from training_runs import make_sentences

from hf_sphere.commands.command_line import run_main
from hf_sphere.training.output_dir import LOCAL_PATHS_FILE

SECONDS = 60
MEMORY = 6 << 30
"""Most memory of a run, bytes."""

KINDS = {
    "line": (300, "command lines"),
    "config": (200, "configurations"),
    "file": (100, "damaged files"),
    "folder": (300, "crafted folders"),
    "input": (60, "odd inputs"),
    "output": (100, "odd outputs"),
}
"""Kinds of calls: usual number, and what they are."""

ENDS = {0: "worked", 2: "refused by the parser", 1: "refused by the recipe"}
"""How a call may end, by exit code."""

OPENED: list[str] = []
"""Paths that were opened by the current call, or `forward` for a computation of a model."""


RECORDING: set[bool] = set()
"""Not empty while opened files are recorded."""


class TooLongError(BaseException):
    """A call took too long; not an `Exception`, so that nobody catches it."""


def prepare(folder: Path) -> None:
    """Create the inputs of the recipes in a folder: a model, embeddings, texts, and files that are none of these.

    Images that no recipe may open are in a folder beside it.
    """
    folder.mkdir(exist_ok=True)
    for number in range(16):
        path = folder / ("photos" if number < 8 else "more") / "ab"[number % 2] / f"{number // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((8, 8), 20 + number).save(path)
    for path in (SECRET, ELSEWHERE):
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "photos" / "a" / "0.png", folder / path)
    make_specials(folder)
    (folder / "texts").mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        (folder / "texts" / f"{split}.txt").write_text(make_sentences(60, seed))
    (folder / "images" / "images").mkdir(parents=True)
    (folder / "questions" / "tiny").mkdir(parents=True)
    for split in ("train", "val", "test"):
        names = [f"{split}-{number}.jpg" for number in range(4)]
        for number, name in enumerate(names):
            Image.effect_noise((8, 8), 10 + number).save(folder / "images" / "images" / name)
        rows = "".join(f"{name},{split}-{number % 2}\n" for number, name in enumerate(names))
        (folder / "images" / f"{split}.csv").write_text(f"filename,label\n{rows}")
    asked = {"stem": [["cat", "dog"]] * 3, "choice": [[["red", "sea"], ["man", "king"]]] * 3, "answer": [0, 1, 0]}
    for split in ("validation", "test"):
        Dataset.from_dict(asked).to_parquet(folder / "questions" / "tiny" / f"{split}-00000-of-00001.parquet")
    (folder / "empty.json").touch()
    (folder / "list.json").write_text("[1, 2]")
    (folder / "bytes.bin").write_bytes(bytes(range(256)) * 4)
    with contextlib.chdir(folder):
        words = [*valid("train_image_classification"), "--snapshot_epochs", "1", "--output_dir", "model"]
        names = {"extract_embeddings": "embeddings", "place_prototypes": "prototypes", "build_index": "index"}
        calls = [Call("train_image_classification", words)]
        calls += [Call(recipe, [*OTHER_RECIPES[recipe].split()[:-1], name]) for recipe, name in names.items()]
        calls += [Call("build_index", [*OTHER_RECIPES["build_index"].split()[:-1], "ivf", "--kind", "ivf"])]
        for call in calls:
            code, printed = run(Call(call.recipe, [*call.argv, "--disable_tqdm"]))
            assert code == 0, printed
    shutil.copytree(folder / "model", folder / "no_weights", ignore=lambda *_: ["snapshots", "best", "checkpoint-3"])
    (folder / "no_weights" / "model.safetensors").unlink()


@contextlib.contextmanager
def searched_once() -> Iterator[None]:
    """Let the search page be searched once and closed when it is launched."""
    from gradio import Blocks

    page = load("search_page")
    build, show = page.build_page, Blocks.launch

    def search(index: Any) -> Any:
        page.show(index, str(Path("photos", "a", "0.png").resolve()), "", [], 5)
        return build(index)

    def launch(blocks: Any, **options: Any) -> None:
        show(blocks, **options, prevent_thread_lock=True, quiet=True)
        blocks.close(verbose=False)

    with mock.patch.object(page, "build_page", search), mock.patch.object(Blocks, "launch", launch):
        yield


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record opened files and computations of models in `OPENED`."""
    OPENED.clear()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: OPENED.append("forward"))
    watch_files()
    RECORDING.add(True)
    try:
        yield
    finally:
        RECORDING.clear()
        hook.remove()


@functools.cache
def watch_files() -> None:
    """Install the hook for opened files, which cannot be removed."""
    sys.addaudithook(lambda event, values: OPENED.append(str(values[0])) if event == "open" and RECORDING else None)


def run(call: Call) -> tuple[int, str]:
    """Call a recipe; return its exit code (-1 for a traceback or one that took too long) and what it printed."""

    def stop(*_: object) -> None:
        raise TooLongError

    shutil.rmtree("out", ignore_errors=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    printed, errors, code = io.StringIO(), io.StringIO(), 0
    signals = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in signals}
    for timer in signals.values():
        signal.setitimer(timer, SECONDS * (1 + 2 * (timer == signal.ITIMER_REAL)))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with recording(), searched_once() if call.recipe == "search_page" else contextlib.nullcontext():
                run_main(lambda _: load(call.recipe).main(call.argv))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (Exception, TooLongError):
        code = -1
        traceback.print_exc(file=errors)
    finally:
        for number, timer in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        torch.set_flush_denormal(False)
    return code, errors.getvalue() + ESCAPE * (ESCAPE in printed.getvalue())


def problem(code: int, printed: str) -> str | None:
    """Return what is wrong with how a call ended, or None."""
    if ESCAPE in printed:
        return f"control characters of a name are printed: {printed[-1000:]!r}"
    if code == 0:
        return None
    if code == -1 or "Traceback" in printed:
        return f"a traceback\n{printed[-3000:]}"
    messages = [line for line in printed.splitlines() if line.startswith("Error: ") or ": error: " in line]
    if len(messages) != 1 or messages[0].endswith((": ", "Error:")) or not messages[0].partition(": ")[2].strip():
        return f"not one line: {printed[-1000:]!r}"
    return None


def tables_problem(folder: Path) -> str | None:
    """Return what is wrong with the tables of a call, or None."""
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            for cell in (cell for row in csv.reader(file) for cell in row):
                if ESCAPE in cell or (cell[:1] in ("=", "+", "-", "@") and not re.fullmatch(r"[-+][\d.e+-]+", cell)):
                    return f"{path} has the cell {cell!r}"
    return None


def list_tree(folder: Path) -> dict[str, Any]:
    """Return size and time of all files around and in a folder that no call may change."""
    changed = {"hf", "out", "cache", "damaged", "random.yaml", "scratch", "outputs"}
    found = {}
    for parent, folders, names in os.walk(folder.parent):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in changed]
            names = [name for name in names if name not in changed]
        for name in (*folders, *names):
            about = os.lstat(os.path.join(parent, name))
            found[os.path.join(parent, name)] = (stat.S_IFMT(about.st_mode), about.st_size, about.st_ino)
    return found


def output_problem(code: int, output: Path, is_new: bool, folder: Path) -> str | None:
    """Return what is wrong with how an output was saved or refused, or None."""
    scratch = folder / "scratch"
    if code == 0:
        kept = output.stat().st_size > 0 if output.is_file() else output.is_dir() and any(output.iterdir())
        if not kept:
            return "the output is not saved"
        if is_new:
            shutil.rmtree(output) if output.is_dir() else output.unlink()
    elif "forward" in OPENED:
        return "the output is refused after it has been computed"
    links = [path for path in scratch.glob("linked*") if not path.is_symlink()]
    left = [path for path in scratch.rglob(".*") if path.name not in (".nojekyll", LOCAL_PATHS_FILE)]
    if links or left or (scratch / "kept" / "x.txt").read_text() != "kept":
        return f"a link is replaced, something is left over, or a file is gone: {links}, {left}"
    return None


def draw_call(kind: str, seed: int, folder: Path) -> tuple[Call, str, bool, Path | None]:
    """Return a call in the prepared folder, what it is about, whether it must be refused, and its output if odd."""
    draw = random.Random(f"{kind} {seed}")
    with contextlib.chdir(folder):
        if kind == "folder":
            return *crafted_folder(draw, folder), None
        if kind == "input":
            return *special_input(draw, folder), False, None
        if kind == "output":
            call, output = special_output(draw, folder)
            return call, str(output), False, output
        return (
            {"line": random_line, "config": random_config, "file": random_damage}[kind](draw, folder),
            "",
            False,
            None,
        )


def attack(kind: str, seed: int, folder: Path) -> tuple[int, str | None]:
    """Make one call in the prepared folder; return its exit code and what is wrong with it."""
    call, what, must_fail, output = draw_call(kind, seed, folder)
    with contextlib.chdir(folder):
        is_new = output is not None and not os.path.lexists(output)
        before = list_tree(folder)
        code, printed = run(call)
        wrong = problem(code, printed) or tables_problem(Path("out"))
        if must_fail and code == 0:
            wrong = wrong or "it is not refused"
        if "in parquet" not in what and os.path.realpath(SECRET) in map(os.path.realpath, OPENED):
            wrong = wrong or f"{SECRET} was opened"
        if output is not None:
            wrong = wrong or output_problem(code, output, is_new, folder)
        after = list_tree(folder)
        if kind not in ("line", "config") and before != after:
            wrong = wrong or f"files around were changed: {sorted({*before.items()} ^ {*after.items()})[:5]}"
    return code, None if wrong is None else f"{kind} {seed}: {call.recipe} {call.argv}: {what!r}: {wrong}"


class Worker:
    """A process that prepares the folder if it is new, and makes calls; it is replaced if one ends it.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def attack(self, kind: str, seed: int) -> tuple[int, str | None]:
        """See `attack`."""
        self._connection.send((kind, seed))
        with contextlib.suppress(EOFError, ConnectionError):
            if self._connection.poll(4 * SECONDS):
                return self._connection.recv()
        self._process.kill()
        self._process.join()
        for path in self.folder.glob(".*.unfinished"):
            path.unlink()
        self._start()
        call, what, *_ = draw_call(kind, seed, self.folder)
        return -1, f"{kind} {seed}: {call.recipe} {call.argv}: {what!r}: the process ended, or could not be interrupted"

    def stop(self) -> None:
        """End the process."""
        self._process.kill()

    def _start(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        # Forked, so that it need not import anything again; this process computes nothing, and so has no threads.
        self._process = multiprocessing.get_context("fork").Process(target=self._work, args=(other,))
        self._process.start()
        other.close()

    def _work(self, connection: Any) -> None:
        self._connection.close()
        if not self.folder.exists():
            prepare(self.folder)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        with contextlib.suppress(EOFError):  # of a parent that has ended
            while True:
                connection.send(attack(*connection.recv(), self.folder))


def main(argv: Sequence[str] | None = None) -> None:
    """Make the calls and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for kind, (count, about) in KINDS.items():
        parser.add_argument(f"--{kind}s", type=int, default=count, help=f"number of {about}")
    parser.add_argument("--minutes", type=float, help="instead of these numbers, make no further call after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first call of each kind")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="bad-input-")) / "inputs"
    os.environ["HF_HOME"] = str(folder / "hf")
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "out")
    worker = Worker(folder)
    calls: Iterable[tuple[str, int]]
    calls = [(kind, args.seed + number) for kind in KINDS for number in range(getattr(args, f"{kind}s"))]
    if args.minutes is not None:
        calls = ((kind, seed) for seed in itertools.count(args.seed) for kind in KINDS)
    end = time.monotonic() + 60 * (args.minutes or 0)
    ended: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    try:
        for kind, seed in calls:
            if args.minutes is not None and time.monotonic() > end:
                break
            code, wrong = worker.attack(kind, seed)
            ended[kind]["failed" if wrong else ENDS[code]] += 1
            if wrong:
                print(wrong, flush=True)
    finally:
        worker.stop()
    for kind, counts in ended.items():
        numbers = ", ".join(f"{counts[name]} {name}" for name in (*ENDS.values(), "failed"))
        print(f"{counts.total()} x {kind}: {numbers}")
    shutil.rmtree(folder.parent)
    sys.exit(any(counts["failed"] for counts in ended.values()))


if __name__ == "__main__":
    main()
