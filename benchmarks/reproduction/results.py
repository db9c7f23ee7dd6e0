"""The files of `results/runs`: one JSON file per finished run, and locks of the runs in progress."""

import fcntl
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hf_sphere.utils.files import write_text
from reproduction.definitions import is_higher_better, is_share
from reproduction.entries import Entry, PlannedRun, QueueError, plan

REQUIRED = {
    "name": str,
    "group": str,
    "seed": int,
    "digest": str,
    "metrics": dict,
    "device": str,
    "core_minutes": (int, float),
    "data": dict,
    "commit": str,
    "versions": dict,
}
"""What a results file needs, with the type of each value."""


def describe(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a run, the accuracy of its last epochs, and its core-minutes, if they are comparable."""
    time = {"core_minutes": run["core_minutes"]} if is_on_cpu(run) and not run.get("time_is_incomplete") else {}
    return last_quarter(run.get("history", {})) | time | run["metrics"]


def is_on_cpu(run: Mapping[str, Any]) -> bool:
    """Return whether a run used no GPU; its core-minutes are comparable with those of other such runs only."""
    return "core" in run["device"]


def last_quarter(history: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the mean accuracy on the evaluation split over the last quarter of the epochs, if it was measured."""
    values = history.get("eval_accuracy", [])
    last = values[-math.ceil(len(values) / 4) :]
    return {"eval_accuracy_last_quarter": statistics.fmean(last)} if last else {}


@dataclass
class Results:
    """Results of finished runs.

    Attributes:
        folder: Folder of the files.
        runs: Contents of the valid files, by the run's name.
        problems: Messages about files that are damaged or do not belong to their name.
    """

    folder: Path
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Read all files of a folder; invalid ones are reported in `problems` and left out."""
        results = cls(folder)
        for path in sorted(folder.glob("*.json")):
            results._read_file(path)
        return results

    def refresh(self, run: PlannedRun) -> None:
        """Read the file of a run again, if there is one."""
        path = self.folder / f"{run.name}.json"
        if path.is_file():
            self._read_file(path)

    def _read_file(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.problems.append(f"{path} is damaged and not used: {error}")
            return
        if not isinstance(content, dict):
            self.problems.append(f"{path} is not used: it is no mapping.")
        elif wrong := [name for name, kind in REQUIRED.items() if not isinstance(content.get(name), kind)]:
            self.problems.append(f"{path} is not used: missing, or of another type: {', '.join(wrong)}.")
        elif "torch" not in content["versions"] or not (content["metrics"] or content.get("diverged")):
            self.problems.append(f"{path} is not used: it has no version of torch, or no metrics.")
        elif not all(
            type(value) in (int, float) and math.isfinite(value)
            for value in [content["core_minutes"], *content["metrics"].values()]
        ):
            self.problems.append(f"{path} is not used: its metrics are not finite numbers.")
        elif wrong := [name for name, v in content["metrics"].items() if is_share(name) and not 0 <= v <= 1]:
            self.problems.append(f"{path} is not used: {', '.join(wrong)} is not between 0 and 1.")
        elif not content["name"] == path.stem == f"{content['group']}-seed{content['seed']}":
            self.problems.append(
                f"{path} is not used: it has the results of {content['name']}, seed {content['seed']}."
            )
        else:
            self.runs[path.stem] = content

    def write(self, content: Mapping[str, Any]) -> Path:
        """Write the results of a run."""
        path = self.folder / f"{content['name']}.json"
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        write_text(path, f"{{\n{lines}\n}}\n")
        self.runs[content["name"]] = dict(content)
        return path

    def state(self, run: PlannedRun, entries: Iterable[Entry]) -> str:
        """Return `done`, `stale` (of other settings), `missing`, or `waiting` (for the tuning of its settings)."""
        tuned = self.tuned(run, entries)
        if tuned is None:
            return "waiting"
        result = self.runs.get(run.name)
        if result is None:
            return "missing"
        return "done" if result["digest"] == run.digest(tuned) else "stale"

    def tuned(self, run: PlannedRun, entries: Iterable[Entry]) -> dict[str, Any] | None:
        """Return the values that were selected for a run on the entry `tuned_by`; None if that is not finished."""
        entries = list(entries)
        tuning = next((entry for entry in entries if entry.entry == run.entry.tuned_by), None)
        if tuning is None:
            return {}
        scores: dict[str, list[float]] = {}
        grids: dict[str, Mapping[str, Any]] = {}
        for candidate in plan(tuning):
            if candidate.config != run.config or {**candidate.grid, **run.grid} != {**run.grid, **candidate.grid}:
                continue
            if self.state(candidate, entries) != "done":
                return None
            # A run that diverged has no metrics and cannot be selected.
            metrics = self.runs[candidate.name]["metrics"]
            metric = run.entry.selection_metric
            if metrics and metric not in metrics:
                raise QueueError(f"{candidate.name} has no {metric}; it has {', '.join(metrics)}.")
            score = (metrics[metric] if is_higher_better(metric) else -metrics[metric]) if metrics else -math.inf
            scores.setdefault(candidate.group, []).append(score)
            grids[candidate.group] = candidate.grid
        return dict(grids[max(scores, key=lambda group: statistics.mean(scores[group]))])

    def stale(self, entries: list[Entry]) -> list[str]:
        """Return the names of results of no entry, of other settings than the queue's, or of none that is selected."""
        planned = {run.name: run for entry in entries for run in plan(entry)}
        return [
            name for name in sorted(self.runs) if name not in planned or self.state(planned[name], entries) != "done"
        ]

    def is_locked(self, run: PlannedRun) -> bool:
        """Return whether a run is in progress."""
        if not (self.folder / ".locks" / run.name).is_file():
            return False
        lock = self.lock(run)
        if lock is not None:
            lock.close()
        return lock is None

    def lock(self, run: PlannedRun) -> IO[bytes] | None:
        """Lock a run, or return None if another queue has locked it.

        The lock is released when the file is closed by this process and by those that inherit it, however they end.
        """
        folder = self.folder / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / run.name).open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file
