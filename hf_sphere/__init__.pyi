from .models import (
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

# The classes of the encoders, which follow from the table in sphere_text/encoders.py, are not listed.
def __getattr__(name): ...
