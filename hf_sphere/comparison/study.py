"""The tuning and the runs of a comparison, which resume where they were interrupted."""

import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hf_sphere.comparison.arms import TUNING_SEED, Arm, Division, Setting, Tuned, describe_setting, tune
from hf_sphere.comparison.frozen import FrozenRuns
from hf_sphere.comparison.measures import MEASURES, mean_or_none, measure
from hf_sphere.comparison.plan import UNSEEN, Plan
from hf_sphere.comparison.trained import TrainingRuns
from hf_sphere.utils.imports import import_modules, imported
from hf_sphere.utils.json_lines import JsonLines


@dataclass(frozen=True)
class Study:
    """Arms that are tuned and run on the same parts of the data."""

    runs: FrozenRuns | TrainingRuns
    arms: Sequence[Arm]
    division: Division
    plan: Plan
    epochs: int  # of a full training
    folder: Path  # of the results

    @property
    def tuned_by(self) -> str:
        """The measure of tuning: chance is well calibrated, so not the calibration error."""
        return "accuracy" if self.plan.metric == "calibration_error" else self.plan.metric

    def read_trials(self, *, read: bool = True) -> JsonLines:
        """Return the finished trials by key; unless they are `read`, only to add some."""
        return JsonLines(self.folder / "trials.jsonl", read=read)

    def tune(self, arm: Arm) -> Tuned | None:
        """Tune an arm; None if it always diverges."""
        finished, parts = self.read_trials(), self.division.tuning()

        def evaluate(setting: Setting, epochs: int) -> float | None:
            key = ("tuning", arm.name, tuple(setting.items()), epochs)
            if key not in finished:
                evaluated = self.runs.run(arm, setting, parts, seed=TUNING_SEED, epochs=epochs)
                values = evaluated and measure(self.tuned_by, evaluated).values()
                finished[key] = values and statistics.fmean(values)
            return finished[key]

        tuned = tune(arm.grid, evaluate, count=self.plan.num_settings, epochs=self.epochs)
        finished["tuned", arm.name] = None if tuned is None else asdict(tuned)
        return tuned

    def run(self, arm: Arm, setting: Setting, seed: int) -> Any:
        """Run an arm with a seed, and return and save its measures and the outcome of the planned one per image."""
        evaluated = self.runs.run(arm, setting, self.division.of_seed(seed), seed=seed, epochs=self.epochs)
        result: Any = None
        if evaluated is not None:
            outcomes = measure(self.plan.metric, evaluated, per_image=True)
            names = [name for name in MEASURES if evaluated.unseen is not None or not name.startswith(UNSEEN)]
            values = {name: mean_or_none(name, evaluated) for name in names}
            result = {"values": values, "ids": [*outcomes], "outcomes": [*outcomes.values()]}
        self.read_trials(read=False)["run", arm.name, seed] = result
        return result

    def complete(self, workers: int) -> None:
        """Tune and run what is not finished, by processes."""
        finished, runs, metric = self.read_trials(), self.plan.seeds * len(self.arms), self.plan.metric
        open_arms = [arm for arm in self.arms if ("tuned", arm.name) not in finished]
        if finished:
            done, tuned = sum(key[0] == "run" for key in finished), len(self.arms) - len(open_arms)
            print(f"resumed   {tuned} of {len(self.arms)} are tuned, and {done} of {runs} runs are finished")
        with _pool(workers) as pool:
            for arm, tuned, left in _finished({pool.submit(self.tune, arm): arm for arm in open_arms}):
                result = "all settings diverged"
                if tuned is not None:
                    score = f"{self.tuned_by} {tuned.score:.2f} % in tuning ({tuned.count} settings)"
                    result = f"{describe_setting(tuned.setting)}; {score}"
                print(f"tuned     {arm.name}: {result}{left}")
            finished = self.read_trials()
            pending: dict[Any, Any] = {}
            for seed, arm in itertools.product(range(self.plan.seeds), self.arms):
                best: Any = finished["tuned", arm.name]
                if best is not None and ("run", arm.name, seed) not in finished:
                    pending[pool.submit(self.run, arm, best["setting"], seed)] = arm, seed
            for (arm, seed), result, left in _finished(pending):
                value = "diverged" if result is None else f"{metric} {result['values'][metric]:.2f} %"
                print(f"ran       {arm.name}, seed {seed}: {value}{left}")


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
    """Yield what each task is for when it is finished, its result, and what is left."""
    start = time.monotonic()
    for done, future in enumerate(as_completed(tasks), start=1):
        minutes = (time.monotonic() - start) / 60 / done * (len(tasks) - done)
        left = f", about {minutes:.1f} min left" if done < len(tasks) else ""
        yield tasks[future], future.result(), f"   [{done} of {len(tasks)}{left}]"
