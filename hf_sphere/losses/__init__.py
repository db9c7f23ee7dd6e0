"""Heads and pair losses as modules called with `(embeddings, labels)`, for any training loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
