"""Run recipes on the CPU in the test process, as if in a separate process."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import training_runs
from fresh_python import FreshPython
from training_runs import forget, write_texts


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def load_recipe() -> Callable[[str], ModuleType]:
    """Import the module of a job, or the script of a training."""
    return training_runs.load_recipe


@pytest.fixture(scope="session", autouse=True)
def _home_stays_clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_datasets"))
        yield


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., None]:
    """Call a function that starts a run, and restore the state of the process afterwards."""

    def run(function: Callable[..., None], *args: Any, **options: Any) -> None:
        level = logging.getLogger("hf_sphere").level
        forget()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_USE_CPU", "true")
                function(*args, **options)
        finally:
            forget()
            logging.getLogger("hf_sphere").setLevel(level)

    return run


@pytest.fixture(scope="session")
def run_main(run_alone) -> Callable[[ModuleType, list[str]], None]:
    """Call the `main` of a recipe with a command line and restore the state of the process afterwards."""
    return lambda recipe, words: run_alone(recipe.main, words)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line option that caches decoded images in a temporary folder."""
    return ["--cache_dir", str(tmp_path_factory.mktemp("decoded"))]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files with three splits."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, train=300, validation=80, test=80)
    return folder


@pytest.fixture(scope="session")
def run_quickly(run_main, cache: list[str], texts: Path) -> Callable[[ModuleType, list[str]], Callable[..., Path]]:
    """Return a factory of functions that run a training recipe with quick and extra arguments into a folder."""

    def make(recipe: ModuleType, quick: list[str]) -> Callable[..., Path]:
        def run(folder: Path, *words: str) -> Path:
            argv = [str(texts) if word == "TEXTS" else word for word in quick]
            cached = cache if "--dataset_name" in argv else []
            run_main(recipe, [*argv, *cached, "--output_dir", str(folder), *words])
            return folder

        return run

    return make


@pytest.fixture(scope="module")
def recipe(request, load_recipe) -> ModuleType:
    """The job that `RECIPE` of the test module names."""
    return load_recipe(request.module.RECIPE)


@pytest.fixture(scope="module")
def run_in(request, recipe: ModuleType, run_quickly) -> Callable[..., Path]:
    """Run the recipe of the test module with its words `QUICK`, and others, into a folder."""
    return run_quickly(recipe, request.module.QUICK)


@pytest.fixture(scope="module")
def finished(request, run_in: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with the words `FINISHED` of the test module; read only."""
    return run_in(tmp_path_factory.mktemp("finished") / "run", *getattr(request.module, "FINISHED", []))


@pytest.fixture
def train(run_in: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Run the recipe of the test module into a folder below `tmp_path`."""
    return lambda *words, name="run": run_in(tmp_path / name, *words)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a recipe process: no network, one thread, the CPU, and a temporary home."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return os.environ | own | {"HF_HOME": str(tmp_path_factory.mktemp("hf_home"))}


@pytest.fixture(scope="session")
def start(root: Path, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start Python with a command line in a separate process, which is killed after the tests."""
    started = []

    def start_python(*words: object) -> subprocess.Popen:
        process = FreshPython(
            [sys.executable, *map(str, words)],
            cwd=root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_python
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # including its child processes
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def results_of() -> Callable[[Path], dict]:
    """Read the results of a run."""
    return lambda folder: json.loads((folder / "all_results.json").read_text())
