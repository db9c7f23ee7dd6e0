"""Models with the interface of transformers, one folder per family. Each family is imported when first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
