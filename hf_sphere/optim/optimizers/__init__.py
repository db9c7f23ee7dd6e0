"""The optimizers: one file each, named as the optimizer; `hf_sphere.optim.names` lists and finds them.

A new optimizer is a new file here with a subclass of `SphereOptimizer`, or of another optimizer of this folder. The
Trainer, timm, the recipes and the shared tests of `tests/optim` then accept its name.
"""
