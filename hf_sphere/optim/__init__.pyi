from .base import SphereOptimizer as SphereOptimizer
from .build import build_optimizer as build_optimizer
from .diagnostics import (
    EffectiveStep as EffectiveStep,
    RadialDiagnosticsCallback as RadialDiagnosticsCallback,
    as_metrics as as_metrics,
    effective_step as effective_step,
    radial_channel_dims as radial_channel_dims,
    radial_diagnostics as radial_diagnostics,
)
from .groups import parameter_groups as parameter_groups, radial_parameter_groups as radial_parameter_groups
from .invariance import RadialWeights as RadialWeights, find_radial_weights as find_radial_weights
from .optimizers.adam_g import AdamG as AdamG
from .optimizers.adam_s import AdamS as AdamS
from .optimizers.adam_srt import AdamSRT as AdamSRT
from .optimizers.adamw_hyperball import AdamWHyperball as AdamWHyperball
from .optimizers.muon import Muon as Muon
from .optimizers.muon_hyperball import MuonHyperball as MuonHyperball
from .optimizers.sgd_mrt import SGDMRT as SGDMRT
from .unit_norm import RenormalizeCallback as RenormalizeCallback, renormalize as renormalize
