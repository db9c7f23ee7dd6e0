"""Disturb training runs at random and compare their results with those of undisturbed runs.

python tests/recipes/soak.py --minutes 30

A trial starts a run of a random recipe, on one or two processes, and disturbs it up to five times: it is killed, its
disk is full, a file of its newest checkpoint is damaged, or a second run starts in its folder. After each disturbance
the run is resumed as a user would. Its model, best model, snapshots and results must be bit-for-bit equal to those of
an undisturbed run, and nothing else may be left behind. Everything random follows from the seed of the trial, except
where CPU time or the other process ends a process.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from disturbances import (  # sets the environment of the imports below
    CRASHED,
    DAMAGE,
    FULL_DISK,
    HOME,
    KILL,
    READER,
    SECOND_RUN,
    SECOND_WRITER,
    Ended,
    UnexpectedEndError,
    damage,
    fill_disk,
    fork,
    kill_after,
    signal_at_event,
)

# isort: split
# Imported before the runs are forked, which then need not import them.
import datasets  # noqa: F401
import sklearn.model_selection  # noqa: F401
import timm  # noqa: F401
from safetensors.torch import load_file
from soak_folders import RESULTS, FolderTrials
from training_runs import QUICK_RUNS, ROOT, make_sentences, same

import hf_sphere.training.run  # noqa: F401
from hf_sphere.commands.command_line import run_main
from hf_sphere.training.output_dir import LOCK_FILE, RUN_FILE, list_checkpoints

SAVE_OFTEN = ["--save_steps", "3", "--snapshot_epochs", "1", "--load_best_model_at_end", "--ema_decay", "0.5"]


@dataclass
class Scenario:
    """What a trial runs.

    Attributes:
        task: Name of the task.
        processes: Number of processes.
    """

    task: str
    processes: int
    texts: Path = field(default=HOME / "texts")

    def run(self, folder: Path, *words: str, before: Callable[[], object] | None = None) -> Ended:
        """Run the recipe until it ends. `before` is called in a random process before it starts."""
        read, write = os.pipe()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        disturbed = random.randrange(self.processes)
        children = [
            fork(lambda rank=rank: self._main(folder, words, rank, port, before if rank == disturbed else None), write)
            for rank in range(self.processes)
        ]
        os.close(write)
        codes: list[int] = []
        while len(codes) < len(children):
            pid, status = os.wait()
            if pid not in children:
                continue
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1]:  # a launcher ends the other processes
                for other in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
        with os.fdopen(read) as pipe:
            return Ended(codes, pipe.read())

    def start(self, folder: Path, *words: str) -> int:
        """Start the recipe on one process without waiting; return its process id."""
        with open(os.devnull, "wb") as nothing:
            return fork(lambda: self._main(folder, words, 0, 0, None), nothing.fileno())

    def _main(
        self, folder: Path, words: Sequence[str], rank: int, port: int, before: Callable[[], object] | None
    ) -> None:
        if self.processes > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.processes)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        quick = QUICK_RUNS[self.task]
        argv = [str(self.texts) if word == "TEXTS" else word for word in quick.argv]
        argv += [*quick.held_out, *SAVE_OFTEN, "--cache_dir", str(HOME / "cache"), "--output_dir", str(folder), *words]
        recipe = import_module(quick.recipe)
        if before is not None:
            before()
        run_main(lambda _: recipe.main(argv))


class Soak:
    """Trials and their counts.

    Args:
        tasks: Names of the tasks to run.
        kinds: Kinds of disturbances.
        processes: Possible numbers of processes.
    """

    def __init__(self, tasks: Sequence[str], kinds: Sequence[str], processes: Sequence[int]) -> None:
        self.tasks, self.kinds, self.processes = tasks, kinds, processes
        self.counts: Counter[str] = Counter()
        self._references: dict[tuple[str, int], Path] = {}
        self._cpu_seconds: dict[tuple[str, int], float] = {}
        if set(tasks) & set(RESULTS):
            self._folders = FolderTrials(self._reference(Scenario("classification", 1)), kinds, self.counts)

    def trial(self, seed: int, most: int = 5) -> None:
        """Run a trial with at most this many disturbances.

        Raises:
            UnexpectedEndError: If the run does not end like an undisturbed one.
        """
        draw = random.Random(seed)
        random.seed(seed)
        task = draw.choice(self.tasks)
        if task in RESULTS:
            self._folders.trial(task, seed, most, draw)
            return
        scenario = Scenario(task, draw.choice(self.processes))
        reference = self._reference(scenario)
        folder = HOME / f"trial-{seed}"
        words: list[str] = []
        for _ in range(draw.randint(1, most)):
            if self._disturb(scenario, folder, words, draw):
                break
            words = ["--resume_from_checkpoint", "latest"] if list_checkpoints(folder) else ["--overwrite_output_dir"]
        else:
            ended = scenario.run(folder, *words)
            if not ended.succeeded:
                raise UnexpectedEndError(f"the last run failed: {ended.codes}\n{ended.printed}")
        self.counts["run"] += 1
        compare(reference, folder)
        shutil.rmtree(folder)

    def _disturb(self, scenario: Scenario, folder: Path, words: list[str], draw: random.Random) -> bool:
        """Run with a disturbance; return whether the run ended without an error."""
        known = [kind for kind in self.kinds if kind in (KILL, FULL_DISK, DAMAGE, SECOND_RUN)]
        possible = [kind for kind in known if kind != DAMAGE or list_checkpoints(folder)]
        kind = draw.choice([kind for kind in possible if kind != SECOND_RUN or scenario.processes == 1])
        if kind == DAMAGE:
            self._damage(scenario, folder, draw)
            return False
        if kind == SECOND_RUN:
            return self._start_twice(scenario, folder, words)
        if kind == FULL_DISK:
            limit = int(10 ** draw.uniform(2, 5.5))
            ended = scenario.run(folder, *words, before=lambda: fill_disk(limit))
        elif draw.random() < 0.5:
            number = draw.randint(1, 150)
            ended = scenario.run(folder, *words, before=lambda: signal_at_event(folder, number))
        else:
            seconds = draw.uniform(0.05, 1) * self._cpu_seconds[scenario.task, scenario.processes]
            ended = scenario.run(folder, *words, before=lambda: kill_after(seconds))
        if ended.succeeded:
            return True
        lost_other = scenario.processes > 1 and "gloo" in ended.printed  # which crashes the process that waits for it
        if CRASHED in ended.codes and not lost_other:
            raise UnexpectedEndError(f"{kind}: exit codes {ended.codes}\n{ended.printed}")
        self.counts[kind] += 1
        return False

    def _damage(self, scenario: Scenario, folder: Path, draw: random.Random) -> None:
        newest = list_checkpoints(folder)[-1]
        path = draw.choice(sorted(path for path in newest.iterdir() if path.name != "manifest.json"))
        damage(path, draw)
        ended = scenario.run(folder, "--resume_from_checkpoint", str(newest))
        if 1 not in ended.codes or f"cannot resume from {newest}: {path.name} is" not in ended.printed:
            raise UnexpectedEndError(f"{path} is damaged: {ended.codes}\n{ended.printed}")
        shutil.rmtree(newest)
        self.counts[DAMAGE] += 1

    def _start_twice(self, scenario: Scenario, folder: Path, words: list[str]) -> bool:
        settings = folder / RUN_FILE
        before = settings.stat().st_mtime_ns if settings.exists() else None
        first = scenario.start(folder, *words)
        while os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if settings.exists() and settings.stat().st_mtime_ns != before:  # written under the lock
                break
            time.sleep(0.005)
        os.kill(first, signal.SIGSTOP)  # otherwise it may end before the second run has started
        holds = (folder / LOCK_FILE).exists()
        ended = scenario.run(folder, "--overwrite_output_dir") if holds else None
        os.kill(first, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        refused = ended is None or (ended.codes == [1] and f"is in use by process {first} " in ended.printed)
        if code or not refused:
            raise UnexpectedEndError(f"two runs ended with {code} and {ended}")
        self.counts[SECOND_RUN] += holds
        return True

    def _reference(self, scenario: Scenario) -> Path:
        key = (scenario.task, scenario.processes)
        if key not in self._references:
            folder = HOME / f"reference-{'-'.join(map(str, key))}"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = scenario.run(folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if not ended.succeeded:
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
    tasks = [*sorted(QUICK_RUNS), *sorted(RESULTS)]
    kinds = [KILL, KILL, FULL_DISK, DAMAGE, SECOND_RUN, SECOND_WRITER, READER]
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 1, 2])
    args = parser.parse_args()
    (HOME / "texts").mkdir()
    for number, (split, count) in enumerate({"train": 300, "validation": 80, "test": 80}.items()):
        (HOME / "texts" / f"{split}.txt").write_text(make_sentences(count, number))
    sys.path.insert(0, str(ROOT / "recipes"))
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
