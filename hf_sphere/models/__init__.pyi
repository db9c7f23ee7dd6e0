from .sphere_text.configuration_sphere_text import (
    SphereBertConfig as SphereBertConfig,
    SphereRobertaConfig as SphereRobertaConfig,
)
from .sphere_text.fit_spherization import (
    SpherizationFit as SpherizationFit,
    calibrate_spherization as calibrate_spherization,
)
from .sphere_text.modeling_sphere_text import (
    SphereBertForMaskedLM as SphereBertForMaskedLM,
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
    SphereBertModel as SphereBertModel,
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
    SphereRobertaModel as SphereRobertaModel,
)
from .sphere_vision.configuration_sphere_vision import SphereVisionConfig as SphereVisionConfig
from .sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor as SphereVisionImageProcessor
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForImageClassification as SphereVisionForImageClassification,
    SphereVisionModel as SphereVisionModel,
)
from .sphere_vision.modeling_sphere_vision_few_shot import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
)
from .sphere_vision.modeling_sphere_vision_regression import (
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
    SphereVisionForRegression as SphereVisionForRegression,
)
