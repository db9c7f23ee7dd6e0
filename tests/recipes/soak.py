"""Disturb training runs at random and compare their results with those of undisturbed runs.

python tests/recipes/soak.py --minutes 30

A trial starts a run of a random recipe, on one or two processes, and disturbs it up to five times: it is killed, or its
disk is full. After each disturbance the run is resumed as a user would. Its model, best model, snapshots and results
must be bit-for-bit equal to those of an undisturbed run, and nothing else may be left behind. Everything random follows
from the seed of the trial, except where CPU time or the other process ends a process.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{tempfile.mkdtemp(prefix='soak-')}/hf", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # runs are forked from a process without threads

# isort: split
# Imported before the runs are forked, which then need not import them.
import datasets  # noqa: F401
import sklearn.model_selection  # noqa: F401
import timm  # noqa: F401
from safetensors.torch import load_file
from training_runs import QUICK_RUNS, load_recipe, same, write_texts

import hf_sphere.training.run  # noqa: F401
from hf_sphere.commands.command_line import run_main
from hf_sphere.training.output_dir import list_checkpoints

HOME = Path(os.environ["HF_HOME"]).parent
KILL, FULL_DISK = "kill", "full disk"
CRASHED = 99
"""Exit code of a process with a traceback."""

SECONDS = 600
"""Longest duration of a process."""

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


class UnexpectedEndError(Exception):
    """A disturbed run did not end as it should."""


class Ended(NamedTuple):
    """The exit codes of the processes of a run, negative for signals, and what they printed."""

    codes: list[int]
    printed: str


def start(main: Callable[[], None], output: int) -> BaseProcess:
    """Call a function in a new process that prints to a file descriptor."""

    def run() -> None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(SECONDS)
        try:
            main()
        except Exception:
            traceback.print_exc()
            sys.exit(CRASHED)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def kill_at_event(folder: Path, number: int) -> None:
    """Let the process kill itself when it does something to a file in a folder for the n-th time."""
    left = number

    def count(event: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        # `shutil.rmtree` names files relative to the descriptor of their folder.
        is_inside = event in EVENTS and (
            str(folder) in str(values[:2]) or (event != "open" and values[-1] not in (-1, None))
        )
        if is_inside:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_after(seconds: float) -> None:
    """Let the process end without notice after this much CPU time, at any instruction."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def fill_disk(size: int) -> None:
    """Let every write beyond this size of a file fail."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


SAVE_OFTEN = ["--save_steps", "3", "--snapshot_epochs", "1", "--load_best_model_at_end", "--ema_decay", "0.5"]


@dataclass
class Scenario:
    """A task, by its name, on a number of processes."""

    task: str
    processes: int

    def run(self, folder: Path, *words: str, before: Callable[[], object] | None = None) -> Ended:
        """Run the recipe until it ends. `before` is called in a random process before it starts."""
        read, write = os.pipe()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        disturbed = random.randrange(self.processes)
        processes = [
            start(lambda rank=rank: self._main(folder, words, rank, port, before if rank == disturbed else None), write)
            for rank in range(self.processes)
        ]
        os.close(write)
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            wait(running)
            if any(process.exitcode for process in processes):  # a launcher ends the other processes
                for process in processes:
                    process.kill()
        with os.fdopen(read) as pipe:
            return Ended([process.exitcode for process in processes], pipe.read())

    def _main(
        self, folder: Path, words: Sequence[str], rank: int, port: int, before: Callable[[], object] | None
    ) -> None:
        if self.processes > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.processes)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        quick = QUICK_RUNS[self.task]
        argv = [str(HOME / "texts") if word == "TEXTS" else word for word in quick.argv]
        argv += [*quick.held_out, *SAVE_OFTEN, "--cache_dir", str(HOME / "cache"), "--output_dir", str(folder), *words]
        recipe = load_recipe(quick.recipe)
        if before is not None:
            before()
        run_main(lambda _: recipe.main(argv))


class Soak:
    """Trials and their counts, for names of tasks, kinds of disturbances, and possible numbers of processes."""

    def __init__(self, tasks: Sequence[str], kinds: Sequence[str], processes: Sequence[int]) -> None:
        self.tasks, self.kinds, self.processes = tasks, kinds, processes
        self.counts: Counter[str] = Counter()
        self._references: dict[tuple[str, int], Path] = {}
        self._cpu_seconds: dict[tuple[str, int], float] = {}

    def trial(self, seed: int, most: int = 5) -> None:
        """Run a trial with at most this many disturbances.

        Raises:
            UnexpectedEndError: If the run does not end like an undisturbed one.
        """
        draw = random.Random(seed)
        random.seed(seed)
        scenario = Scenario(draw.choice(self.tasks), draw.choice(self.processes))
        reference = self._reference(scenario)
        folder = HOME / f"trial-{seed}"
        words: list[str] = []
        for _ in range(draw.randint(1, most)):
            if self._disturb(scenario, folder, words, draw):
                break
            words = ["--resume_from_checkpoint", "latest"] if list_checkpoints(folder) else ["--overwrite_output_dir"]
        else:
            ended = scenario.run(folder, *words)
            if any(ended.codes):
                raise UnexpectedEndError(f"the last run failed: {ended.codes}\n{ended.printed}")
        self.counts["run"] += 1
        compare(reference, folder)
        shutil.rmtree(folder)

    def _disturb(self, scenario: Scenario, folder: Path, words: list[str], draw: random.Random) -> bool:
        """Run with a disturbance; return whether the run ended without an error."""
        kind = draw.choice(self.kinds)
        if kind == FULL_DISK:
            limit = int(10 ** draw.uniform(2, 5.5))
            ended = scenario.run(folder, *words, before=lambda: fill_disk(limit))
        elif draw.random() < 0.5:
            number = draw.randint(1, 150)
            ended = scenario.run(folder, *words, before=lambda: kill_at_event(folder, number))
        else:
            seconds = draw.uniform(0.05, 1) * self._cpu_seconds[scenario.task, scenario.processes]
            ended = scenario.run(folder, *words, before=lambda: kill_after(seconds))
        if not any(ended.codes):
            return True
        lost_other = scenario.processes > 1 and "gloo" in ended.printed  # which crashes the process that waits for it
        if CRASHED in ended.codes and not lost_other:
            raise UnexpectedEndError(f"{kind}: exit codes {ended.codes}\n{ended.printed}")
        self.counts[kind] += 1
        return False

    def _reference(self, scenario: Scenario) -> Path:
        key = (scenario.task, scenario.processes)
        if key not in self._references:
            folder = HOME / f"reference-{'-'.join(map(str, key))}"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = scenario.run(folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if any(ended.codes):
                raise UnexpectedEndError(f"the undisturbed run of {key} failed\n{ended.printed}")
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            self._cpu_seconds[key] = used / scenario.processes
            self._references[key] = folder
        return self._references[key]


def compare(reference: Path, folder: Path) -> None:
    """Compare the outputs of two runs.

    Raises:
        UnexpectedEndError: If they are not equal, or something is left over.
    """
    present = {path.name for path in folder.iterdir()}
    if present - {path.name for path in reference.iterdir()}:
        raise UnexpectedEndError(f"left over: {', '.join(sorted(present))}")
    names = [path.relative_to(reference) for path in reference.rglob("*.safetensors") if "checkpoint-" not in str(path)]
    for name in [*names, *(path.relative_to(reference) for path in list_checkpoints(reference))]:
        if not (folder / name).exists():
            raise UnexpectedEndError(f"{name} is missing")
        if name in names and not same(load_file(reference / name), load_file(folder / name)):
            raise UnexpectedEndError(f"{name} differs")
    results = []
    for path in (reference, folder):
        values = json.loads((path / "all_results.json").read_text())
        results.append({name: value for name, value in values.items() if not name.startswith("train_runtime")})
        results[-1].pop("train_samples_per_second")
    if results[0] != results[1]:
        raise UnexpectedEndError(f"all_results.json differs: {results}")


def main() -> None:
    """Run trials for some time or up to a number of kills, and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="start no further trial after this time")
    parser.add_argument("--kills", type=int, help="start no further trial after this many kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial")
    tasks, kinds = sorted(QUICK_RUNS), [KILL, KILL, FULL_DISK]
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 1, 2])
    args = parser.parse_args()
    write_texts(HOME / "texts", train=300, validation=80, test=80)
    soak, failed, seed = Soak(args.tasks, args.kinds, args.processes), [], args.seed
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end and (args.kills is None or soak.counts[KILL] < args.kills):
        most = 5 if args.kills is None else min(5, args.kills - soak.counts[KILL])
        try:
            soak.trial(seed, most)
        except UnexpectedEndError as error:
            print(f"seed {seed}: {error}", flush=True)
            failed.append(seed)
        seed += 1
    counts = ", ".join(f"{soak.counts[kind]} x {kind}" for kind in dict.fromkeys(["run", *args.kinds]))
    first = f", the first with --seed {failed[0]}; the files are in {HOME}" if failed else ""
    print(f"{counts}: {len(failed)} failures{first}")
    if not failed:
        shutil.rmtree(HOME)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
