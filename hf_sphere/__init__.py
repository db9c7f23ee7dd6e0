"""Learning on the hypersphere in the Hugging Face ecosystem.

Importing this package registers its models with `AutoModel*`, its backbones with timm, and its optimizers with both
libraries. No heavy imports are needed: each registration runs when the respective library is imported.
"""

import lazy_loader

from hf_sphere import registration

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

registration.register()
