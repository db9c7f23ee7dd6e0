"""transformers' common tests of image processors, from its source distribution, run on `SphereVisionImageProcessor`."""

import unittest
from typing import Any

import torch
from transformers_tests.test_image_processing_common import ImageProcessingTester, ImageProcessingTestMixin

from hf_sphere import SphereVisionImageProcessor

NOT_APPLICABLE = {
    "SphereVisionImageProcessingTest::test_call_numpy_4_channels": "models have 1 or 3 channels; alpha is none of them"
}


class ProcessorTester(ImageProcessingTester):
    """Images of several sizes for a processor with options that are not its defaults."""

    def __init__(self, parent: Any) -> None:
        size, statistics = {"height": 18, "width": 20}, {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
        super().__init__(parent, max_resolution=60, size=size, **statistics, crop_pct=0.9)

    def _get_image_processing_classes(self) -> dict[str, type]:
        return {"torchvision": SphereVisionImageProcessor}


class SphereVisionImageProcessingTest(ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = ProcessorTester
    test_cast_dtype = torch.float16
