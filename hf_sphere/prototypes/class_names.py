"""Class vectors from class names, computed by any text model of transformers."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_sphere.utils.checks import text_list
from hf_sphere.utils.loading import load_model, load_pretrained
from hf_sphere.utils.modules import eval_mode


@torch.no_grad()  # unlike inference mode, it returns tensors that can be modified in place
def embed_class_names(
    class_names: Sequence[str],
    model: str | os.PathLike[str] | Any,
    *,
    tokenizer: Any = None,
    template: str = "{}",
) -> Tensor:
    """Embed class names by mean pooling of the last hidden states of a text model.

    Args:
        class_names: K names; underscores are replaced by spaces.
        model: Name or folder of an encoder or decoder that `AutoModel` loads, or a loaded model, on any device.
        tokenizer: Tokenizer; required for a loaded model. By default of the named model.
        template: Text with the placeholder `{}` for a name, for instance `a photo of a {}`.

    Returns:
        (K, hidden size), float32, on the CPU: `class_vectors` for `place_prototypes`.

    Raises:
        ValueError: If there are no names, one is empty, or the template has no placeholder.

    Example:
        >>> embed_class_names(["cat", "dog"], "sentence-transformers/all-MiniLM-L6-v2").shape  # doctest: +SKIP
    """
    from transformers import AutoModel, AutoTokenizer

    if "{}" not in template:
        raise ValueError(f"template must have '{{}}' where the class name goes; got {template!r}.")
    names = [name.replace("_", " ").strip() for name in text_list("class_names", class_names)]
    if not all(names):
        raise ValueError(f"class names must not be empty; got {names[:10]}.")
    if isinstance(model, str | os.PathLike):
        tokenizer = tokenizer or load_pretrained(AutoTokenizer, model)
        model = load_model(AutoModel, model)
    vectors = []
    with eval_mode(model):
        for name in names:  # one by one, since decoders often have no padding token
            tokens = tokenizer(template.replace("{}", name), truncation=True, return_tensors="pt").to(model.device)
            vectors.append(model(**tokens).last_hidden_state[0].float().mean(0).cpu())
    return torch.stack(vectors)
