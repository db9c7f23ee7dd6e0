"""Attraction and repulsion between one proxy per class and the embeddings of a batch."""

from typing import Literal

import torch
from torch import Tensor

from hf_sphere.nn.heads.cosine import CosineHead


class ProxyAnchorHead(CosineHead):
    """Each class weight (proxy) is an anchor that attracts the batch's examples of its class and repels the others.

    With the cosine s to a proxy, margin m and scale a, a proxy with examples in the batch adds
    `log(1 + sum exp(-a (s - m)))` over these, and every proxy adds `log(1 + sum exp(a (s + m)))` over the others. The
    loss is the mean of the first over the proxies with examples, plus the mean of the second over all. It is a loss of
    the batch of a process: it does not sum over gradient accumulation or processes.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        margin: Cosine m, from 0 to 1.
        scale: a, 32 by default, as in the paper; otherwise see `TemperatureHead`.
        log_temperature: See `TemperatureHead`.
        temperature_lr: See `TemperatureHead`.

    Raises:
        ValueError: If an option is out of range.

    Reference:
        Kim, Kim, Cho and Kwak, "Proxy anchor loss for deep metric learning", CVPR 2020.
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
        if not 0.0 <= margin <= 1.0:
            raise ValueError(f"margin is a cosine from 0 to 1; got {margin}.")
        temperature = {"scale": scale, "log_temperature": log_temperature, "temperature_lr": temperature_lr}
        super().__init__(embedding_dim, num_classes, **temperature)
        self.margin = margin

    def reduce_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch; examples with the label -100 belong to no sum."""
        own = labels[:, None] == torch.arange(self.num_classes, device=labels.device)
        others = ~own & (labels >= 0)[:, None]
        margin = self.inverse_temperature() * self.margin
        attraction = _log_one_plus_sum(margin - logits, own)
        repulsion = _log_one_plus_sum(margin + logits, others)
        return attraction.sum() / own.any(dim=0).sum().clamp_min(1) + repulsion.mean()


def _log_one_plus_sum(values: Tensor, kept: Tensor) -> Tensor:
    """Return `log(1 + sum exp(values))` over the kept values of each column: (B, K) -> (K,)."""
    values = values.masked_fill(~kept, -torch.inf)
    return torch.cat([torch.zeros_like(values[:1]), values]).logsumexp(dim=0)
