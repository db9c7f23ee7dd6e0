"""Mixing of the training images of a batch by mixup and CutMix."""

import torch
from torch import Tensor
from torchvision.transforms.v2 import CutMix, MixUp

from hf_sphere.data.augmentation import drawing_from
from hf_sphere.utils.devices import to_device


def mix_images(
    images: Tensor, labels: Tensor, mixup: float | None, cutmix: float | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Mix each image of a batch with the one before it, by mixup, CutMix or one of the two, drawn for the batch.

    Args:
        images: (B, C, H, W), normalized.
        labels: (B,), class indices.
        mixup: Parameter alpha of the beta distribution of the share of an image, Zhang et al., ICLR 2018; None for
            CutMix only.
        cutmix: Likewise of the share of its area, Yun et al., ICCV 2019; None for mixup only.
        generator: On the CPU.

    Returns:
        `pixel_values`; `labels`, of the images with the larger share, `mixed_labels`, of the others, and the share of
        the latter, `mixed_share`, each (B,).
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
