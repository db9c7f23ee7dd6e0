"""Every optimizer class."""

import pytest
from torch.optim import Optimizer

from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.optim.sphere_optimizer import SphereOptimizer

ON_THE_SPHERE = [name for name in optimizer_names() if issubclass(optimizer_class(name), SphereOptimizer)]


@pytest.fixture(params=ON_THE_SPHERE)
def kind(request: pytest.FixtureRequest) -> type[Optimizer]:
    """Each optimizer class that steps on the sphere."""
    return optimizer_class(request.param)
