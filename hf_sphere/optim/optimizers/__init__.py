"""The optimizers, one file per optimizer with its name; `hf_sphere.optim.names` lists and imports them.

To add an optimizer, add a file with a subclass of `SphereOptimizer`, or of another optimizer of this folder. The
Trainer, timm, the recipes and the shared tests of `tests/optim` then accept its name. If `tests/optim/update_rules.py`
has a function of this name, the tests compare the optimizer with it.
"""
