"""Image processor of the image models."""

from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tvF
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import PILImageResampling
from transformers.processing_utils import ImagesKwargs, Unpack

from hf_sphere.utils.pixels import convert_image


class SphereVisionImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options of `SphereVisionImageProcessor` in addition to the usual ones.

    num_channels (`int`): Number of channels of the result: 1 converts to grayscale, 3 to color.
    """

    num_channels: int


class SphereVisionImageProcessor(TorchvisionBackend):
    """Converts to grayscale or color, resizes, scales to [0, 1] and normalizes.

    Args:
        num_channels: 1 for grayscale, 3 for color.
        size: `{"height": ..., "width": ...}` in pixels.
        image_mean: Mean per channel, of values in [0, 1].
        image_std: Standard deviation per channel, of values in [0, 1].
        **kwargs: The other options of transformers' image processors (`resample`, `do_normalize`, ...).
    """

    model_input_names = ["pixel_values"]
    valid_kwargs = SphereVisionImageProcessorKwargs
    resample = PILImageResampling.BILINEAR
    size = {"height": 32, "width": 32}
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    num_channels = 3
    do_resize = True
    do_rescale = True
    do_normalize = True

    def process_image(self, image: Any, num_channels: int | None = None, **kwargs: Any) -> torch.Tensor:
        """Convert one image to a uint8 or float tensor (num_channels, height, width)."""
        channels = num_channels or self.num_channels
        if isinstance(image, Image.Image):
            image = convert_image(image, channels)
        tensor = super().process_image(image, **kwargs)
        if tensor.shape[0] == channels:
            return tensor
        return tvF.rgb_to_grayscale(tensor[:3]) if channels == 1 else tvF.grayscale_to_rgb(tensor[:1])

    def _preprocess(
        self, images: list[torch.Tensor], num_channels: int | None = None, **kwargs: Unpack[ImagesKwargs]
    ) -> Any:
        return super()._preprocess(images, **kwargs)
