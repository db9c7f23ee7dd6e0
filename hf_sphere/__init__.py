"""Learning on the hypersphere in the Hugging Face ecosystem.

Importing this package registers its models with `AutoModel*`, its backbones with timm, and its optimizers with both
libraries. No heavy imports are needed: each registration runs when the respective library is imported.
"""

import lazy_loader

from hf_sphere import models, registration
from hf_sphere.models.sphere_encoder import ENCODERS

__version__ = "0.1.0"

__getattr__, _, _names = lazy_loader.attach(
    __name__, submod_attrs={"models": models.__all__, "training": ["SphereTrainer"]}
)
# The classes of the encoders can be imported from here too, but are listed in `hf_sphere.models`.
__all__ = [name for name in _names if not name.startswith(tuple(f"Sphere{prefix}" for prefix in ENCODERS.values()))]


def __dir__() -> list[str]:
    return __all__


registration.register()
