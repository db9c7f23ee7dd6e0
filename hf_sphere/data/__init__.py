"""From datasets to batches.

Modules are imported at first use, so that text does not import the dependencies of images.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
