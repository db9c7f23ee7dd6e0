"""Detection of out-of-distribution (OOD) inputs of a classifier by scores of its embeddings and logits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
