"""The note on the package to install, in every saved configuration: transformers alone does not know the models."""

REQUIRES = "pip install hf_sphere, and import hf_sphere before loading"
