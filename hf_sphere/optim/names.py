"""The optimisers by name, without importing torch."""

import importlib

OPTIMIZERS = {"adam_s": "AdamS", "adam_srt": "AdamSRT", "adam_g": "AdamG", "sgd_mrt": "SGDMRT"}


def optimizer_class(name: str) -> type:
    """Class of an optimiser.

    Args:
        name: A key of `OPTIMIZERS`.
    """
    return getattr(importlib.import_module("hf_sphere.optim"), OPTIMIZERS[name])
