"""Loading of saved models of any class."""

import os
from typing import Any

import transformers

from hf_sphere import models
from hf_sphere.utils.loading import load_model, load_pretrained


def load_saved(name: str | os.PathLike) -> Any:
    """Load a model by the class that it was saved as, and check that it is complete; see `load_model`."""
    config = load_pretrained(transformers.AutoConfig, name)
    saved = (config.architectures or ["AutoModel"])[0]
    kind = getattr(models, saved, None) or getattr(transformers, saved, transformers.AutoModel)
    return load_model(kind, name, complete=True)
