"""Analysis of the weights of trained networks: projections of filters, distances from initialization, critical layers.

Works on any torch module, or on weights alone where these suffice.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
