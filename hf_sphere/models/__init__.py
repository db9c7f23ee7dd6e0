"""Models with the interface of transformers, one folder per family. Each family is imported when first used."""

import lazy_loader

from hf_sphere.utils.renamed import find_renamed

REQUIRES = "pip install hf_sphere, and import hf_sphere before loading"
"""Note in every saved configuration, since transformers alone does not have the models."""

_lookup, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = find_renamed(__name__, _lookup)
