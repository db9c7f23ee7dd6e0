"""Models of the transformers kind, one folder a family. Each family is imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.models.sphere_bert.configuration_sphere_bert import SphereBertConfig
    from hf_sphere.models.sphere_bert.modeling_sphere_bert import (
        SphereBertForMaskedLM,
        SphereBertForSequenceClassification,
        SphereBertModel,
    )
    from hf_sphere.models.sphere_roberta.configuration_sphere_roberta import SphereRobertaConfig
    from hf_sphere.models.sphere_roberta.modeling_sphere_roberta import (
        SphereRobertaForMaskedLM,
        SphereRobertaForSequenceClassification,
        SphereRobertaModel,
    )
    from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
    from hf_sphere.models.sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor
    from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
        SphereVisionForImageClassification,
        SphereVisionForJointPrediction,
        SphereVisionForRegression,
        SphereVisionModel,
    )
    from hf_sphere.models.sphere_vision.modeling_sphere_vision_few_shot import SphereVisionForFewShotClassification
    from hf_sphere.models.spherized_encoder.calibration import SpherizationFit, calibrate_spherization

_PLACES = {
    "SphereBertConfig": "sphere_bert.configuration_sphere_bert",
    "SphereBertForMaskedLM": "sphere_bert.modeling_sphere_bert",
    "SphereBertForSequenceClassification": "sphere_bert.modeling_sphere_bert",
    "SphereBertModel": "sphere_bert.modeling_sphere_bert",
    "SphereRobertaConfig": "sphere_roberta.configuration_sphere_roberta",
    "SphereRobertaForMaskedLM": "sphere_roberta.modeling_sphere_roberta",
    "SphereRobertaForSequenceClassification": "sphere_roberta.modeling_sphere_roberta",
    "SphereRobertaModel": "sphere_roberta.modeling_sphere_roberta",
    "SphereVisionConfig": "sphere_vision.configuration_sphere_vision",
    "SphereVisionForFewShotClassification": "sphere_vision.modeling_sphere_vision_few_shot",
    "SphereVisionForImageClassification": "sphere_vision.modeling_sphere_vision",
    "SphereVisionForJointPrediction": "sphere_vision.modeling_sphere_vision",
    "SphereVisionForRegression": "sphere_vision.modeling_sphere_vision",
    "SphereVisionImageProcessor": "sphere_vision.image_processing_sphere_vision",
    "SphereVisionModel": "sphere_vision.modeling_sphere_vision",
    "SpherizationFit": "spherized_encoder.calibration",
    "calibrate_spherization": "spherized_encoder.calibration",
}

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
    "SpherizationFit",
    "calibrate_spherization",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
