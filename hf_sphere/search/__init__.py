"""Nearest neighbors of embeddings and images: extract, store, index and search them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
