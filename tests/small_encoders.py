"""Small encoders, plain and spherized with the same random weights, and inputs for them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_sphere import models
from hf_sphere.models.sphere_encoder import ENCODERS

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24}
TEXT = {"vocab_size": 50, "max_position_embeddings": 40}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1}
# DistilBERT's name of the intermediate size; a padding token beyond the vocabulary
MORE = {"distilbert": {"hidden_dim": 24}, "modernbert": {"pad_token_id": 0}}


@dataclass(frozen=True)
class Encoder:
    """An encoder of transformers by its `model_type`; its tasks are "Model", "ForMaskedLM" and so on."""

    model_type: str

    @property
    def name(self) -> str:
        return ENCODERS[self.model_type]

    @property
    def is_image(self) -> bool:
        return self.model_type == "vit"

    @property
    def tasks(self) -> list[str]:
        prefix = f"Sphere{self.name}"
        names = [name.removeprefix(prefix) for name in models.__all__ if name.startswith(prefix)]
        return sorted(set(names) - {"Config"}, reverse=True)

    @property
    def sizes(self) -> dict[str, Any]:
        return SIZES | (IMAGES if self.is_image else TEXT) | MORE.get(self.model_type, {})

    def plain_class(self, task: str) -> Any:
        return getattr(transformers, self.name + task)

    def model_class(self, task: str) -> Any:
        return getattr(models, f"Sphere{self.name}{task}")

    def plain_config(self, **options: Any) -> Any:
        return self.plain_class("Config")(**self.sizes | options)

    def config(self, **options: Any) -> Any:
        return self.model_class("Config")(**self.sizes | options)

    def plain(self, task: str = "", **options: Any) -> Any:
        torch.manual_seed(3)
        return self.plain_class(task or self.tasks[-1])(self.plain_config(**options)).eval()

    def model(self, task: str = "", **options: Any) -> Any:
        torch.manual_seed(3)
        return self.model_class(task or self.tasks[-1])(self.config(**options)).eval()

    def batch(self, rows: int = 3, length: int = 6) -> dict[str, Tensor]:
        """Images, or token ids without padding tokens and a mask that excludes some."""
        generator = torch.Generator().manual_seed(1)
        if self.is_image:
            return {"pixel_values": torch.randn(rows, 1, 8, 8, generator=generator)}
        ids = torch.randint(5, 50, (rows, length), generator=generator)
        mask = torch.arange(length) < torch.arange(length, length - rows, -1).clamp_min(1)[:, None]
        return {"input_ids": ids, "attention_mask": mask.long()}

    def output(self, model: Any) -> Tensor:
        return model(**self.batch())[0]

    def layer(self, model: Any, index: int) -> Any:
        return model.base_model.get_submodule(self.model_class("Model").layers_path)[index]

    def spherical(self, model: Any, index: int = -1) -> Any:
        """The spherization and second map of a layer."""
        [spherical] = [m for name, m in self.layer(model, index).named_modules() if name.endswith(".spherical")]
        return spherical


EVERY = [Encoder(model_type) for model_type in ENCODERS]
every_encoder = pytest.mark.parametrize("encoder", EVERY, ids=lambda encoder: encoder.model_type)
CLASSES = pytest.mark.parametrize(
    ("encoder", "task"),
    [(encoder, task) for encoder in EVERY for task in encoder.tasks],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
SETTINGS = pytest.mark.settings(
    encoder=lambda encoder: {"encoder": encoder.model_type}, task=lambda task: {"task": task}
)


def every_class(function: Any) -> Any:
    """Run a test with every class; by default, with every encoder and every task."""
    return SETTINGS(CLASSES(function))


pre_norm = pytest.mark.parametrize("encoder", [Encoder("modernbert"), Encoder("vit")], ids=["modernbert", "vit"])
BERT, DISTILBERT, VIT = Encoder("bert"), Encoder("distilbert"), Encoder("vit")
