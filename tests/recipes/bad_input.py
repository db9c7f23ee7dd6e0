"""Call recipes with random bad command lines and configurations.

python tests/recipes/bad_input.py --minutes 30

A call must work, or end with an exit code other than 0 and an error of one line; a traceback, an empty message or more
than a minute is a failure. Everything random follows from the seed of a call. The recipes are called in this process,
since importing torch and transformers takes seconds.
"""

import argparse
import contextlib
import io
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import torch
from accelerate.state import AcceleratorState, GradientState
from bad_calls import OTHER_RECIPES, Call, random_config, random_line, valid
from datasets import Dataset
from PIL import Image
from training_runs import load_recipe, write_texts

from hf_sphere.commands.command_line import run_main

SECONDS = 60

KINDS = {"line": random_line, "config": random_config}
"""Functions that return a call, by its kind."""

ENDS = {0: "worked", 2: "refused by the parser", 1: "refused by the recipe"}
"""How a call may end, by exit code."""


class TooLongError(BaseException):
    """A call took too long; not an `Exception`, so that nobody catches it."""


def prepare(folder: Path) -> None:
    """Create the inputs of the recipes in a folder: a model, embeddings, texts, and files that are none of these."""
    folder.mkdir(exist_ok=True)
    for number in range(16):
        path = folder / ("photos" if number < 8 else "more") / "ab"[number % 2] / f"{number // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((8, 8), 20 + number).save(path)
    write_texts(folder / "texts", train=60, validation=60, test=60)
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
        names = {"extract": "embeddings", "place": "prototypes", "index": "index"}
        calls = [Call("train_image_classification", words)]
        calls += [Call(recipe, [*OTHER_RECIPES[recipe].split()[:-1], name]) for recipe, name in names.items()]
        for call in calls:
            code, printed = run(Call(call.recipe, [*call.argv, "--disable_tqdm"]))
            assert code == 0, printed
    shutil.copytree(folder / "model", folder / "no_weights", ignore=lambda *_: ["snapshots", "best", "checkpoint-3"])
    (folder / "no_weights" / "model.safetensors").unlink()


@contextlib.contextmanager
def searched_once() -> Iterator[None]:
    """Let the search page be searched once and closed when it is launched."""
    from gradio import Blocks

    page = load_recipe("page")
    build, show = page.build_page, Blocks.launch

    def search(index: Any) -> Any:
        page.show(index, str(Path("photos", "a", "0.png").resolve()), "", [], 5)
        return build(index)

    def launch(blocks: Any, **options: Any) -> None:
        show(blocks, **options, prevent_thread_lock=True, quiet=True)
        blocks.close(verbose=False)

    with mock.patch.object(page, "build_page", search), mock.patch.object(Blocks, "launch", launch):
        yield


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
            with searched_once() if call.recipe == "page" else contextlib.nullcontext():
                run_main(lambda _: load_recipe(call.recipe).main(call.argv))
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
    return code, errors.getvalue()


def problem(code: int, printed: str) -> str | None:
    """Return what is wrong with how a call ended, or None."""
    if code == 0:
        return None
    if code == -1 or "Traceback" in printed:
        return f"a traceback\n{printed[-3000:]}"
    messages = [line for line in printed.splitlines() if line.startswith("Error: ") or ": error: " in line]
    if len(messages) != 1 or messages[0].endswith((": ", "Error:")) or not messages[0].partition(": ")[2].strip():
        return f"not one line: {printed[-1000:]!r}"
    return None


def attack(kind: str, seed: int, folder: Path) -> tuple[int, str | None]:
    """Make one call in the prepared folder; return its exit code and what is wrong with it."""
    with contextlib.chdir(folder):
        call = KINDS[kind](random.Random(f"{kind} {seed}"), folder)
        code, printed = run(call)
    wrong = problem(code, printed)
    return code, None if wrong is None else f"{kind} {seed}: {call.recipe} {call.argv}: {wrong}"


def main() -> None:
    """Make the calls and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="make no further call after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first call of each kind")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bad-input-")) / "inputs"
    os.environ["HF_HOME"] = str(folder / "hf")
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "out")
    prepare(folder)
    end = time.monotonic() + 60 * args.minutes
    ended: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, seed in ((kind, seed) for seed in itertools.count(args.seed) for kind in KINDS):
        if time.monotonic() > end:
            break
        code, wrong = attack(kind, seed, folder)
        ended[kind]["failed" if wrong else ENDS[code]] += 1
        if wrong:
            print(wrong, flush=True)
    for kind, counts in ended.items():
        numbers = ", ".join(f"{counts[name]} {name}" for name in (*ENDS.values(), "failed"))
        print(f"{counts.total()} x {kind}: {numbers}")
    shutil.rmtree(folder.parent)
    sys.exit(any(counts["failed"] for counts in ended.values()))


if __name__ == "__main__":
    main()
