"""The optimisers by name, without importing torch."""

import importlib
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """An optimiser.

    Attributes:
        class_name: Of the class in `hf_sphere.optim`.
        is_adam: Whether it takes betas and eps, as Adam does, or momentum, as SGD does.
        description: In a few words.
    """

    class_name: str
    is_adam: bool
    description: str


OPTIMIZERS = {
    "adam_s": Kind("AdamS", True, "Adam with one second moment a group of scale-invariant weights"),
    "adam_srt": Kind("AdamSRT", True, "Adam-S with rescaled and transported moments"),
    "adam_g": Kind("AdamG", True, "Adam on unit-norm groups of scale-invariant weights"),
    "sgd_mrt": Kind("SGDMRT", False, "SGD with momentum transported along the sphere"),
}


def optimizer_class(name: str) -> Any:
    """Class of an optimiser.

    Args:
        name: A key of `OPTIMIZERS`.
    """
    return getattr(importlib.import_module("hf_sphere.optim"), OPTIMIZERS[name].class_name)
