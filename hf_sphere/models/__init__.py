"""Models with the interface of transformers, one folder per family. Each family is imported when first used."""

from hf_sphere.models.sphere_text.encoders import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
