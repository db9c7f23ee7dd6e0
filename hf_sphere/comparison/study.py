"""A comparison from tuning to verdict, which resumes where it was interrupted."""

import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from hf_sphere.comparison.arms import TUNING_SEED, Arm, Division, Parts
from hf_sphere.comparison.measures import MEASURES, UNSEEN, Evaluated, mean_or_none, measure
from hf_sphere.comparison.runs import RunComparison, compare_runs
from hf_sphere.comparison.tuning import Setting, Tuned, describe_setting, tune
from hf_sphere.utils.imports import import_modules, imported
from hf_sphere.utils.json_lines import JsonLines


class Runs(Protocol):
    """Trains and evaluates an arm; None if it diverges. It can be sent to other processes."""

    training: ClassVar[str]  # what is trained and how, after the number of epochs

    def run(self, arm: Arm, setting: Setting, parts: Parts, *, seed: int, epochs: int) -> Evaluated | None:
        """Train an arm on a part of the data and evaluate it on another."""

    def save(self, arm: Arm, setting: Setting, parts: Parts, *, epochs: int, folder: Path) -> None:
        """Save the model of an arm and the first seed."""


@dataclass(frozen=True)
class Study:
    """A planned comparison."""

    runs: Runs
    division: Division
    metric: str  # the planned measure, one of `MEASURES`
    seeds: int  # number of seeds of each arm
    epochs: int  # of a full training
    count: int  # number of settings of each arm in the first round of tuning
    file: Path  # of the finished trials

    @property
    def tuned_by(self) -> str:
        """The measure of tuning: chance is well calibrated, so not the calibration error."""
        return "accuracy" if self.metric == "calibration_error" else self.metric

    def tune(self, arm: Arm) -> Tuned | None:
        """Tune an arm; None if it always diverges."""
        finished, parts = JsonLines(self.file), self.division.tuning()

        def evaluate(setting: Setting, epochs: int) -> float | None:
            key = ("tuning", arm.name, tuple(setting.items()), epochs)
            if key not in finished:
                evaluated = self.runs.run(arm, setting, parts, seed=TUNING_SEED, epochs=epochs)
                values = None if evaluated is None else measure(self.tuned_by, evaluated).values()
                finished[key] = None if values is None else statistics.fmean(values)
            return finished[key]

        tuned = tune(arm.grid, evaluate, count=self.count, epochs=self.epochs)
        finished["tuned", arm.name] = None if tuned is None else asdict(tuned)
        return tuned

    def run(self, arm: Arm, setting: Setting, seed: int) -> Any:
        """Run an arm with a seed, and return and save its measures and the outcome of the planned one per image."""
        evaluated = self.runs.run(arm, setting, self.division.of_seed(seed), seed=seed, epochs=self.epochs)
        result: Any = None
        if evaluated is not None:
            outcomes = measure(self.metric, evaluated, per_image=True)
            names = [name for name in MEASURES if evaluated.unseen is not None or not name.startswith(UNSEEN)]
            values = {name: mean_or_none(name, evaluated) for name in names}
            result = {"values": values, "ids": [*outcomes], "outcomes": [*outcomes.values()]}
        JsonLines(self.file, read=False)["run", arm.name, seed] = result
        return result

    def complete(self, arms: Sequence[Arm], say: Callable[[str], None], *, workers: int) -> dict[Any, Any]:
        """Run what is not finished, by processes, and return all results."""
        finished = JsonLines(self.file)
        open_arms = [arm for arm in arms if ("tuned", arm.name) not in finished]
        if finished:
            done = sum(key[0] == "run" for key in finished)
            before = f"{len(arms) - len(open_arms)} of {len(arms)} arms are tuned"
            say(f"resumed   {before}, and {done} of {self.seeds * len(arms)} runs are finished")
        with _pool(workers) as pool:
            for arm, tuned, left in _finished({pool.submit(self.tune, arm): arm for arm in open_arms}):
                result = "all settings diverged"
                if tuned is not None:
                    setting, tried = describe_setting(tuned.setting), f"({tuned.count} settings)"
                    result = f"{setting}; {self.tuned_by} {tuned.score:.2f} % in tuning {tried}"
                say(f"tuned     {arm.name}: {result}{left}")
            finished = JsonLines(self.file)
            pending: dict[Any, Any] = {}
            for seed, arm in itertools.product(range(self.seeds), arms):
                best: Any = finished["tuned", arm.name]
                if best is not None and ("run", arm.name, seed) not in finished:
                    pending[pool.submit(self.run, arm, best["setting"], seed)] = arm, seed
            for (arm, seed), result, left in _finished(pending):
                value = "diverged" if result is None else f"{self.metric} {result['values'][self.metric]:.2f} %"
                say(f"ran       {arm.name}, seed {seed}: {value}{left}")
        return JsonLines(self.file)

    def compare(self, arms: Sequence[Arm], results: Mapping[Any, Any], reference: str) -> RunComparison | None:
        """Compare arms with a reference by the planned measure; None if it or all others lack seeds.

        Runs with the same seed share their images if these are drawn for each seed, and are then paired.
        """
        values: dict[str, dict[int, Any]] = {}
        for arm, seed in itertools.product(arms, range(self.seeds)):
            if (run := results.get(("run", arm.name, seed))) is not None:
                values.setdefault(arm.name, {})[seed] = dict(zip(run["ids"], run["outcomes"], strict=True))
        if len(values.get(reference, ())) < self.seeds or len(values) < 2:
            return None
        planned, division = MEASURES[self.metric], self.division
        return compare_runs(
            values,
            reference=reference,
            higher_is_better=planned.higher_is_better,
            perfect=planned.perfect,
            seeds=self.seeds,
            test="paired" if division.is_redrawn else "welch",
            test_fraction=division.test_fraction if division.test is None else None,
        )


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that end in the middle of their tasks when this one is interrupted, or is killed."""
    spawn = get_context("spawn")  # forked processes would share the threads of torch
    parent, main = spawn.Pipe(duplex=False)
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, spawn, _start_worker, (threads, [*imported], parent)) as pool:
        try:
            yield pool
        except BaseException:
            main.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(threads: int, modules: Sequence[str], parent: Connection) -> None:
    """Import the modules of one's own parts, divide the cores, and watch for the end of the pipe to the parent."""

    def end_with_parent() -> None:
        parent.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too
    import_modules([f"--import={name}" for name in modules])
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def _finished(tasks: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield what each task is for when it is finished, its result, and what is left; an error cancels the others."""
    start = time.monotonic()
    for done, future in enumerate(as_completed(tasks), start=1):
        if future.exception() is not None:
            for other in tasks:
                other.cancel()
        result = future.result()
        seconds = (time.monotonic() - start) / done * (len(tasks) - done)
        left = f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"
        yield tasks[future], result, f"   [{done} of {len(tasks)}" + (f", {left} left]" if done < len(tasks) else "]")
