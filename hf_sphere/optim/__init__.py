"""Optimisers for scale-invariant weights, and the search for those weights.

Imported at first use: the names are registered with transformers and timm at no cost to those who train otherwise.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
