"""Models with the interface of transformers, one folder per family. Each family is imported when first used."""

import lazy_loader

REQUIRES = "pip install hf_sphere, and import hf_sphere before loading"
"""Note in every saved configuration, since transformers alone does not have the models."""

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
