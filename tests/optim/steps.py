"""Optimizers, small models and weights with gradients determined by a seed."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def make_optimizer(kind: type[Optimizer], params: Any, **options: Any) -> Optimizer:
    """Build an optimizer with a suitable learning rate."""
    return kind(params, **{"lr": 0.1 if issubclass(kind, torch.optim.SGD) else 0.01} | options)


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Build conv-BN-conv-BN-linear for images (B, 1, 8, 8); a seed determines its weights."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()]
    layers += [nn.Conv2d(5, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(*layers).to(dtype)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters of a model into filters before BatchNorm and all others."""
    invariant = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    ordinary = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in invariant)]
    return [{"params": invariant, "channel_dims": [0]}, {"params": ordinary}]


def give_gradients(parameters: Iterable[Tensor], seed: int) -> None:
    """Fill `.grad` with numbers determined by a seed, in the dtype and memory format of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.empty_like(parameter)
        parameter.grad = gradient.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def take_steps(optimizer: Optimizer, count: int, start: int = 0) -> None:
    """Take steps with gradients determined by the step number."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(start, start + count):
        give_gradients(parameters, step)
        optimizer.step()


def make_weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Create weights of three shapes, determined by a seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 3, 3, 3), (4, 6, 2, 2), (5, 7)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
