from .adam import AdamG as AdamG, AdamS as AdamS, AdamSRT as AdamSRT
from .diagnostics import (
    EffectiveStep as EffectiveStep,
    RadialDiagnosticsCallback as RadialDiagnosticsCallback,
    as_metrics as as_metrics,
    effective_step as effective_step,
    radial_diagnostics as radial_diagnostics,
)
from .groups import parameter_groups as parameter_groups, radial_parameter_groups as radial_parameter_groups
from .invariance import RadialWeights as RadialWeights, find_radial_weights as find_radial_weights
from .sgd import SGDMRT as SGDMRT
