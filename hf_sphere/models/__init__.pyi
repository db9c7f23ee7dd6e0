from .sphere_bert.configuration_sphere_bert import SphereBertConfig as SphereBertConfig
from .sphere_bert.modeling_sphere_bert import (
    SphereBertForMaskedLM as SphereBertForMaskedLM,
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
    SphereBertModel as SphereBertModel,
)
from .sphere_roberta.configuration_sphere_roberta import SphereRobertaConfig as SphereRobertaConfig
from .sphere_roberta.modeling_sphere_roberta import (
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
    SphereRobertaModel as SphereRobertaModel,
)
from .sphere_vision.configuration_sphere_vision import SphereVisionConfig as SphereVisionConfig
from .sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor as SphereVisionImageProcessor
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForImageClassification as SphereVisionForImageClassification,
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
    SphereVisionForRegression as SphereVisionForRegression,
    SphereVisionModel as SphereVisionModel,
)
from .sphere_vision.modeling_sphere_vision_few_shot import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
)
from .spherized_encoder.calibration import (
    SpherizationFit as SpherizationFit,
    calibrate_spherization as calibrate_spherization,
)
