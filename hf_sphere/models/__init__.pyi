from .sphere_encoder.bert import (
    SphereBertConfig as SphereBertConfig,
    SphereBertForMaskedLM as SphereBertForMaskedLM,
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
    SphereBertForTokenClassification as SphereBertForTokenClassification,
    SphereBertModel as SphereBertModel,
)
from .sphere_encoder.distilbert import (
    SphereDistilBertConfig as SphereDistilBertConfig,
    SphereDistilBertForMaskedLM as SphereDistilBertForMaskedLM,
    SphereDistilBertForSequenceClassification as SphereDistilBertForSequenceClassification,
    SphereDistilBertForTokenClassification as SphereDistilBertForTokenClassification,
    SphereDistilBertModel as SphereDistilBertModel,
)
from .sphere_encoder.electra import (
    SphereElectraConfig as SphereElectraConfig,
    SphereElectraForMaskedLM as SphereElectraForMaskedLM,
    SphereElectraForSequenceClassification as SphereElectraForSequenceClassification,
    SphereElectraForTokenClassification as SphereElectraForTokenClassification,
    SphereElectraModel as SphereElectraModel,
)
from .sphere_encoder.fitting import (
    SpherizationFit as SpherizationFit,
    fit_spherization as fit_spherization,
)
from .sphere_encoder.modernbert import (
    SphereModernBertConfig as SphereModernBertConfig,
    SphereModernBertForMaskedLM as SphereModernBertForMaskedLM,
    SphereModernBertForSequenceClassification as SphereModernBertForSequenceClassification,
    SphereModernBertForTokenClassification as SphereModernBertForTokenClassification,
    SphereModernBertModel as SphereModernBertModel,
)
from .sphere_encoder.roberta import (
    SphereRobertaConfig as SphereRobertaConfig,
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
    SphereRobertaForTokenClassification as SphereRobertaForTokenClassification,
    SphereRobertaModel as SphereRobertaModel,
)
from .sphere_encoder.vit import (
    SphereViTConfig as SphereViTConfig,
    SphereViTForImageClassification as SphereViTForImageClassification,
    SphereViTModel as SphereViTModel,
)
from .sphere_vision.configuration_sphere_vision import SphereVisionConfig as SphereVisionConfig
from .sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor as SphereVisionImageProcessor
from .sphere_vision.modeling_sphere_vision import SphereVisionModel as SphereVisionModel
from .sphere_vision.modeling_sphere_vision_tasks import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
    SphereVisionForImageClassification as SphereVisionForImageClassification,
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
    SphereVisionForRegression as SphereVisionForRegression,
)

REQUIRES: str
