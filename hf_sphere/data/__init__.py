"""From data sets to batches. Imported at first use: text needs none of what images need."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.data.augmentation import Augmentation
    from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
    from hf_sphere.data.computed_values import COMPUTED_VALUES
    from hf_sphere.data.decoding import CorruptImageError, ImageShape
    from hf_sphere.data.episodes import Episodes, EpisodeSampler
    from hf_sphere.data.few_shot import FewShotBatches, FewShotData
    from hf_sphere.data.image_split import ImageSplit, load_image_split
    from hf_sphere.data.images import ImageData, load_image_data
    from hf_sphere.data.text import TextData, load_text_data
    from hf_sphere.data.text_batches import Masking, TextBatches, Vocabulary

_MODULES = {
    "augmentation": ("Augmentation",),
    "batches": ("ImageBatches", "ImagesFromDisk", "ImagesInMemory"),
    "computed_values": ("COMPUTED_VALUES",),
    "decoding": ("CorruptImageError", "ImageShape"),
    "episodes": ("EpisodeSampler", "Episodes"),
    "few_shot": ("FewShotBatches", "FewShotData"),
    "image_split": ("ImageSplit", "load_image_split"),
    "images": ("ImageData", "load_image_data"),
    "text": ("TextData", "load_text_data"),
    "text_batches": ("Masking", "TextBatches", "Vocabulary"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "COMPUTED_VALUES",
    "Augmentation",
    "CorruptImageError",
    "EpisodeSampler",
    "Episodes",
    "FewShotBatches",
    "FewShotData",
    "ImageBatches",
    "ImageData",
    "ImageShape",
    "ImageSplit",
    "ImagesFromDisk",
    "ImagesInMemory",
    "Masking",
    "TextBatches",
    "TextData",
    "Vocabulary",
    "load_image_data",
    "load_image_split",
    "load_text_data",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
