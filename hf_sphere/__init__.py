"""Learning on the hypersphere in the Hugging Face ecosystem.

Importing this package registers its models with `AutoModel*`, its backbones with timm, and its optimizers with both
libraries. No heavy imports are needed: each registration runs when the respective library is imported.
"""

from hf_sphere import registration
from hf_sphere.models.sphere_text.encoders import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)

registration.register()
