"""Base class of the optimizers that the Trainer, timm and the recipes know by name."""

import inspect
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hf_sphere.optim.groups import ParameterGroups


class NamedOptimizer(Optimizer):
    """An optimizer that forms its parameter groups itself; its name is that of its file in `optimizers/`.

    A subclass inherits from this class and from the optimizer of torch or timm that it extends.
    """

    own_defaults: ClassVar[dict[str, Any]] = {}
    """Options that the optimizer of torch or timm lacks, with their defaults."""
    group_options: ClassVar[dict[str, Any]] = {}
    """Options of `form_groups` that `optim_args` of the Trainer can set, with their defaults."""
    unsupported: ClassVar[tuple[str, ...]] = ()
    """Options of the optimizer of torch or timm that this one does not have."""

    @classmethod
    def option_defaults(cls) -> dict[str, Any]:
        """Return the options of the constructor with their defaults, including those of torch's optimizer."""
        found: dict[str, Any] = dict(cls.own_defaults)
        for parent in reversed(cls.__mro__):
            options = inspect.signature(parent).parameters.values() if issubclass(parent, Optimizer) else ()
            found |= {option.name: option.default for option in options if option.default is not option.empty}
        return {name: default for name, default in found.items() if name not in cls.unsupported}

    @classmethod
    def form_groups(cls, model: nn.Module, batch: Any = None, **options: Any) -> ParameterGroups:
        """Split the trainable parameters of a model into groups, each with the rule that suits it.

        Args:
            model: The model, before it is sharded.
            batch: Input of the model; generated if None. See `find_radial_weights`.
            **options: Options of the optimizer's groups; see `build_optimizer`.
        """
        raise NotImplementedError(f"{cls.__name__} must define `form_groups`.")
