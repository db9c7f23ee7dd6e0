"""Learning on the hypersphere, inside the Hugging Face ecosystem.

Importing this package makes its models known to `AutoModel*` and its backbones to timm. Nothing heavy is imported for
that: each registration runs when the library concerned is itself imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_sphere import registration

if TYPE_CHECKING:
    from hf_sphere.models import (
        SphereBertConfig,
        SphereBertForMaskedLM,
        SphereBertForSequenceClassification,
        SphereBertModel,
        SphereRobertaConfig,
        SphereRobertaForMaskedLM,
        SphereRobertaForSequenceClassification,
        SphereRobertaModel,
        SphereVisionConfig,
        SphereVisionForFewShotClassification,
        SphereVisionForImageClassification,
        SphereVisionForJointPrediction,
        SphereVisionForRegression,
        SphereVisionImageProcessor,
        SphereVisionModel,
        calibrate_spherization,
    )

__version__ = "0.1.0"

__all__ = [
    "SphereBertConfig",
    "SphereBertForMaskedLM",
    "SphereBertForSequenceClassification",
    "SphereBertModel",
    "SphereRobertaConfig",
    "SphereRobertaForMaskedLM",
    "SphereRobertaForSequenceClassification",
    "SphereRobertaModel",
    "SphereVisionConfig",
    "SphereVisionForFewShotClassification",
    "SphereVisionForImageClassification",
    "SphereVisionForJointPrediction",
    "SphereVisionForRegression",
    "SphereVisionImageProcessor",
    "SphereVisionModel",
    "calibrate_spherization",
]

registration.register()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hf_sphere.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
