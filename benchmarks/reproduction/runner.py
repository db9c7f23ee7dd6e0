"""Starting, stopping and recording the runs of the queue."""

import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import psutil
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name

from hf_sphere.training.output_dir import list_checkpoints
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.files import write_json
from reproduction.definitions import define
from reproduction.entries import ROOT, PlannedRun, read_settings
from reproduction.layers import compare_layers, read_layers
from reproduction.results import last_quarter

PACKAGES = ("torch", "torchvision", "transformers", "timm", "accelerate", "datasets", "numpy")
PROGRESS_FILE = "progress.json"
SAVE_SECONDS = 30.0
"""Interval of saving the time used, which a queue that is killed would lose."""

DIVERGED = "not finite"
"""Part of the message of a run whose loss or weights are not finite."""

STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit statuses of a process that was asked to stop."""


@dataclass(frozen=True)
class Places:
    """Folders of the queue.

    Attributes:
        work: Output folders of the runs, with their checkpoints.
        data: Folder with local copies of datasets, named as on the Hub; others are loaded from the Hub.
    """

    work: Path
    data: Path | None

    def dataset(self, name: str) -> str:
        """Return the local copy of a dataset, or its name."""
        local = self.data / name if self.data is not None else None
        return str(local.resolve()) if local is not None and local.is_dir() else name


class Job:
    """A run in progress: one process after another, the training and the recipes after it.

    Args:
        run: The run.
        tuned: Values selected by the tuning, by argument.
        lock: Lock of the run. The processes inherit it, so that a run whose queue was killed stays locked.
        places: Folders.
    """

    def __init__(self, run: PlannedRun, tuned: Mapping[str, Any], lock: IO[bytes], places: Places) -> None:
        self.run, self.tuned, self.places = run, tuned, places
        self._lock = lock
        self.folder = places.work / run.name
        self._digest = run.digest(tuned)
        progress = self._read_progress()
        if progress.get("digest") != self._digest:  # of other settings, or of none
            shutil.rmtree(self.folder, ignore_errors=True)
            progress = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._core_seconds: float = progress.get("core_seconds", 0.0)
        self._seconds: float = progress.get("seconds", 0.0)
        self._commit: str = progress.get("commit") or commit()  # when the run starts, since it may change meanwhile
        self._write_progress()  # so that the checkpoints are known even if the queue is killed
        self._commands = self._list_commands()
        self._process = self._start_next()

    def poll(self) -> str:
        """Return `running`, `finished`, `diverged`, `stopped` or `failed`, and start the next process if one ended."""
        if self._process is not None:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > self._saved + SAVE_SECONDS:
                    used = psutil.Process(self._process.pid).cpu_times()
                    self._write_progress(used.user + used.system, time.monotonic() - self._started)
                return "running"
            code = os.waitstatus_to_exitcode(status)
            self._process.returncode = code  # otherwise `Popen` waits for the process again
            self._core_seconds += usage.ru_utime + usage.ru_stime
            self._seconds += time.monotonic() - self._started
            self._write_progress()
            if code:
                return "stopped" if code in STOPPED else "diverged" if self._has_diverged() else "failed"
            self._process = self._start_next()
        return "running" if self._process is not None else "finished"

    def stop(self, *, at_once: bool = False) -> None:
        """Request a checkpoint and the end of the process, or kill it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)

    def log_tail(self, lines: int = 6) -> str:
        """Return the last lines that the run printed."""
        text = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        shown = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
        return "\n".join([line for line in shown if line][-lines:])

    def keep_model(self, folder: Path) -> None:
        """Copy the trained model, without its checkpoints, to the folder of its group."""
        ignored = shutil.ignore_patterns("checkpoint-*", "runs")
        shutil.copytree(self.folder / "model", folder / self.run.group, ignore=ignored, dirs_exist_ok=True)

    def remove(self) -> None:
        """Remove the output folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def unlock(self) -> None:
        """Release the lock of the run."""
        self._lock.close()

    def collect(self) -> dict[str, Any]:
        """Return the contents of the results file."""
        metrics, history = self._read_metrics()
        metrics |= last_quarter(history) if metrics else {}
        layers = read_layers(self.folder / "after")
        metrics |= {name: value for name, value in compare_layers(layers).items() if math.isfinite(value)}
        name, copy = self._dataset()
        definitions = {name: define(name) for name in metrics}
        content: dict[str, Any] = {
            "name": self.run.name,
            "group": self.run.group,
            "seed": self.run.seed,
            "entry": self.run.entry.entry,
            "config": self.run.config,
            "digest": self._digest,
            "numerics": find_task(self.run.entry.task).numerics,
            "overrides": self.run.overrides(self.tuned),
            "metrics": {name: value for name, value in metrics.items() if definitions[name]},
            "definitions": {name: text for name, text in definitions.items() if text},
            "history": history,
            **({"layers": layers} if layers else {}),
            "data": {"name": name, "encoding": _image_encoding(Path(copy))},
            "data_hash": hash_data(copy),
            "device": describe_device(),
            "processor": describe_processor(),
            "threads": int(self._environment().get("OMP_NUM_THREADS") or psutil.cpu_count(logical=False) or 1),
            "minutes": round(self._seconds / 60, 2),
            "core_minutes": round(self._core_seconds / 60, 2),
            "commit": self._commit,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "command": " ".join(["python", self.run.script, *_quoted(self.run.arguments(self.tuned))]),
        }
        if not metrics:
            content["diverged"] = next(line for line in self.log_tail().splitlines() if DIVERGED in line)
        return content

    def _list_commands(self) -> list[list[str]]:
        """Return the commands that are left: the training, unless it has ended, and the later recipes."""
        model, others = self.folder / "model", self.folder / "after"
        shutil.rmtree(others, ignore_errors=True)
        commands = []
        for words in self.run.entry.after:
            values = _Placeholders(model, others, self.places)
            job = [word.format_map(values) for word in words.split()]
            commands.append(["-m", "hf_sphere.commands.main", *job])
        if (model / "all_results.json").is_file():
            return commands
        training = [self.run.script, *self.run.arguments(self.tuned), "--dataset_name", self._dataset()[1]]
        training += ["--output_dir", str(model), "--disable_tqdm"]
        training += ["--resume_from_checkpoint", "latest"] if list_checkpoints(model) else ["--overwrite_output_dir"]
        return [training, *commands]

    def _start_next(self) -> subprocess.Popen | None:
        """Start the next command, if there is one."""
        if not self._commands:
            return None
        self._started = time.monotonic()
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, *self._commands.pop(0)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=self._environment(),
                pass_fds=[self._lock.fileno()],
            )

    def _has_diverged(self) -> bool:
        return DIVERGED in self.log_tail() and not (self.folder / "model" / "all_results.json").is_file()

    def _read_progress(self) -> dict[str, Any]:
        path = self.folder / PROGRESS_FILE
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _write_progress(self, core_seconds: float = 0.0, seconds: float = 0.0) -> None:
        """Write the time used so far, with that of the running process."""
        self._saved = time.monotonic()
        core_seconds, seconds = core_seconds + self._core_seconds, seconds + self._seconds
        progress = {"digest": self._digest, "core_seconds": core_seconds, "seconds": seconds}
        write_json(self.folder / PROGRESS_FILE, {**progress, "commit": self._commit})

    def _read_metrics(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Return the numbers of all results by name, and those of each epoch."""
        metrics: dict[str, float] = {}
        history: dict[str, list[float]] = {}
        for path in sorted(
            [self.folder / "model" / "all_results.json", *self.folder.glob("after/**/all_results.json")]
        ):
            if not path.is_file():
                continue
            content = json.loads(path.read_text(encoding="utf-8"))
            prefix = "" if path.parent.name == "model" else f"{path.parent.name}/"
            metrics |= {f"{prefix}{k}": v for k, v in content.items() if _is_number(v)}
            for epoch in content.get("history", []):
                for name, value in epoch.items():
                    history.setdefault(name, []).append(float(f"{value:.6g}"))
        return metrics, history

    def _environment(self) -> dict[str, str]:
        """Return the environment of the processes; on a CPU they have one thread."""
        return {**os.environ, **({} if self.run.entry.device == "gpu" else {"OMP_NUM_THREADS": "1"})}

    def _dataset(self) -> tuple[str, str]:
        """Return the name of the dataset, and its local copy, if there is one."""
        settings = read_settings(self.run.config) | self.run.overrides(self.tuned)
        name = settings.get("dataset_name", "digits")
        return name, self.places.dataset(name)


class _Placeholders(dict):
    """Values of the placeholders in the commands of an entry."""

    def __init__(self, model: Path, folder: Path, places: Places) -> None:
        super().__init__(model=model.resolve(), folder=folder.resolve())
        self._places = places

    def __missing__(self, name: str) -> str:
        return self._places.dataset(name)


def describe_device() -> str:
    """Return the model of the GPU, which runs use if there is one, or that of the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"one core of {describe_processor().partition(',')[0]}"


def describe_processor() -> str:
    """Return the name of the processor, and, since virtual machines hide it, the numbers of its family and model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = dict(re.findall(r"^(model name|cpu family|model|stepping)\s*: (.*)$", text, re.MULTILINE))
    name = found.pop("model name", "") or platform.processor() or platform.machine()
    return ", ".join([name, *(f"{key.removeprefix('cpu ')} {value}" for key, value in sorted(found.items()))])


@functools.cache
def hash_data(dataset: str) -> str:
    """Return the SHA-256 of the files of a folder, or the commit of the cached copy from the Hub, or nothing."""
    folder = Path(dataset)
    if not folder.is_dir():
        reference = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset") / "refs" / "main"
        return reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def commit() -> str:
    """Return the commit of the repository, with `-modified` if tracked files differ from it; empty without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    modified = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("-modified" if modified else "")


def _image_encoding(folder: Path) -> str:
    """Return the format of the first encoded image of a folder of parquet files; empty if there is none."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("*.parquet")):
        for value in pq.ParquetFile(path).read_row_group(0).slice(0, 1).to_pylist()[0].values():
            data = value.get("bytes") if isinstance(value, dict) else None
            if data:
                return "JPEG" if data.startswith(b"\xff\xd8\xff") else "PNG" if data.startswith(b"\x89PNG") else "other"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _quoted(words: list[str]) -> list[str]:
    return [f"'{word}'" if re.search(r"[^\w./,=:+-]", word) else word for word in words]
