"""Modules on the hypersphere: spherization and angular layers, classification heads, pole regression, prototypes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("Spherize")  # `import *` must not require sentence-transformers
