"""Clustering of directions: scikit-learn estimators that accept arrays, sparse matrices, and tensors on any device."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
