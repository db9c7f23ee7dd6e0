"""Modules on the hypersphere: spherization and angular layers, classification heads, pole regression, prototypes."""

from typing import Any

from hf_sphere.nn import heads
from hf_sphere.nn.heads import HEADS, Head, HeadOutput, build_head
from hf_sphere.nn.layers import (
    SPHERIZATION_SETTINGS,
    AngularConv2d,
    AngularLinear,
    SphericalConv2d,
    SphericalLinear,
    Spherization,
)
from hf_sphere.nn.pole_regression import PoleRegression
from hf_sphere.nn.prototypical import PrototypicalClassifier

__all__ = [
    "HEADS",
    "SPHERIZATION_SETTINGS",
    "AngularConv2d",
    "AngularLinear",
    "Head",
    "HeadOutput",
    "PoleRegression",
    "PrototypicalClassifier",
    "SphericalConv2d",
    "SphericalLinear",
    "Spherization",
    "build_head",
    *(head.__name__ for head in HEADS.values()),
]


def __getattr__(name: str) -> Any:
    if name == "Spherize":
        from hf_sphere.nn.sentence_embedding import Spherize  # needs sentence-transformers

        return Spherize
    return getattr(heads, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
