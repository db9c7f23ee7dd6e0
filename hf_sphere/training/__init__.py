"""Training with Accelerate: arguments, the loop, checkpoints, evaluation and tasks.

Modules are imported at first use, so that text tasks do not import the dependencies of image tasks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
