"""Cosine classification with a margin between the classes."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED
from hf_sphere.nn.heads.cosine import MarginHead, cosine_and_sine
from hf_sphere.nn.heads.mixins import RunningStatistics
from hf_sphere.utils.checks import check_integer


class ArcFaceHead(MarginHead):
    """Cosine head whose loss adds a margin m to the angle theta between embedding and target class.

    `cos(theta + m)` is computed as `cos(theta) cos(m) - sin(theta) sin(m)`. Beyond pi - m, where it would increase
    again, `cos(theta) - m sin(m)` replaces it.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        margin: Angle m in radians, from 0 to pi / 2.
        **options: See `hf_sphere.nn.heads.cosine.MarginHead`; `scale` is 64 by default, as in the paper.

    Reference:
        Deng, Guo, Xue and Zafeiriou, "ArcFace: additive angular margin loss for deep face recognition", CVPR 2019.

    Example:
        >>> ArcFaceHead(4, 3, margin=0.5)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "arcface"
    max_margin = math.pi / 2
    default_scale = 64.0

    def __init__(self, embedding_dim: int, num_classes: int, *, margin: float = 0.5, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, margin=margin, **options)

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute `scale * cos(theta + m)`: (B,)."""
        margin = self.active_margin
        cosine, sine = cosine_and_sine(embeddings, directions)
        cosine, sine = cosine.squeeze(1), sine.squeeze(1)
        with_margin = torch.where(
            cosine > -math.cos(margin),
            torch.add(cosine * math.cos(margin), sine, alpha=-math.sin(margin)),
            cosine - margin * math.sin(margin),
        )
        return self.inverse_temperature() * with_margin


class CosFaceHead(MarginHead):
    """Cosine head whose loss subtracts a margin m from the cosine of the own class.

    Args:
        margin: Cosine m, from 0 to 1.
        **options: See `hf_sphere.nn.heads.cosine.MarginHead`; `scale` is 64 by default, as in the paper.

    Reference:
        Wang et al., "CosFace: large margin cosine loss for deep face recognition", CVPR 2018.

    Example:
        >>> CosFaceHead(4, 3, margin=0.35)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "cosface"
    default_scale = 64.0

    def __init__(self, embedding_dim: int, num_classes: int, *, margin: float = 0.35, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, margin=margin, **options)

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute `scale * (cos(theta) - m)`: (B,)."""
        return super().target_logits(embeddings, directions) - self.inverse_temperature() * self.active_margin

    def loss_logits(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the logits (B, K) with the margin in the target logit."""
        if type(self) is not CosFaceHead:  # a subclass may have another logit of the own class
            return super().loss_logits(embeddings, logits, labels)
        labels, margin = labels.clamp_min(0)[:, None], (self.inverse_temperature() * self.active_margin).to(logits)
        return logits.scatter_add(1, labels, -margin.expand(labels.shape))


class SubCenterArcFaceHead(ArcFaceHead):
    """ArcFace with C weights (sub-centers) per class; the nearest one to an embedding counts.

    Noisy labels then gather at the sub-centers that are not dominant. A class has no single direction, so `directions`
    is None.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        sub_centers: Number C of weights per class.
        **options: See `ArcFaceHead`.

    Raises:
        ValueError: If `sub_centers` is not positive.

    Reference:
        Deng, Guo, Liu, Gong and Zafeiriou, "Sub-center ArcFace: boosting face recognition by large-scale noisy web
        faces", ECCV 2020.

    Example:
        >>> SubCenterArcFaceHead(4, 3, sub_centers=2)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "subcenter_arcface"

    def __init__(self, embedding_dim: int, num_classes: int, *, sub_centers: int = 3, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.logits_per_class = check_integer("sub_centers", sub_centers, 1)
        self.weight = nn.Parameter(torch.empty(num_classes, sub_centers, embedding_dim))
        self.reset_parameters()
        self.keep_own_classes()

    def reset_parameters(self) -> None:
        """Initialize sub-centers and temperature."""
        super().reset_parameters()
        bound = math.sqrt(6.0 / (self.weight[..., 0].numel() + self.embedding_dim))
        nn.init.uniform_(self.weight, -bound, bound)  # as the matrix of all sub-centers would be

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `scale * cosine` to the nearest sub-center of each class, float32 or better."""
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.inverse_temperature() * embeddings @ self.class_directions(embeddings).flatten(0, 1).T
            return logits.unflatten(1, (-1, self.weight.shape[1])).max(-1).values

    def target_directions(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the nearest sub-centers (B, d) of the classes `labels` (B,) to embeddings (B, d)."""
        with torch.no_grad():
            centers = self.weight[labels].to(embeddings.dtype)
            norms = torch.linalg.vector_norm(centers, dim=-1).clamp_min(1e-12)
            nearest = ((centers * embeddings[:, None]).sum(-1) / norms).argmax(-1)
        return F.normalize(self.weight[labels, nearest].to(embeddings.dtype), dim=-1)

    def directions(self) -> None:
        """Return None: a class has several directions."""
        return None


class AdaFaceHead(RunningStatistics, MarginHead):
    """Cosine head with an angular margin for embeddings of small norm and a margin in the cosine for large norms.

    With the quality `q = (|z| - mean) / std * norm_factor`, limited to [-1, 1], the cosine of the own class becomes
    `cos(theta - m q) - m (1 + q)`. So hard examples weigh less if their quality is low. Mean and standard deviation of
    the norms are running averages over the training images. The output contains z as `embeddings` and |z| as
    `concentration`. The norm has no gradient.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        margin: m, from 0 to pi / 2.
        **options: See `hf_sphere.nn.heads.cosine.MarginHead`; `scale` is 64 by default, as in the paper.

    Reference:
        Kim, Jain and Liu, "AdaFace: quality adaptive margin for face recognition", CVPR 2022. The initial averages are
        from its published code. There, norms are limited to [0.001, 100], which depends on the architecture; here
        they are not.

    Example:
        >>> AdaFaceHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "adaface"
    default_scale = 64.0
    max_margin = math.pi / 2
    norm_mean: Tensor
    norm_std: Tensor
    norm_factor, norm_momentum = 0.333, 0.99  # of the standardized norm, and of the running averages in each update

    def __init__(self, embedding_dim: int, num_classes: int, *, margin: float = 0.4, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, margin=margin, **options)
        self.register_buffer("norm_mean", torch.tensor(20.0))
        self.register_buffer("norm_std", torch.tensor(100.0))

    def reset_parameters(self) -> None:
        """Initialize class vectors, temperature and averages."""
        super().reset_parameters()
        if hasattr(self, "norm_mean"):  # not yet in the constructor of the base class
            self.norm_mean.fill_(20.0)
            self.norm_std.fill_(100.0)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings (B, d) in float32 or better, with the gradient of their direction only."""
        points, norms = self.split(embeddings)
        return points * norms.nan_to_num(nan=math.nan, posinf=0.0)

    def unit_embeddings(self, embeddings: Tensor) -> Tensor:
        """Return the normalized embeddings; the norm has no gradient."""
        return embeddings / self.compute_concentration(embeddings).clamp_min(1e-12)[:, None]

    def compute_concentration(self, embeddings: Tensor) -> Tensor:
        """Return |z|: (B, d) -> (B,)."""
        return torch.linalg.vector_norm(embeddings.detach(), dim=-1)

    def measure(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return number, sum and sum of squares of the deviations of the norms from their running mean: (3,)."""
        deviations = self.compute_concentration(embeddings) - self.norm_mean
        deviations = deviations.masked_fill(labels == IGNORED, torch.nan)  # as those of overflowed embeddings
        used = (deviations < torch.inf).to(deviations.dtype)
        return torch.stack([used, deviations, deviations.square()]).nansum(1)

    def update_statistics(self, sums: Tensor) -> None:
        """Move the running averages towards mean and standard deviation of a step, if it has at least two examples."""
        count, total, squares = sums.unbind()
        variance = torch.addcdiv(squares, total.square(), count, value=-1) / (count - 1)  # 0 / 0 for one example
        std_step = variance.clamp_min(0.0).sqrt() - self.norm_std
        mean_step = torch.addcdiv(0.0 * std_step, total, count)  # NaN if the other is
        self.norm_mean.add_(mean_step.nan_to_num(0.0), alpha=1 - self.norm_momentum)
        self.norm_std.add_(std_step.nan_to_num(0.0), alpha=1 - self.norm_momentum)

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute `scale * (cos(theta - m q) - m (1 + q))`, with the angle limited to [0, pi]: (B,)."""
        margin, norms = self.active_margin, self.compute_concentration(embeddings)
        quality = (norms - self.norm_mean) * (margin * self.norm_factor) / (self.norm_std + 1e-3)
        angle = quality.clamp(-margin, margin)  # m q
        units = embeddings / norms.clamp_min(1e-12)[:, None]
        cosine, sine = (value.squeeze(1) for value in cosine_and_sine(units, directions))
        along, limit = angle.cos(), angle.sign()
        rotated = torch.addcmul(cosine * along, sine, angle.sin())
        rotated = torch.where(limit * cosine > along, limit, rotated)
        return self.inverse_temperature() * (rotated - (angle + margin))
