"""Run the queue of `benchmarks/queue.yaml` and write one results file per finished run to `results/runs`.

python benchmarks/reproduce.py --status
python benchmarks/reproduce.py --minutes 160 --data_dir ../shared/data
python benchmarks/reproduce.py --only mnist-lenet5 --jobs 1 --results_dir repeated

Runs start in order of priority, `--jobs` at a time: one per CPU core, or one on the GPU. Finished runs are skipped,
interrupted ones resume from their last checkpoint, and results of other settings are replaced. Several queues can share
a results folder: each run is locked while it is in progress. `benchmarks/report.py` writes the tables.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.entries import ROOT, Entry, PlannedRun, QueueError, plan, read_queue
from reproduction.results import Results
from reproduction.runner import Job, Places

QUEUE = ROOT / "benchmarks" / "queue.yaml"
RESULTS = ROOT / "results" / "runs"
LOCAL_DATA = ROOT.parent / "shared" / "data"
SECONDS_TO_STOP = 60
"""Runs get this long to write a checkpoint before the queue's time is over."""


class Queue:
    """Runs of the entries on one machine.

    Args:
        entries: The entries, in order of priority.
        results: Results of finished runs.
        places: Folders.
        jobs: Number of runs at a time.
        device: `cpu` or `gpu`; entries of the other kind are left out.
    """

    def __init__(self, entries: list[Entry], results: Results, places: Places, jobs: int, device: str) -> None:
        self.entries, self.results, self.places, self.jobs = entries, results, places, jobs
        self.planned = [run for entry in entries if entry.device == device for run in plan(entry)]
        self.keep_models: Path | None = None
        """Folder of the trained models of seed 0; the others are removed."""
        self.failed: list[str] = []
        self._running: list[Job] = []
        self._stopping = False

    def run(self, minutes: float) -> None:
        """Run what is missing, for at most this many minutes."""
        end = time.monotonic() + 60 * minutes
        previous = {number: signal.signal(number, self._request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                self._stopping = self._stopping or time.monotonic() > end - min(SECONDS_TO_STOP, 30 * minutes)
                if self._stopping:
                    break
                self._fill()
                if not self._running:
                    break
                self._wait(1.0)
            self._stop_all()
            locked = [] if self._stopping else [run.name for run in self.planned if self.results.is_locked(run)]
            if locked:
                print(f"{len(locked)} run(s) are in progress in another queue: {', '.join(locked)}.")
        finally:
            for job in self._running:  # after an error; they write a checkpoint and end
                job.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _request_stop(self, number: int, frame: Any) -> None:
        self._stopping = True

    def _fill(self) -> None:
        """Start runs until every slot is in use."""
        for run in self.planned:
            if len(self._running) >= self.jobs:
                return
            if run.name in self.failed or any(job.run is run for job in self._running):
                continue
            if self.results.state(run, self.entries) not in ("missing", "stale"):
                continue
            lock = self.results.lock(run)
            if lock is None:
                continue
            self.results.refresh(run)  # another queue may have finished it
            tuned = self.results.tuned(run, self.entries)
            if tuned is None or self.results.state(run, self.entries) == "done":
                lock.close()
                continue
            print(f"{time.strftime('%H:%M')}  start     {run.name}", flush=True)
            self._running.append(Job(run, tuned, lock, self.places))

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        for job in list(self._running):
            state = job.poll()
            if state == "running":
                continue
            self._running.remove(job)
            if state == "stopped" and not self._stopping:  # by somebody else; not started again, nor again and again
                state = "failed"
            print(f"{time.strftime('%H:%M')}  {state:<9} {job.run.name}", flush=True)
            if state == "failed":
                self.failed.append(job.run.name)
                print(f"{job.log_tail()}\n(see {job.folder / 'log.txt'})", file=sys.stderr, flush=True)
            elif state in ("finished", "diverged"):
                self.results.write(job.collect())
                if self.keep_models is not None and state == "finished" and job.run.seed == 0:
                    job.keep_model(self.keep_models)
                job.remove()  # after an error of `write` the next queue collects the results again
            job.unlock()

    def _stop_all(self) -> None:
        """Let the runs write checkpoints; kill those that take too long, whose last checkpoint is complete."""
        for job in self._running:
            job.stop()
        deadline = time.monotonic() + SECONDS_TO_STOP
        while self._running and time.monotonic() < deadline:
            self._wait(0.2)
        for job in self._running:
            job.stop(at_once=True)
        self._running.clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Read the queue, and run it or show its state."""
    args = parse(argv)
    try:
        entries = read_queue(args.queue)
        known = {name for entry in entries for run in plan(entry) for name in names_of(run)}
        if unknown := set(args.only) - known:
            raise QueueError(f"there is no entry or run {', '.join(sorted(unknown))}; see --status.")
        results = Results.read(args.results_dir)
        for problem in results.problems:
            print(f"Warning: {problem}", file=sys.stderr)
        if args.status:
            show_status(entries, results)
            return
        device = args.device or ("gpu" if has_gpu() else "cpu")
        # The others remain known, since they may have tuned the chosen ones.
        if args.data_dir is not None and not args.data_dir.is_dir():
            raise QueueError(f"--data_dir {args.data_dir} does not exist.")
        places = Places(args.work_dir, args.data_dir or (LOCAL_DATA if LOCAL_DATA.is_dir() else None))
        jobs = args.jobs or ((os.cpu_count() or 1) if device == "cpu" else 1)
        queue = Queue(entries, results, places, jobs, device)
        queue.planned = [run for run in queue.planned if not args.only or names_of(run) & set(args.only)]
        if not queue.planned:
            print(f"There are no such runs for --device {device}.")
        elif all(results.state(run, entries) == "done" for run in queue.planned):
            print(f"All runs are finished, in {args.results_dir}; --results_dir FOLDER repeats them.")
        queue.keep_models = args.keep_models
        queue.run(args.minutes)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    if queue.failed:
        sys.exit(f"{len(queue.failed)} run(s) failed: {', '.join(queue.failed)}.")


def names_of(run: PlannedRun) -> set[str]:
    """Return the names by which `--only` selects a run: of its entry, of the runs of all seeds, and its own."""
    return {run.entry.entry, run.group, run.name}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--status", action="store_true", help="show what is done, running and missing")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop before this many minutes (default: a day)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these entries or runs")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: gpu if there is one")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per CPU core, or one on the GPU)")
    parser.add_argument("--data_dir", type=Path, help="local datasets (default: ../shared/data if it exists)")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "outputs" / "reproduce", help="checkpoints of the runs")
    parser.add_argument("--keep_models", type=Path, metavar="FOLDER", help="keep the models of seed 0 in this folder")
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="results files")
    parser.add_argument("--queue", type=Path, default=QUEUE, help="entries")
    args = parser.parse_args(argv)
    if (args.jobs is not None and args.jobs < 1) or not args.minutes > 0:
        parser.error(f"--jobs must be at least 1 and --minutes positive; got {args.jobs} and {args.minutes:g}.")
    return args


def has_gpu() -> bool:
    """Whether torch can use a CUDA device."""
    import torch

    return torch.cuda.is_available()


def show_status(entries: list[Entry], results: Results) -> None:
    """Print a line per entry: numbers of runs by state, and minutes left."""
    width = max(len(entry.entry) for entry in entries)
    print(f"{'entry':<{width}}  device   done running   stale missing waiting   minutes left")
    for entry in entries:
        runs = plan(entry)
        states = [state_of(run, entries, results) for run in runs]
        counts = [states.count(state) for state in ("done", "running", "stale", "missing", "waiting")]
        left = (len(runs) - counts[0]) * entry.minutes
        print(f"{entry.entry:<{width}}  {entry.device:<6}" + "".join(f"{n:>8}" for n in counts) + f"{left:>15,.0f}")
    stale = results.stale(entries)
    if stale:
        print(f"\nResults of other settings, or of no entry: {', '.join(stale)}.")


def state_of(run: PlannedRun, entries: list[Entry], results: Results) -> str:
    """Return the state of a run, including `running`."""
    state = results.state(run, entries)
    return "running" if state in ("missing", "stale") and results.is_locked(run) else state


if __name__ == "__main__":
    main()
