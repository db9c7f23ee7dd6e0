"""Classification by scaled cosines to class vectors."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.decorators import with_gradient
from hf_sphere.geometry.manifold import divide_by_norms
from hf_sphere.nn.heads.mixins import ClassVectorHead, TemperatureHead
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

    def margin_loss(self) -> float:
        """Return what the margin adds to the loss of an embedding that is orthogonal to its class, as at the start."""
        embeddings, directions = torch.eye(2, self.embedding_dim, device=self.weight.device)[:, None]
        return -self.target_logits(embeddings, directions).item()

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
