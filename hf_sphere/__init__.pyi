from .models import (
    SphereBertConfig as SphereBertConfig,
    SphereBertForMaskedLM as SphereBertForMaskedLM,
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
    SphereBertModel as SphereBertModel,
    SphereRobertaConfig as SphereRobertaConfig,
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
    SphereRobertaModel as SphereRobertaModel,
    SphereVisionConfig as SphereVisionConfig,
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
    SphereVisionForImageClassification as SphereVisionForImageClassification,
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
    SphereVisionForRegression as SphereVisionForRegression,
    SphereVisionImageProcessor as SphereVisionImageProcessor,
    SphereVisionModel as SphereVisionModel,
    calibrate_spherization as calibrate_spherization,
)
from .training import SphereTrainer as SphereTrainer

__version__: str
