"""From data sets to batches. Imported at first use: text needs none of what images need."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
