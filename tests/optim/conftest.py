"""Fixtures: every optimizer class, and one thread."""

from collections.abc import Iterator

import pytest
import torch
from torch.optim import Optimizer

from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.optim.sphere_optimizer import SphereOptimizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Multithreading slows down operations on small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ON_THE_SPHERE = [name for name in optimizer_names() if issubclass(optimizer_class(name), SphereOptimizer)]


@pytest.fixture(params=ON_THE_SPHERE)
def kind(request: pytest.FixtureRequest) -> type[Optimizer]:
    """Each optimizer class that steps on the sphere."""
    return optimizer_class(request.param)
