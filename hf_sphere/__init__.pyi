from .models import *  # noqa: F403
from .training import SphereTrainer as SphereTrainer

__version__: str
