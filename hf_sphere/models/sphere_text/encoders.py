"""The text encoders of transformers that have a spherized form, one row each. Imports neither torch nor transformers.

A row defines `Sphere<prefix>Config`, `Sphere<prefix>Model`, `Sphere<prefix>ForMaskedLM` and
`Sphere<prefix>ForSequenceClassification` and registers them with the Auto classes and with PEFT. To make the classes
public, list them in `hf_sphere/models/__init__.pyi`. The layers of the encoder must be built like those of BERT, with
an `intermediate` and an `output`.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of transformers and the names of its parts, without the prefix.

    Attributes:
        model_type: Its `model_type` in transformers.
        prefix: Prefix of its class names.
        lm_head: Attribute and class of the masked-language-model head.
        classification_head: Class of the sequence classifier on the last hidden states, or None if the classifier is a
            linear map of the pooled output.
    """

    model_type: str
    prefix: str
    lm_head: tuple[str, str]
    classification_head: str | None = None

    @property
    def sphere_model_type(self) -> str:
        """The `model_type` of the spherized encoder."""
        return f"sphere_{self.model_type.replace('-', '_')}"

    def load_class(self, name: str) -> Any:
        """Import a class of the plain encoder, for instance `Config` or `ForMaskedLM`."""
        module = self.model_type.replace("-", "_")
        file = f"{'configuration' if name == 'Config' else 'modeling'}_{module}"
        return getattr(importlib.import_module(f"transformers.models.{module}.{file}"), self.prefix + name)


TEXT_ENCODERS = [
    TextEncoder("bert", "Bert", lm_head=("cls", "OnlyMLMHead")),
    TextEncoder("roberta", "Roberta", lm_head=("lm_head", "LMHead"), classification_head="ClassificationHead"),
]
