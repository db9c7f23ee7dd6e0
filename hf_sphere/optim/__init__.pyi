from .diagnostics import (
    EffectiveStep as EffectiveStep,
    StepDiagnosticsCallback as StepDiagnosticsCallback,
    as_metrics as as_metrics,
    effective_step as effective_step,
    find_channel_dims as find_channel_dims,
    step_diagnostics as step_diagnostics,
)
from .groups import (
    build_optimizer as build_optimizer,
    parameter_groups as parameter_groups,
    scale_invariant_groups as scale_invariant_groups,
)
from .invariance import (
    ScaleInvariantWeights as ScaleInvariantWeights,
    find_scale_invariant_weights as find_scale_invariant_weights,
)
from .optimizers.adam_g import AdamG as AdamG
from .optimizers.adam_s import AdamS as AdamS
from .optimizers.adam_srt import AdamSRT as AdamSRT
from .optimizers.adamw_hyperball import AdamWHyperball as AdamWHyperball
from .optimizers.muon import Muon as Muon
from .optimizers.muon_hyperball import MuonHyperball as MuonHyperball
from .optimizers.sgd_mrt import SGDMRT as SGDMRT
from .sphere_optimizer import SphereOptimizer as SphereOptimizer
from .unit_norm import RenormalizeCallback as RenormalizeCallback, renormalize as renormalize
