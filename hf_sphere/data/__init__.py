"""From data sets to batches."""

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.computed_values import COMPUTED_VALUES
from hf_sphere.data.decoding import CorruptImageError, ImageShape
from hf_sphere.data.episodes import Episodes, EpisodeSampler
from hf_sphere.data.images import ImageData, ImageSplit, load_image_data, load_image_split

__all__ = [
    "COMPUTED_VALUES",
    "Augmentation",
    "CorruptImageError",
    "EpisodeSampler",
    "Episodes",
    "ImageBatches",
    "ImageData",
    "ImageShape",
    "ImageSplit",
    "ImagesFromDisk",
    "ImagesInMemory",
    "load_image_data",
    "load_image_split",
]
