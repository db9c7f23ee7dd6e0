"""An accelerator for the tests in this folder: a CUDA device if there is one, else `pretend`.

To register `pretend` changes torch for the whole process, so that these tests are collected only if no others are:
`make test-devices` runs them. `CUDA_VISIBLE_DEVICES= make test-devices` uses `pretend` besides a CUDA device.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_sphere.utils.modules import has_float64

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    paths = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return None if all(path.is_relative_to(HERE) for path in paths) else True


@pytest.fixture(scope="session")
def device() -> str:
    """Type of the accelerator."""
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False  # convolutions with the digits of the CPU
        return "cuda"
    import pretend

    return pretend.NAME


@pytest.fixture
def cuda(device: str) -> None:
    """Skip the test without a CUDA device."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")


@pytest.fixture
def pretend(device: str) -> Iterator[object]:
    """The module of the device `pretend`, with its counters at zero."""
    if device == "cuda":
        pytest.skip("needs the device pretend, without a CUDA device: CUDA_VISIBLE_DEVICES=")
    import pretend

    pretend.reset()
    return pretend


@pytest.fixture
def narrow(pretend: Any) -> Iterator[str]:
    """The device without float64."""
    has_float64.cache_clear()
    with pretend.without_float64():
        yield pretend.NAME
    has_float64.cache_clear()


@pytest.fixture
def no_synchronization(device: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Context in which an operation for which the host waits raises an error."""
    if device != "cuda":
        import pretend

        return pretend.capturable

    @contextlib.contextmanager
    def strict() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict
