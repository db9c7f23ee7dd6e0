"""Trials of the soak on image indices, embeddings and predictions.

Each command replaces or extends a result, or continues it, and is disturbed: killed or stopped at a file event, among
them the renames of a folder's replacement, or at any time; its disk is full; a file is damaged; a second command writes
at the same time, or a reader reads. Whatever happens, a reader must find one complete generation: that of before or
after each command that ended early, and of after it otherwise, with the embedding or prediction of every image.
"""

import itertools
import json
import random
import resource
import shutil
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from disturbances import (
    CRASHED,
    DAMAGE,
    FULL_DISK,
    HOME,
    KILL,
    READER,
    SECOND_WRITER,
    Process,
    UnexpectedEndError,
    damage,
    fill_disk,
    kill_after,
    signal_at_event,
)
from PIL import Image

from hf_sphere.commands.command_line import run_main
from hf_sphere.search import ImageIndex
from hf_sphere.search.store import read_embeddings

State = tuple[str, ...]
"""What a result was made of: folders of images, or the seed of a sample. Empty if there is none."""

PHOTOS = ("a", "b", "c")
"""Folders of images."""


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        job: Name of the job of hf-sphere.
        argv: Its arguments.
        change: Maps the state before to the state after.
    """

    job: str
    argv: Sequence[str]
    change: Callable[[State], State]

    def __call__(self) -> None:
        job = import_module(f"hf_sphere.commands.{self.job}")
        run_main(lambda _: job.main([*self.argv, "--disable_tqdm", "--num_workers", "0"]))

    @property
    def line(self) -> str:
        return f"hf-sphere {self.job} {' '.join(self.argv)}"


class Result(ABC):
    """A result that commands write.

    Args:
        path: Its folder or file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def command(self, state: State, draw: random.Random) -> Command:
        """Return a command that replaces or extends the result."""

    @abstractmethod
    def read(self) -> State:
        """Return the state of a complete result, as a user would read it.

        Raises:
            UnexpectedEndError: If it is not complete or has other values than an undisturbed one.
        """

    def files(self) -> list[Path]:
        """Return the files whose damage is detected."""
        return []


class IndexResult(Result):
    """An image index."""

    def command(self, state: State, draw: random.Random) -> Command:
        name = draw.choice(PHOTOS)
        images = ["--images", str(HOME / "photos" / name), "--batch_size", "3"]
        if state and draw.random() < 0.75:
            return Command(
                "index",
                [*images, "--add_to", str(self.path)],
                lambda before: tuple(sorted({*before, name})) if before else (),
            )
        words = [*images, "--model_name_or_path", str(HOME / "model"), "--output_dir", str(self.path)]
        words += ["--kind", draw.choice(["torch", "flat", "ivf", "hnsw"])]
        return Command("index", [*words, *["--overwrite_output_dir"] * bool(state)], lambda _: (name,))

    def read(self) -> State:
        try:
            index = ImageIndex.load(self.path)
        except FileNotFoundError as error:
            if "index.json" in str(error):
                return ()
            raise
        expected = torch.load(HOME / "embeddings.pt")
        present = [index.path(row) for row in range(len(index))]
        state = tuple(sorted({Path(path).relative_to(HOME / "photos").parts[0] for path in present}))
        complete = [path for path in expected if Path(path).relative_to(HOME / "photos").parts[0] in state]
        if sorted(present) != sorted(complete):
            raise UnexpectedEndError(f"lost or doubled: {set(complete) ^ set(present) or Counter(present)}")
        for row, path in enumerate(present):
            if not torch.allclose(index.embeddings[row], expected[path], atol=1e-5):
                raise UnexpectedEndError(f"row {row} has not the embedding of {path}")
        distances, rows = index.neighbor_search.search(index.embeddings, 1)
        if rows[:, 0].tolist() != list(range(len(index))) or distances.abs().max() > 1e-5:
            raise UnexpectedEndError(f"images are not their own nearest neighbors: {rows[:, 0].tolist()}")
        return state

    def files(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())


class EmbeddingsResult(Result):
    """Embeddings of a sample."""

    def command(self, state: State, draw: random.Random) -> Command:
        seed = draw.choice("12")
        words = ["--model_name_or_path", str(HOME / "model"), "--dataset_name", "digits", "--max_samples", "12"]
        words += ["--seed", seed, "--cache_dir", str(HOME / "cache"), "--output_dir", str(self.path)]
        return Command("extract", [*words, *["--overwrite_output_dir"] * bool(state)], lambda _: (seed,))

    def read(self) -> State:
        try:
            data = read_embeddings(str(self.path))
        except FileNotFoundError:
            return ()
        for seed in "12":
            other = read_embeddings(str(HOME / "references" / seed))
            names = ("embeddings", "labels", "predictions", "indices", "row_ids")
            if data.about == other.about and all(torch.equal(getattr(data, n), getattr(other, n)) for n in names):
                return (seed,)
        raise UnexpectedEndError(f"{self.path} has the embeddings of neither sample: {data}")

    def files(self) -> list[Path]:
        return sorted(self.path.rglob("*.parquet"))


class PredictionsResult(Result):
    """A table of predictions."""

    def command(self, state: State, draw: random.Random) -> Command:
        name = draw.choice(PHOTOS[:2])
        words = ["--model_name_or_path", str(HOME / "model"), "--images", str(HOME / "photos" / name)]
        words += ["--batch_size", "3", "--output", str(self.path), *["--overwrite_output"] * bool(state)]
        return Command("predict", words, lambda _: (name,))

    def read(self) -> State:
        if not self.path.exists():
            return ()
        text = self.path.read_text()
        for name in PHOTOS[:2]:
            if text == (HOME / "references" / f"{name}.csv").read_text():
                return (name,)
        raise UnexpectedEndError(f"{self.path} is not complete:\n{text}")


RESULTS: dict[str, tuple[type[Result], str]] = {
    "index": (IndexResult, "index"),
    "embeddings": (EmbeddingsResult, "embeddings"),
    "predictions": (PredictionsResult, "photos.csv"),
}
"""Class and file name of each result by the name of its trials."""


class FolderTrials:
    """Trials on results in folders.

    Args:
        model: Folder of a saved model.
        kinds: Kinds of disturbances.
        counts: Counts of the disturbances, which are updated.
    """

    def __init__(self, model: Path, kinds: Sequence[str], counts: Counter[str]) -> None:
        self.kinds = [kind for kind in kinds if kind in (KILL, FULL_DISK, DAMAGE, SECOND_WRITER, READER)]
        self.counts = counts
        self._cpu_seconds: dict[str, float] = {}
        shutil.copytree(model, HOME / "model", ignore=shutil.ignore_patterns("checkpoint-*", "best", "snapshots"))
        pixels = np.random.default_rng(0)
        for name, number in itertools.product(PHOTOS, range(4)):
            folder = HOME / "photos" / name / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.integers(0, 256, (8, 8), dtype="uint8")).save(folder / f"{number}.png")
        self._make_references()

    def _make_references(self) -> None:
        """Write undisturbed results: the embedding of each image, and the results of each command."""

        def embed() -> None:
            index = ImageIndex.build(str(HOME / "model"), HOME / "photos", progress=False)
            torch.save(
                {index.path(row): index.embeddings[row].clone() for row in range(len(index))}, HOME / "embeddings.pt"
            )

        run_alone(embed)
        draw = random.Random(0)
        for kind, path in (("embeddings", "{}"), ("predictions", "{}.csv"), ("index", "index-{}")):
            done: set[State] = set()
            while len(done) < (3 if kind == "index" else 2):
                command = RESULTS[kind][0](HOME / "references" / "x").command((), draw)
                state = command.change(())
                target = str(HOME / "references" / path.format(*state))
                words = [target if word == str(HOME / "references" / "x") else word for word in command.argv]
                if state not in done:
                    before = resource.getrusage(resource.RUSAGE_CHILDREN)
                    run_alone(Command(command.job, words, command.change))
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
                    self._cpu_seconds[kind] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    done.add(state)

    def trial(self, kind: str, seed: int, most: int, draw: random.Random) -> None:
        """Run commands with at most this many disturbances.

        Raises:
            UnexpectedEndError: If a result is not complete, a command crashes, or something is left over.
        """
        folder = HOME / f"trial-{seed}"
        folder.mkdir()
        cls, name = RESULTS[kind]
        linked = cls is not PredictionsResult and draw.random() < 0.25
        if linked:  # outputs on another disk
            (folder / "disk" / name).mkdir(parents=True)
            (folder / name).symlink_to(folder / "disk" / name)
        result = cls(folder / name)
        state: State = ()
        for _ in range(draw.randint(1, most)):
            state = self._disturb(kind, result, state, draw)
        command = result.command(state, draw)
        end(Process(command), command)
        observe(result, {command.change(state)}, [command.line])
        real = folder / "disk" if linked else folder
        left = {path.name for path in real.iterdir()} - {name, "disk"}
        if left or linked != (folder / name).is_symlink() or (linked and len(list(folder.iterdir())) > 2):
            raise UnexpectedEndError(f"left over after {command.line}: {sorted(folder.rglob('*'))}")
        self.counts["run"] += 1
        shutil.rmtree(folder)

    def _disturb(self, kind: str, result: Result, state: State, draw: random.Random) -> State:
        """Run a command with a disturbance, and return the state afterwards."""
        possible = [k for k in self.kinds if state or k not in (DAMAGE, READER)]
        possible = [k for k in possible if k != DAMAGE or result.files()]
        disturbance = draw.choice(possible or [KILL])
        self.counts[disturbance] += 1
        command = result.command(state, draw)
        if disturbance == DAMAGE:
            return self._damage(result, state, command, draw)
        if disturbance in (SECOND_WRITER, READER):
            other = result.command(state, draw) if disturbance == SECOND_WRITER else None
            return self._at_once(result, state, command, other, draw)
        if disturbance == FULL_DISK:
            before = partial(fill_disk, int(10 ** draw.uniform(1.5, 4.5)))
        elif draw.random() < 0.7:
            before = random_signal(result, signal.SIGKILL, draw)
        else:
            before = partial(kill_after, draw.uniform(0.05, 1) * self._cpu_seconds[kind])
        process = Process(command, before)
        process.wait()
        if process.code == CRASHED or (process.code > 0 and disturbance == KILL):
            raise UnexpectedEndError(f"{disturbance}: {command.line}: exit code {process.code}\n{process.printed}")
        allowed = {command.change(state)} | ({state} if process.code else set())
        return observe(result, allowed, [f"{disturbance}: {command.line}"])

    def _damage(self, result: Result, state: State, command: Command, draw: random.Random) -> State:
        path = draw.choice(result.files())
        damage(path, draw)
        reader = Process(partial(run_main, lambda _: report(result)))
        reader.wait()
        if not refused(reader) and (reader.code or reader.printed.split("state ")[-1] != json.dumps(state)):
            raise UnexpectedEndError(f"{path} is damaged: exit code {reader.code}\n{reader.printed}")
        if reader.code and "--add_to" in command.argv:
            writer = Process(command)
            writer.wait()
            if not refused(writer):
                raise UnexpectedEndError(f"{path} is damaged: {command.line}: {writer.code}\n{writer.printed}")
        for file in [result.path] if result.path.is_file() else list(result.path.iterdir()):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        return ()

    def _at_once(
        self, result: Result, state: State, command: Command, other: Command | None, draw: random.Random
    ) -> State:
        """Run a command and another or a reader at the same time; often one is stopped while the other one runs."""
        mains: list[Callable[[], object]] = [command, other or partial(run_main, lambda _: report(result))]
        first, second = draw.sample((0, 1), 2)
        processes: dict[int, Process] = {}
        if draw.random() < 0.3:
            processes = {number: Process(mains[number]) for number in (first, second)}
        else:
            processes[first] = Process(mains[first], random_signal(result, signal.SIGSTOP, draw))
            processes[first].wait(stopped=True)
            processes[second] = Process(mains[second])
            processes[second].wait(4)  # it may wait for the first one
            processes[first].proceed()
        lines = " and ".join(c.line for c in (command, other) if c)
        for number, process in processes.items():
            process.wait()
            if process.code and not ((number == 0 or other) and refused(process)):
                which = "reader" if number and not other else f"command {number + 1}"
                raise UnexpectedEndError(f"at once: {lines}: {which}: {process.code}\n{process.printed}")
        ended = [c for number, c in enumerate((command, other)) if c and not processes[number].code]
        if not ended:
            raise UnexpectedEndError(f"all were refused: {lines}: {[p.printed for p in processes.values()]}")
        allowed = {sequence[-1].change(sequence[0].change(state)) for sequence in itertools.permutations(ended)}
        if other is None:
            seen = tuple(json.loads(processes[1].printed.split("state ")[-1]))
            if seen not in {state, command.change(state)}:
                raise UnexpectedEndError(f"the reader saw {seen} during {command.line}; before: {state}")
        return observe(result, allowed, [f"at once: {lines}"])


def random_signal(result: Result, kind: int, draw: random.Random) -> Callable[[], None]:
    """Return a function that lets a process send itself a signal at a random file event; half of them are renames."""
    if draw.random() < 0.5:
        return partial(signal_at_event, result.path.parent, draw.randint(1, 4), kind, ("os.rename",))
    return partial(signal_at_event, result.path.parent, draw.randint(1, 60), kind)


def refused(process: Process) -> bool:
    """Whether a process ended with one line for the user that is not the text of a system error."""
    errors = [line for line in process.printed.splitlines() if line.startswith("Error: ")]
    return process.code == 1 and len(errors) == 1 and "[Errno" not in errors[0]


def report(result: Result) -> None:
    """Print the state of a result."""
    print("state " + json.dumps(result.read()), end="")


def run_alone(main: Callable[[], object]) -> None:
    """Run a function in a process, which must succeed."""
    process = Process(main)
    process.wait()
    if process.code:
        raise UnexpectedEndError(f"exit code {process.code}\n{process.printed}")


def end(process: Process, command: Command) -> None:
    """Wait for a process, which must succeed."""
    process.wait()
    if process.code:
        raise UnexpectedEndError(f"{command.line}: exit code {process.code}\n{process.printed}")


def observe(result: Result, allowed: set[State], lines: list[str]) -> State:
    """Read a result in another process, and return its state, which must be one of those allowed."""
    reader = Process(partial(report, result))
    reader.wait()
    found = reader.printed.split("state ")[-1]
    state = tuple(json.loads(found)) if not reader.code else None
    if state not in allowed:
        what = f"{state} instead of {sorted(allowed)}" if state is not None else reader.printed
        there = ", ".join(sorted(path.name for path in result.path.parent.iterdir()))
        raise UnexpectedEndError(f"after {'; '.join(lines)}: {what}\nThere are: {there}")
    return state
