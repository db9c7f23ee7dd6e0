"""Class prototypes on the hypersphere: placed far apart before training, with a lower bound on their largest cosine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
