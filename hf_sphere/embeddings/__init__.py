"""Predictions and embeddings of image splits: extract them with a saved model, store them, evaluate them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
