"""From data sets to batches."""

from hf_sphere.data.batches import Augmentation, ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.decoding import CorruptImageError, ImageShape
from hf_sphere.data.images import ImageData, load_image_data

__all__ = [
    "Augmentation",
    "CorruptImageError",
    "ImageBatches",
    "ImageData",
    "ImageShape",
    "ImagesFromDisk",
    "ImagesInMemory",
    "load_image_data",
]
