"""Models of the transformers kind, one folder a family. Each family is imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
    from hf_sphere.models.sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor
    from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
        SphereVisionForImageClassification,
        SphereVisionForJointPrediction,
        SphereVisionForRegression,
        SphereVisionModel,
    )

_PLACES = {
    "SphereVisionConfig": "sphere_vision.configuration_sphere_vision",
    "SphereVisionForImageClassification": "sphere_vision.modeling_sphere_vision",
    "SphereVisionForJointPrediction": "sphere_vision.modeling_sphere_vision",
    "SphereVisionForRegression": "sphere_vision.modeling_sphere_vision",
    "SphereVisionImageProcessor": "sphere_vision.image_processing_sphere_vision",
    "SphereVisionModel": "sphere_vision.modeling_sphere_vision",
}

__all__ = [
    "SphereVisionConfig",
    "SphereVisionForImageClassification",
    "SphereVisionForJointPrediction",
    "SphereVisionForRegression",
    "SphereVisionImageProcessor",
    "SphereVisionModel",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
