"""Small spherized text encoders of each family, with their plain counterparts."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_sphere

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24}
SIZES |= {"vocab_size": 50, "max_position_embeddings": 40}


@dataclass(frozen=True)
class Family:
    """A family of encoders; its model kinds are "Model", "ForMaskedLM" and "ForSequenceClassification"."""

    name: str
    prefix: str

    def plain_config(self, **options: Any) -> Any:
        return getattr(transformers, f"{self.name}Config")(**SIZES | options)

    def config(self, **options: Any) -> Any:
        return getattr(hf_sphere, f"Sphere{self.name}Config")(**SIZES | options)

    def plain_class(self, kind: str = "ForMaskedLM") -> Any:
        return getattr(transformers, self.name + kind)

    def model_class(self, kind: str = "ForMaskedLM") -> Any:
        return getattr(hf_sphere, f"Sphere{self.name}{kind}")

    def plain(self, kind: str = "ForMaskedLM", **options: Any) -> Any:
        return self.plain_class(kind)(self.plain_config(**options)).eval()

    def model(self, kind: str = "ForMaskedLM", **options: Any) -> Any:
        return self.model_class(kind)(self.config(**options)).eval()

    def batch(self, rows: int = 3, length: int = 6) -> dict[str, Tensor]:
        """Token ids without padding tokens, and a mask that excludes some."""
        ids = torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(length) < torch.arange(length, length - rows, -1)[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(params=["Bert", "Roberta"])
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param, request.param.lower())


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the log of transformers, whose loggers do not propagate, and clear the cache of `warning_once`."""
    logger = logging.getLogger("transformers")
    transformers.utils.logging.warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
