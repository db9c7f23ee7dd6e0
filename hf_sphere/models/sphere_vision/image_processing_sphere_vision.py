"""Image processor of the image models."""

from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode, functional as tvF
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import PILImageResampling, pil_torch_interpolation_mapping
from transformers.processing_utils import ImagesKwargs, Unpack

from hf_sphere.utils.checks import check_choice, check_color, check_number
from hf_sphere.utils.pixels import WHITE, convert_array, convert_image, resize_image


class SphereVisionImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options of `SphereVisionImageProcessor` in addition to the usual ones.

    num_channels (`int`): Number of channels of the result: 1 converts to grayscale, 3 to color.
    crop_pct (`float`, *optional*): Fraction of a side that a crop of the center keeps; None stretches the whole image.
    background_color (`list[int]`): Red, green and blue, 0 to 255, behind transparent parts.
    """

    num_channels: int
    crop_pct: float | None
    background_color: list[int]


class SphereVisionImageProcessor(TorchvisionBackend):
    """Converts to grayscale or color, resizes, scales to [0, 1] and normalizes.

    With the default `rescale_factor`, arrays are converted as images are: see `hf_sphere.utils.pixels.convert_array`.

    Args:
        num_channels: 1 for grayscale, 3 for color.
        size: `{"height": ..., "width": ...}` in pixels.
        image_mean: Mean per channel, of values in [0, 1].
        image_std: Standard deviation per channel, of values in [0, 1].
        crop_pct: Fraction of a side that a crop of the center keeps, as in timm; None stretches the whole image.
        background_color: Red, green and blue, 0 to 255, of the color behind transparent parts.
        **kwargs: The other options of transformers' image processors (`resample`, `do_normalize`, ...).

    Example:
        >>> processor = SphereVisionImageProcessor(size={"height": 8, "width": 8})
        >>> processor(torch.zeros(3, 32, 32, dtype=torch.uint8), return_tensors="pt").pixel_values.shape
        torch.Size([1, 3, 8, 8])
    """

    model_input_names = ["pixel_values"]
    valid_kwargs = SphereVisionImageProcessorKwargs
    resample = PILImageResampling.BILINEAR
    size = {"height": 32, "width": 32}
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    num_channels = 3
    crop_pct = None
    background_color = list(WHITE)
    do_resize = True
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True

    @classmethod
    def from_data(cls, data: Any) -> "SphereVisionImageProcessor":
        """Build the processor that prepares images as `hf_sphere.data.ImageData` does.

        Args:
            data: The result of `hf_sphere.data.load_image_data`.

        Example:
            >>> processor = SphereVisionImageProcessor.from_data(data)  # doctest: +SKIP
            >>> SphereTrainer(model, args, train_dataset=data.train, processing_class=processor)  # doctest: +SKIP
        """
        shape: Any = data.shape
        # Training data may have one value for all channels.
        mean, std = (list(values) * (shape.channels if len(values) == 1 else 1) for values in (data.mean, data.std))
        options: Any = {"image_mean": mean, "image_std": std, "crop_pct": shape.crop_pct}
        options |= {"size": {"height": shape.height, "width": shape.width}, "background_color": list(shape.background)}
        resample = PILImageResampling[shape.interpolation.upper()]
        return cls(num_channels=shape.channels, resample=resample, **options)

    def _standardize_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Check the options, those of the processor and those of a call."""
        kwargs = super()._standardize_kwargs(**kwargs)
        channels, crop_pct = kwargs["num_channels"], kwargs["crop_pct"]
        check_choice("num_channels", channels, (1, 3))
        if crop_pct is not None:
            check_number("crop_pct", crop_pct, "(0, 1]")
        for name in ("image_mean", "image_std"):
            values = kwargs[name]
            if channels == 1 and values == tuple(getattr(type(self), name)):  # the default, which is for color
                kwargs[name] = values = values[:1]
            if kwargs["do_normalize"] and isinstance(values, tuple) and len(values) != channels:
                raise ValueError(f"{name} must have one value per channel, {channels}; got {list(values)}.")
            for value in values if kwargs["do_normalize"] and isinstance(values, tuple) else ():
                check_number(name, value, "(0, inf)" if name == "image_std" else "(-inf, inf)")
        return kwargs

    def _prepare_images_structure(self, images: Any, expected_ndims: int = 3) -> Any:
        """List the images of any structure; gray arrays (H, W), which transformers refuses here, are images too."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if any(getattr(image, "ndim", 0) == 2 for image in several):
            return self.fetch_images(several)
        return super()._prepare_images_structure(images, expected_ndims)

    def process_image(
        self, image: Any, num_channels: int | None = None, background_color: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """Convert one image to a uint8 or float tensor (num_channels, height, width)."""
        channels = num_channels or self.num_channels
        background = self.background_color if background_color is None else background_color
        check_color(background)
        if isinstance(image, Image.Image):
            image = convert_image(image, channels, background)
        elif image.ndim == 2:  # not all versions of transformers add the axis
            image = image[None]
        tensor = super().process_image(image, **kwargs | {"do_convert_rgb": None})
        if kwargs.get("do_rescale") and kwargs["rescale_factor"] == type(self).rescale_factor:  # for 8-bit values
            tensor = convert_array(tensor)
        if channels == 3:
            return tvF.grayscale_to_rgb(tensor)
        gray = tvF.rgb_to_grayscale(tensor.float())
        return (gray if tensor.is_floating_point() else gray.round()).to(tensor.dtype)  # rounded, as by PIL

    def _preprocess(
        self,
        images: list[torch.Tensor],
        size: Any,
        resample: Any = None,
        do_resize: bool = True,
        crop_pct: float | None = None,
        **kwargs: Unpack[ImagesKwargs],
    ) -> Any:
        if do_resize and crop_pct is not None:
            mode = resample if isinstance(resample, InterpolationMode) else pil_torch_interpolation_mapping[resample]
            images = [resize_image(image, (size.height, size.width), crop_pct, mode) for image in images]
            do_resize = False
        return super()._preprocess(images, size=size, resample=resample, do_resize=do_resize, **kwargs)
