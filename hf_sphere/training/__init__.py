"""Training with Accelerate: arguments, the loop, checkpoints, evaluation, tasks. Every recipe uses it.

Modules are imported at first use: text tasks do without the dependencies of image tasks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
