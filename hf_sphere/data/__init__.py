"""From data sets to batches."""

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.computed_values import COMPUTED_VALUES
from hf_sphere.data.decoding import CorruptImageError, ImageShape
from hf_sphere.data.images import ImageData, load_image_data

__all__ = [
    "COMPUTED_VALUES",
    "Augmentation",
    "CorruptImageError",
    "ImageBatches",
    "ImageData",
    "ImageShape",
    "ImagesFromDisk",
    "ImagesInMemory",
    "load_image_data",
]
