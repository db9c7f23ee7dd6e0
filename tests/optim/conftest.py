"""Fixtures: every optimizer class, a small model with its groups, gradients determined by a seed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


def _make_optimizer(kind: type[Optimizer], params: Any, **options: Any) -> Optimizer:
    return kind(params, **{"lr": 0.1 if issubclass(kind, torch.optim.SGD) else 0.01} | options)


@pytest.fixture(scope="session")
def make_optimizer() -> Callable[..., Optimizer]:
    """Build an optimizer with a suitable learning rate."""
    return _make_optimizer


def _make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()]
    layers += [nn.Conv2d(5, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(*layers).to(dtype)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., nn.Sequential]:
    """Build conv-BN-conv-BN-linear for images (B, 1, 8, 8); a seed determines its weights."""
    return _make_model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    invariant = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    ordinary = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in invariant)]
    return [{"params": invariant, "channel_dims": [0]}, {"params": ordinary}]


@pytest.fixture(scope="session")
def groups() -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Split the parameters of a model into filters before BatchNorm and all others."""
    return _groups


def _give_gradients(parameters: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.empty_like(parameter)
        parameter.grad = gradient.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


@pytest.fixture(scope="session")
def give_gradients() -> Callable[[Iterable[Tensor], int], None]:
    """Fill `.grad` with numbers determined by a seed, in the dtype and memory format of the parameters."""
    return _give_gradients


def _take_steps(optimizer: Optimizer, count: int, start: int = 0) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(start, start + count):
        _give_gradients(parameters, step)
        optimizer.step()


@pytest.fixture(scope="session")
def take_steps() -> Callable[..., None]:
    """Take steps with gradients determined by the step number."""
    return _take_steps


def _make_weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 3, 3, 3), (4, 6, 2, 2), (5, 7)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.fixture(scope="session")
def make_weights() -> Callable[..., list[Tensor]]:
    """Create weights of three shapes, determined by a seed."""
    return _make_weights
