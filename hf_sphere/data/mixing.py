"""Mixing of the training images of a batch by mixup and CutMix."""

import torch
from torch import Tensor
from torchvision.transforms.v2 import CutMix, MixUp

from hf_sphere.data.augmentation import drawing_from
from hf_sphere.utils.devices import to_device


def mix_images(
    images: Tensor, labels: Tensor, mixup: float | None, cutmix: float | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Mix each image of a normalized batch (B, C, H, W) with the one before it, by one of the kinds with an alpha.

    These are mixup (Zhang et al., ICLR 2018) and CutMix (Yun et al., ICCV 2019). `labels` are those with the larger
    share, `mixed_labels` the others, and `mixed_share` the share of these, each (B,).
    """
    kinds = [kind(alpha=alpha, num_classes=len(images)) for kind, alpha in ((MixUp, mixup), (CutMix, cutmix)) if alpha]
    chosen, seed = torch.randint(2**62, (2,), generator=generator).tolist()
    with drawing_from(seed):
        # Labeled by their numbers, images get shares of any two of them, however many classes there are.
        mixed, shares = kinds[chosen % len(kinds)](images, torch.arange(len(images)))
    share = to_device(1 - shares.diagonal(), labels.device)  # from the CPU, which does not wait for the device
    others = labels.roll(1)
    is_larger = share > 0.5
    return {
        "pixel_values": mixed,
        "labels": torch.where(is_larger, others, labels),
        "mixed_labels": torch.where(is_larger, labels, others),
        "mixed_share": torch.minimum(share, 1 - share),
    }
