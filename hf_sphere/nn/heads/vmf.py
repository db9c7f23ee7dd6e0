"""Classification by von Mises-Fisher distributions: every embedding and every class has a direction and a certainty."""

import logging
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.bessel import means_from_natural_parameters
from hf_sphere.geometry.sampling import (
    Noise,
    cosine_from_noise,
    fixed_noise,
    points_from_noise,
    sample_cosine,
    tangent_directions,
)
from hf_sphere.nn.heads.base import FIRST_LOG_TEMPERATURE, TemperatureHead
from hf_sphere.nn.vmf_softmax import log_class_sum

logger = logging.getLogger(__name__)


class VMFHead(TemperatureHead):
    """Softmax over classes, in the mean over what the embedding and the classes may be.

    An embedding z stands for a von Mises-Fisher distribution with direction z / |z| and concentration |z|, a class for
    one with direction and concentration of its weight w. The loss bounds the expected cross-entropy of `beta * x.y`
    over points x of the embedding and y of the classes: in closed form over y, and by S samples of x, which lie two by
    two on opposite sides of the mean direction. The points of the output are z, and its concentration is |z|: low where
    an image is unlike what the model has learned.

    Before training, `calibrate` measures on training images by what constant the backbone's output has to be
    multiplied so that embeddings start with the concentration of the classes. The constant is a buffer. The recipes do
    this; before a stock Trainer or a loop of your own call `hf_sphere.training.calibrate_head`.

    In eval mode the answer is the mean softmax over S points of the embedding and of each class. They come from one
    fixed set of random numbers for all images, so that an image's answer does not depend on its batch. With few samples
    answers close to a tie depend on these numbers; `num_samples` in a saved model's `head_kwargs` may be raised.
    In training mode, and always with `prediction="mean"`, the logits are `beta` times the product of the means.

    Args:
        embedding_dim: Dimension d of the sphere's space, at least 2.
        num_classes: Number of classes K.
        num_samples: S, points drawn of each distribution.
        kappa_confidence: Expected cosine l in (0, 1) between a point and its mean direction at the start, which sets
            the concentrations to about l (d - 1) / (1 - l^2). 0.7 in the paper's fine-grained runs.
        prediction: `samples` for the mean softmax over points, `mean` for the softmax of the means, which is faster
            and less exact in its confidence.
        log_temperature: See `TemperatureHead`; -2.773 in the paper's runs on birds and products.
        temperature_lr: See `TemperatureHead`.

    Raises:
        ValueError: If `embedding_dim`, `num_samples`, `kappa_confidence` or `prediction` is not as above.

    Reference:
        Scott, Gallagher and Mozer, "von Mises-Fisher loss: an exploration of embedding geometries for supervised
        learning", ICCV 2021.
    """

    name = "vmf"
    embedding_scale: Tensor
    is_calibrated: Tensor

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        num_samples: int = 10,
        kappa_confidence: float = 0.4,
        prediction: Literal["samples", "mean"] = "samples",
        log_temperature: float = FIRST_LOG_TEMPERATURE,
        temperature_lr: float | None = None,
    ) -> None:
        super().__init__(embedding_dim, num_classes, log_temperature=log_temperature, temperature_lr=temperature_lr)
        if embedding_dim < 2:
            raise ValueError(f"head 'vmf' needs embeddings of at least 2 dimensions; got {embedding_dim}.")
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1; got {num_samples}.")
        if not 0.0 < kappa_confidence < 1.0:
            raise ValueError(f"kappa_confidence must lie between 0 and 1, both excluded; got {kappa_confidence}.")
        if prediction not in ("samples", "mean"):
            raise ValueError(f"prediction must be 'samples' or 'mean'; got {prediction!r}.")
        self.num_samples = num_samples
        self.kappa_confidence = kappa_confidence
        self.prediction = prediction
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.register_buffer("embedding_scale", torch.empty(()))
        self.register_buffer("is_calibrated", torch.empty((), dtype=torch.bool))
        self.reset_parameters()

    @property
    def first_concentration(self) -> float:
        """Concentration that embeddings and classes start with."""
        return self.kappa_confidence * (self.embedding_dim - 1) / (1 - self.kappa_confidence**2)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw class directions anew, with the concentration of the start; the scale awaits its calibration."""
        super().reset_parameters()
        nn.init.normal_(self.weight)
        self.weight.copy_(self.first_concentration * F.normalize(self.weight, dim=-1))
        self.embedding_scale.fill_(1.0)
        self.is_calibrated.fill_(False)
        self._may_need_calibration = True

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]  # a class attribute of the other heads
        """Whether `calibrate` has not been called yet."""
        return not bool(self.is_calibrated)

    @torch.no_grad()
    def calibrate(self, embeddings: Tensor) -> None:
        """Choose the constant so that embeddings (N, d) start with about the concentration of the classes.

        It makes sqrt(d) times the mean size of a coordinate equal to that. For Gaussian embeddings the mean
        concentration is a quarter larger.
        """
        typical = self.widen(embeddings).abs().mean()
        if not typical > 0 or not typical.isfinite():
            raise ValueError(
                f"the embeddings have a mean size of {typical.item():g}; there is no scale to fit to them."
            )
        # The norm of a vector of d coordinates of one size is sqrt(d) times that size.
        self.embedding_scale.fill_(self.first_concentration / self.embedding_dim**0.5 / typical)
        self.is_calibrated.fill_(True)

    def _remind_of_calibration(self) -> None:
        """Say once, when training begins, that nobody has calibrated the head."""
        self._may_need_calibration = False
        if self.needs_calibration:
            logger.warning(
                "Head 'vmf' is trained with embeddings as they come: their concentrations may start far from those of "
                "the classes. Call hf_sphere.training.calibrate_head(model, batches) before, as the recipes do."
            )

    def represent(self, embeddings: Tensor) -> Tensor:
        """Scale: (B, d) -> (B, d), direction times concentration, in float32 or better."""
        embeddings = self.widen(embeddings)
        if self.training and self._may_need_calibration and not torch.compiler.is_compiling():
            self._remind_of_calibration()
        return self.embedding_scale.to(embeddings.dtype) * embeddings

    def measure_concentration(self, points: Tensor) -> Tensor:
        """|z|: (B, d) -> (B,)."""
        return torch.linalg.vector_norm(points, dim=-1)

    def classify(self, points: Tensor) -> Tensor:
        """Return log-probabilities in eval mode, and in training mode the logits of the means: (B, K)."""
        with torch.autocast(points.device.type, enabled=False):
            weight = self.weight.to(points.dtype)
            if self._predicts_by_mean:
                return self._classify_mean(points, weight)
            return self._log_mean_softmax(points, weight)

    def compute_loss(self, points: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch of `mean_s log sum_k C(w_k) / C(w_k + beta s) - beta E[z].E[w_y]`."""
        with torch.autocast(points.device.type, enabled=False):
            weight = self.weight.to(points.dtype)
            total = log_class_sum(*self._draw(points), weight, self.inverse_temperature())
            by_mean = logits if self._predicts_by_mean else self._classify_mean(points, weight)
            return total.mean() - by_mean.gather(1, labels[:, None]).mean()

    def directions(self) -> Tensor:
        """Return the mean directions of the classes."""
        return F.normalize(self.weight.detach(), dim=-1)

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """Class weights do not decay: their length is a certainty."""
        return {"weight": {}, **super().parameter_options()}

    def extra_repr(self) -> str:
        """Describe the head in a printed model."""
        return (
            f"{self.embedding_dim} -> {self.num_classes} classes, num_samples={self.num_samples}, "
            f"kappa_confidence={self.kappa_confidence}, prediction={self.prediction!r}"
        )

    @property
    def _predicts_by_mean(self) -> bool:
        return self.training or self.prediction == "mean"

    def _classify_mean(self, points: Tensor, weight: Tensor) -> Tensor:
        """Return `beta E[x].E[y]`: (N, K)."""
        of_points, of_classes = means_from_natural_parameters(points, weight)
        return self.inverse_temperature() * of_points @ of_classes.T

    def _draw(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """S points of each embedding, as `log_class_sum` takes them; in eval mode always from the same noise."""
        direction, concentration = _split(points)
        half = (self.num_samples + 1) // 2
        if self.training:
            cosine, sine = sample_cosine(concentration.expand(self.num_samples, -1), self.embedding_dim)
            normals = torch.randn(half, *points.shape, dtype=points.dtype, device=points.device)
        else:
            noise = self._fixed_noise((self.num_samples, 1), points)
            cosine, sine = cosine_from_noise(concentration, self.embedding_dim, noise)
            normals = noise.normals[:half]
        return direction, cosine, sine, tangent_directions(direction.detach(), normals)

    def _log_mean_softmax(self, points: Tensor, weight: Tensor) -> Tensor:
        """Logarithm of the mean over S points of embedding and classes of the softmax of `beta * x.y`: (N, K)."""
        direction, concentration = _split(weight)
        total = points.new_full((), -math.inf)
        noise = self._fixed_noise((self.num_samples, 1), points)
        for number, samples in enumerate(points_from_noise(*_split(points), noise), 1):
            # One point of each class at a time: all S of them would be as large as S layers.
            noise = self._fixed_noise((self.num_classes,), weight, seed=number)
            classes = points_from_noise(direction, concentration, noise)
            total = torch.logaddexp(total, (self.inverse_temperature() * samples @ classes.T).log_softmax(-1))
        return total - math.log(self.num_samples)

    def _fixed_noise(self, shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Noise:
        return fixed_noise(shape, self.embedding_dim, seed, like.dtype, like.device)


def _split(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (..., d) and lengths (...)."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1)
    # A distribution of no concentration has no direction; below this one its gradient would only be large and random.
    return vectors / lengths.clamp_min(1e-3)[..., None], lengths
