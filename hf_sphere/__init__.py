"""Learning on the hypersphere, inside the Hugging Face ecosystem.

Importing this package makes its models known to `AutoModel*`, its backbones to timm, and its optimizers to both.
Nothing heavy is imported for that: each registration runs when the library concerned is itself imported.
"""

import lazy_loader

from hf_sphere import registration

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

registration.register()
