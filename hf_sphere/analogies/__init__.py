"""Word analogies answered by language models: any masked, causal or embedding model of transformers.

Everything is imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
