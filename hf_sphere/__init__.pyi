from .models import (
    SphereBertConfig as SphereBertConfig,
)
from .models import (
    SphereBertForMaskedLM as SphereBertForMaskedLM,
)
from .models import (
    SphereBertForSequenceClassification as SphereBertForSequenceClassification,
)
from .models import (
    SphereBertModel as SphereBertModel,
)
from .models import (
    SphereRobertaConfig as SphereRobertaConfig,
)
from .models import (
    SphereRobertaForMaskedLM as SphereRobertaForMaskedLM,
)
from .models import (
    SphereRobertaForSequenceClassification as SphereRobertaForSequenceClassification,
)
from .models import (
    SphereRobertaModel as SphereRobertaModel,
)
from .models import (
    SphereVisionConfig as SphereVisionConfig,
)
from .models import (
    SphereVisionForFewShotClassification as SphereVisionForFewShotClassification,
)
from .models import (
    SphereVisionForImageClassification as SphereVisionForImageClassification,
)
from .models import (
    SphereVisionForJointPrediction as SphereVisionForJointPrediction,
)
from .models import (
    SphereVisionForRegression as SphereVisionForRegression,
)
from .models import (
    SphereVisionImageProcessor as SphereVisionImageProcessor,
)
from .models import (
    SphereVisionModel as SphereVisionModel,
)
from .models import (
    calibrate_spherization as calibrate_spherization,
)

__version__: str
