"""Classification by scaled cosines to class vectors, also with a margin between the classes."""

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED
from hf_sphere.geometry.decorators import with_gradient
from hf_sphere.geometry.manifold import divide_by_norms
from hf_sphere.nn.heads.mixins import ClassVectorHead, RunningStatistics, TemperatureHead
from hf_sphere.utils.checks import check_integer, check_number


class CosineHead(ClassVectorHead, TemperatureHead):
    """Cross-entropy of `scale * cosine` between embedding and class vectors; the scale is learned by default.

    Args:
        **options: See `hf_sphere.nn.heads.mixins.ClassVectorHead` and `TemperatureHead` there.

    Reference:
        Zhai and Wu, "Classification is a strong baseline for deep metric learning", BMVC 2019; the learned temperature
        as in Scott, Gallagher and Mozer, "von Mises-Fisher loss", ICCV 2021.

    Example:
        >>> CosineHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "cosine"
    normalizes_classes = True
    without_decay = ("weight",)

    def __init__(self, embedding_dim: int, num_classes: int, **options: Any) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.reset_parameters()
        self.keep_own_classes()

    def reset_parameters(self) -> None:
        """Initialize class vectors and temperature."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Normalize: (B, d) -> (B, d), in float32 or better."""
        return self.normalize(embeddings)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return `scale * cosine`, float32 or better."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.inverse_temperature() * self.unit_embeddings(embeddings) @ self.class_directions(embeddings).T

    def unit_embeddings(self, embeddings: Tensor) -> Tensor:
        """Return the unit vectors (B, d) of transformed embeddings, for heads that keep their norms."""
        return embeddings

    def target_directions(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the unit vectors (B, d) of the classes `labels` (B,) for transformed embeddings (B, d)."""
        return divide_by_norms(F.embedding(labels, self.weight).to(embeddings.dtype), 1e-12)[0]

    def target_logits(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        """Compute the logits (B,) for the unit vectors (B, d) of the own classes, with the margin if there is one."""
        return self.inverse_temperature() * (embeddings * directions).sum(-1)

    def logit_inputs(self, embeddings: Tensor) -> Tensor:
        """Return the unit vectors times the scale: (B, d) -> (B, d)."""
        return self.inverse_temperature() * self.unit_embeddings(embeddings)

    def class_directions(self, embeddings: Tensor) -> Tensor:
        """Return the normalized class vectors (K, d) in the dtype of the embeddings."""
        return divide_by_norms(self.weight.to(embeddings.dtype), 1e-12)[0]


class MarginHead(CosineHead):
    """Base class of cosine heads with a margin in the loss; a subclass overrides `target_logits`.

    The margin affects the loss only; the logits are those of the cosine head.

    Args:
        margin: Margin m, from 0 to `max_margin`, in the unit of the subclass.
        margin_warmup_epochs: Number of initial epochs without a margin, for training loops that call `set_epoch` (the
            recipes do); without such calls the margin is active from the start.
        **options: See `hf_sphere.nn.heads.mixins.TemperatureHead`.
    """

    max_margin: ClassVar[float] = 1.0

    def __init__(
        self, embedding_dim: int, num_classes: int, *, margin: float, margin_warmup_epochs: int = 0, **options: Any
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        self.margin = check_number("margin, of a cosine or an angle in radians,", margin, f"[0, {self.max_margin}]")
        self.margin_warmup_epochs = check_integer("margin_warmup_epochs", margin_warmup_epochs, 0)
        self.set_epoch(margin_warmup_epochs)

    def set_epoch(self, epoch: int) -> None:
        """Activate the margin once `margin_warmup_epochs` epochs have passed."""
        self.active_margin = self.margin if epoch >= self.margin_warmup_epochs else 0.0

    def loss_logits(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the logits (B, K) with the margin in that of the own class."""
        labels = labels.clamp_min(0)
        target = self.target_logits(embeddings, self.target_directions(embeddings, labels))
        return logits.scatter(1, labels[:, None], target[:, None])


def _gradient_of_angle(
    x: Tensor, w: Tensor, cosine: Tensor, sine: Tensor, *gradients: Tensor | None
) -> tuple[Tensor, Tensor]:
    """With the cosine `c = <x, w>`: `dc = <w, dx> + <x, dw>` and `ds = <x - c w, dx - c dw> / s`, 0 for s = 0."""
    grad_cosine, grad_sine = (torch.zeros_like(sine) if grad is None else grad for grad in gradients)
    across = torch.addcmul(x, cosine, w, value=-1) * (grad_sine / torch.threshold(sine, 0.0, torch.inf))
    return torch.addcmul(across, w, grad_cosine), torch.addcmul(x * grad_cosine, across, cosine, value=-1)


@with_gradient(_gradient_of_angle)
def cosine_and_sine(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, 1) of the angles between unit vectors (B, d).

    The sine is the norm of the orthogonal component, so that its gradient is correct and finite even at angle 0.
    """
    cosine = (x * w).sum(-1, keepdim=True)
    return cosine, torch.linalg.vector_norm(torch.addcmul(x, cosine, w, value=-1), dim=-1, keepdim=True)


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


class ProxyAnchorHead(CosineHead):
    """Each class vector (proxy) is an anchor that attracts the batch's examples of its class and repels the others.

    With the cosine s to a proxy, margin m and scale a, a proxy with examples in the batch adds
    `log(1 + sum exp(-a (s - m)))` over these, and every proxy adds `log(1 + sum exp(a (s + m)))` over the others. The
    loss is the mean of the first over the proxies with examples, plus the mean of the second over all. It is a loss of
    the batch of a process: it does not sum over gradient accumulation or processes.

    Args:
        margin: Cosine m, from 0 to 1.
        scale: a, 32 by default, as in the paper; see `TemperatureHead` for this and the temperature.

    Raises:
        ValueError: If an option is out of range.

    Reference:
        Kim, Kim, Cho and Kwak, "Proxy anchor loss for deep metric learning", CVPR 2020.

    Example:
        >>> ProxyAnchorHead(4, 3)(embeddings, labels).logits.shape
        torch.Size([60, 3])
    """

    name = "proxy_anchor"
    default_scale = 32.0

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        margin: float = 0.1,
        scale: float | Literal["learned"] | None = None,
        log_temperature: float | None = None,
        temperature_lr: float | None = None,
    ) -> None:
        temperature = {"scale": scale, "log_temperature": log_temperature, "temperature_lr": temperature_lr}
        super().__init__(embedding_dim, num_classes, blockwise=False, **temperature)
        self.margin = check_number("margin", margin, "[0, 1]")

    def division_advice(self) -> str:
        """See `Head.division_advice`."""
        return "its loss compares all examples of a batch. Use a larger batch on one process, not accumulation."

    def reduce_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch; examples with the label -100 belong to no sum."""
        positives = labels[:, None] == torch.arange(self.num_classes, device=labels.device)
        negatives = ~positives & (labels >= 0)[:, None]
        margin = self.inverse_temperature() * self.margin
        attraction = _log_one_plus_sum(margin - logits, positives)
        repulsion = _log_one_plus_sum(margin + logits, negatives)
        return attraction.sum() / positives.any(dim=0).sum().clamp_min(1) + repulsion.mean()


def _log_one_plus_sum(values: Tensor, kept: Tensor) -> Tensor:
    """Return `log(1 + sum exp(values))` over the kept values of each column: (B, K) -> (K,)."""
    values = values.masked_fill(~kept, -torch.inf)
    return torch.cat([values.new_zeros(1, values.shape[1]), values]).logsumexp(dim=0)
