"""The encoders of transformers that have a spherized form, one row each. Imports neither torch nor transformers.

A row is all that an encoder needs: it defines `Sphere<prefix>Config`, `Sphere<prefix>Model` and a class per task, makes
them public names of `hf_sphere`, registers them with the Auto classes and PEFT, and lets `calibrate_spherization` fit
them.

In a spherized layer, the second map of the feed-forward is a `SphericalLinear`, and the activation is left out because
the spherization replaces it. In a gated feed-forward, second_map(activation(a) * b) with two maps a and b of the input,
the activation belongs to the gate and is kept: the spherized vector is the product activation(a) * b.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lazy_loader

TEXT_TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
IMAGE_TASKS = ("Model", "ForImageClassification")


@dataclass(frozen=True)
class Encoder:
    """An encoder of transformers and the places of its parts. All paths but `layers` start at a layer.

    Attributes:
        model_type: Its `model_type` in transformers.
        prefix: Prefix of its class names.
        layers: Path of its layers in the model without a head.
        first_map: Path of the feed-forward's first linear map.
        activation: Path of the activation, or None if the feed-forward is gated.
        second_map: Path of the feed-forward's second linear map.
        norm: Path of the norm before the feed-forward, or None if the norm follows it, as in BERT.
        tasks: Class names without the prefix, beside `Config`.
    """

    model_type: str
    prefix: str
    layers: str
    first_map: str
    activation: str | None
    second_map: str
    norm: str | None = None
    tasks: tuple[str, ...] = TEXT_TASKS

    @property
    def sphere_model_type(self) -> str:
        """The `model_type` of the spherized encoder."""
        return f"sphere_{self.model_type.replace('-', '_')}"

    def load_class(self, name: str) -> Any:
        """Import a class of the plain encoder, for instance `Config` or `ForMaskedLM`."""
        module = self.model_type.replace("-", "_")
        file = f"{'configuration' if name == 'Config' else 'modeling'}_{module}"
        return getattr(importlib.import_module(f"transformers.models.{module}.{file}"), self.prefix + name)


BERT = Encoder(
    "bert", "Bert", "encoder.layer", "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"
)

ENCODERS = [
    BERT,
    replace(BERT, model_type="roberta", prefix="Roberta"),
    replace(BERT, model_type="electra", prefix="Electra"),
    Encoder("distilbert", "DistilBert", "transformer.layer", "ffn.lin1", "ffn.activation", "ffn.lin2"),
    Encoder("modernbert", "ModernBert", "layers", "mlp.Wi", None, "mlp.Wo", "mlp_norm"),
    Encoder("vit", "ViT", "layers", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", "layernorm_after", IMAGE_TASKS),
]


def find_encoder(name: str) -> tuple[Encoder, str]:
    """Return the row and the part of a class name: for `SphereBertModel`, that of BERT and `Model`.

    Raises:
        AttributeError: If there is no such class; the message shows how to add a row.
    """
    for encoder in ENCODERS:
        part = name.removeprefix(f"Sphere{encoder.prefix}")
        if part != name and part in ("Config", *encoder.tasks):
            return encoder, part
    raise AttributeError(f"hf_sphere has no attribute {name!r}. {how_to_add()}")


def how_to_add() -> str:
    """Describe the encoders that have a row, and how to add another one."""
    return (
        f"These have a spherized form: {', '.join(encoder.model_type for encoder in ENCODERS)}. To add an encoder, "
        f"add a row to ENCODERS in {__name__}, with the paths of its layers and feed-forward; that of BERT is {BERT}."
    )


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package: the names of its stub and the classes of the table.

    Each name is imported when it is first used. The stub lists no class of the table: a row needs no other file.
    """
    from_stub, _, names = lazy_loader.attach_stub(package, file)
    of_table = [f"Sphere{encoder.prefix}{part}" for encoder in ENCODERS for part in ("Config", *encoder.tasks)]

    def get(name: str) -> Any:
        if name in names or not name.startswith("Sphere"):
            return from_stub(name)
        kind = "configuration" if name.endswith("Config") else "modeling"
        return getattr(importlib.import_module(f"{__package__}.{kind}_sphere_text"), name)

    every = sorted([*names, *of_table])
    return get, lambda: every, every
