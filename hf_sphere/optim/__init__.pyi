from .adam import AdamG as AdamG
from .adam import AdamS as AdamS
from .adam import AdamSRT as AdamSRT
from .diagnostics import (
    EffectiveStep as EffectiveStep,
)
from .diagnostics import (
    RadialDiagnosticsCallback as RadialDiagnosticsCallback,
)
from .diagnostics import (
    as_metrics as as_metrics,
)
from .diagnostics import (
    effective_step as effective_step,
)
from .diagnostics import (
    radial_diagnostics as radial_diagnostics,
)
from .groups import parameter_groups as parameter_groups
from .groups import radial_parameter_groups as radial_parameter_groups
from .invariance import RadialWeights as RadialWeights
from .invariance import find_radial_weights as find_radial_weights
from .sgd import SGDMRT as SGDMRT
