"""Shared fixtures: no network, golden values, and external data if available.

Torch is imported by those that use it, and not by the process that only starts the workers.
"""

import gc
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face library is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is: more threads are slower on such small tensors

import case_selection
import hypothesis
import pytest
from filelock import FileLock
from fresh_python import run_fresh
from safetensors import safe_open

import hf_sphere  # noqa: F401  (registers the models)

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of each function, not only a few")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("all cases", deadline=None, database=None, max_examples=100)
    hypothesis.settings.register_profile("a few cases", hypothesis.settings.get_profile("all cases"), max_examples=15)
    hypothesis.settings.load_profile("all cases" if config.option.all_cases else "a few cases")
    config.addinivalue_line("markers", "settings(**functions): which settings the values of a parameter stand for")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that do not run by default, see `case_selection`, unless a case is named."""
    if not config.option.all_cases and not any("[" in argument for argument in config.args):
        items[:], left_out = case_selection.choose(items)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Leave what is imported out of the searches for garbage, each of which would take a quarter of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _keep_denormals() -> Iterator[None]:
    """Undo the flushing of denormal numbers, which a training run turns on in its process."""
    yield
    import torch

    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _keep_bars() -> Iterator[None]:
    """Undo the switches that a command sets in its process if stderr is no terminal."""
    names = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Folder of a real dataset; the test is skipped if it is not available."""

    def find(name: str) -> Path:
        folder = ROOT.parent / "shared" / "data" / name
        if not folder.is_dir():
            pytest.skip(f"needs the dataset {name} in {folder}")
        return folder

    return find


@pytest.fixture(scope="module")
def free_port() -> int:
    """A free port for process groups, one at a time."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def load_file() -> Callable[[str], ModuleType]:
    """Import a Python file of the repository that is in no package, by its path."""

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built documentation, which is built once for all processes of the tests; read only."""
    pytest.importorskip("material")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
            command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
            run_fresh(command, env=environment, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped if there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs Chromium or Chrome")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(chromium: Any) -> Callable[..., Any]:
    """Open an address in a page without network: `page.wrong` has browser errors, and requests for other addresses."""

    def opened(address: str, **options: Any) -> Any:
        page, own = chromium.new_page(**options), (address, "data:", "blob:")
        page.set_default_timeout(60_000)
        page.wrong = []
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.wrong.append(message.text))
        page.on("request", lambda asked: asked.url.startswith(own) or page.wrong.append(asked.url))
        page.route(lambda url: not url.startswith(own), lambda route: route.abort())
        page.goto(address)
        return page

    return opened


@pytest.fixture(params=[1280, 390])
def page(request: pytest.FixtureRequest, address: str, open_page: Callable[..., Any]) -> Iterator[Any]:
    """The page at the `address` of a module in a desktop and a phone browser; no test may leave errors."""
    page = open_page(address, viewport={"width": request.param, "height": 900})
    yield page
    assert page.wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= request.param
    page.close()


class Golden(dict[str, "torch.Tensor"]):
    """Tensors and described cases of a golden file."""

    def __init__(self, name: str) -> None:
        with safe_open(ROOT / "tests" / "golden" / f"{name}.safetensors", "pt") as file:
            super().__init__({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
            self.cases = {case["case"]: case for case in json.loads(file.metadata()["cases"])}


@pytest.fixture
def refused_renames(monkeypatch) -> list[Path]:
    """Refuse, as Windows does, to rename and replace mapped files and folders with some; the list of what was tried."""
    maps, tried = Path("/proc/self/maps"), list[Path]()
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")

    def refusing(original: Callable[..., Any], changed: int) -> Callable[..., Any]:
        def change(self: Path, target: Any) -> Any:
            path = os.path.realpath((self, target)[changed])
            if any(line.endswith(f" {path}") or f" {path}/" in line for line in maps.read_text().splitlines()):
                tried.append(Path(path))
                raise PermissionError(13, "Access is denied", path)
            return original(self, target)

        return change

    monkeypatch.setattr(Path, "rename", refusing(Path.rename, 0))
    monkeypatch.setattr(Path, "replace", refusing(Path.replace, 1))
    return tried


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Reader of the files in tests/golden."""
    return Golden
