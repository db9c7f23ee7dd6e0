from .sphere_bert.configuration_sphere_bert import SphereBertConfig as SphereBertConfig
from .sphere_bert.modeling_sphere_bert import (
    SphereBertForMaskedLM as SphereBertForMaskedLM,
)
from .sphere_bert.modeling_sphere_bert import (
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
)
from .sphere_bert.modeling_sphere_bert import (
    SphereBertModel as SphereBertModel,
)
from .sphere_roberta.configuration_sphere_roberta import SphereRobertaConfig as SphereRobertaConfig
from .sphere_roberta.modeling_sphere_roberta import (
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
)
from .sphere_roberta.modeling_sphere_roberta import (
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
)
from .sphere_roberta.modeling_sphere_roberta import (
    SphereRobertaModel as SphereRobertaModel,
)
from .sphere_vision.configuration_sphere_vision import SphereVisionConfig as SphereVisionConfig
from .sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor as SphereVisionImageProcessor
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForImageClassification as SphereVisionForImageClassification,
)
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
)
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForRegression as SphereVisionForRegression,
)
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionModel as SphereVisionModel,
)
from .sphere_vision.modeling_sphere_vision_few_shot import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
)
from .spherized_encoder.calibration import (
    SpherizationFit as SpherizationFit,
)
from .spherized_encoder.calibration import (
    calibrate_spherization as calibrate_spherization,
)
