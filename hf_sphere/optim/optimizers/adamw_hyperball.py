"""AdamW with steps of fixed relative size on weights that keep their norm."""

import torch

from hf_sphere.optim.hyperball import Hyperball


class AdamWHyperball(Hyperball, torch.optim.AdamW):
    """AdamW whose scale-invariant weights keep their norm, with steps that are a fixed fraction of it.

    For these weights, `lr` is the length of a step relative to the norm; see `Hyperball`. For arguments, see
    `torch.optim.AdamW`.

    Reference:
        Wen, Dang, Lyu, Ma and Liang, "Fantastic pretraining optimizers and where to find them 2.1: hyperball
        optimization", 2025.

    Example:
        >>> optimizer = build_optimizer(network, "adamw_hyperball", images, lr=1e-2, adamw_lr_scale=0.1)
    """

    rules_of = {"adamw_hyperball": {"hyperball": True}}
