from .sphere_text.fit_spherization import (
    SpherizationFit as SpherizationFit,
    calibrate_spherization as calibrate_spherization,
)
from .sphere_vision.configuration_sphere_vision import SphereVisionConfig as SphereVisionConfig
from .sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor as SphereVisionImageProcessor
from .sphere_vision.modeling_sphere_vision import (
    SphereVisionForImageClassification as SphereVisionForImageClassification,
    SphereVisionModel as SphereVisionModel,
)
from .sphere_vision.modeling_sphere_vision_tasks import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
    SphereVisionForRegression as SphereVisionForRegression,
)

# The classes of the encoders, which follow from the table in sphere_text/encoders.py, are not listed.
def __getattr__(name): ...
