"""Muon with steps of fixed relative size on weights that keep their norm."""

from hf_sphere.optim.optimizers.adamw_hyperball import Hyperball
from hf_sphere.optim.optimizers.muon import Muon


class MuonHyperball(Hyperball, Muon):
    """Muon whose scale-invariant matrices keep their norm, with steps that are a fixed fraction of it.

    Other hidden matrices take Muon, and all other parameters AdamW. For the matrices that keep their norm, `lr` is the
    length of a step relative to the norm; see `Hyperball`. For arguments and errors, see `Muon`.

    Reference:
        Wen, Dang, Lyu, Ma and Liang, "Fantastic pretraining optimizers and where to find them 2.1: hyperball
        optimization", 2025.

    Example:
        >>> optimizer = build_optimizer(network, "muon_hyperball", images, lr=1e-2, adamw_lr_scale=0.1)
    """

    rules_of = {"muon_hyperball": {"muon": True, "hyperball": True}, "muon": {"muon": True}}
