"""Optimizers for scale-invariant weights, and the search for those weights.

Names are imported on first use, so that registering the optimizers with transformers and timm imports nothing heavy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
