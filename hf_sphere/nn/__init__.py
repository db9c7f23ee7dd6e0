"""Modules on the hypersphere: spherization and angular layers, classification heads, pole regression, prototypes."""

from typing import Any

from hf_sphere.nn import heads
from hf_sphere.nn.angular import AngularConv2d, AngularLinear
from hf_sphere.nn.calibration import fit_calibration
from hf_sphere.nn.heads import HEADS, Head, HeadOutput, build_head
from hf_sphere.nn.pole_regression import PoleRegression
from hf_sphere.nn.prototypical import PrototypicalClassifier
from hf_sphere.nn.spherization import SPHERIZATION_SETTINGS, SphericalConv2d, SphericalLinear, Spherization

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
    "fit_calibration",
    *(head.__name__ for head in HEADS.values()),
]


def __getattr__(name: str) -> Any:
    if name == "Spherize":
        from hf_sphere.nn.sentence_embedding import Spherize  # needs sentence-transformers

        return Spherize
    return getattr(heads, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
