"""Classification by von Mises-Fisher distributions of embeddings and classes."""

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry import sampling
from hf_sphere.geometry.bessel import means_from_natural_parameters
from hf_sphere.geometry.manifold import divide_by_norms
from hf_sphere.nn.class_softmax import log_class_sum
from hf_sphere.nn.heads.mixins import INITIAL_LOG_TEMPERATURE, ClassVectorHead, TemperatureHead
from hf_sphere.nn.processes import log_sum_over_processes
from hf_sphere.utils.checks import check_choice, check_integer, check_number

CONFIDENT, CONFIDENCES = 0.9999, (0.4, 0.95)
"""Probability that an embedding in the direction of its class has, and range of its cosine."""


def find_confidence(num_classes: int, log_temperature: float) -> float:
    """Return the initial expected cosine l, 0.4 to 0.95, with which a prediction can have a probability of 0.9999.

    The logit of an embedding in the direction of its class is beta l^2, about 0 for classes orthogonal to it, and their
    softmax is p if beta l^2 is log((K - 1) p / (1 - p)). In a sweep on CIFAR-10, the l of p = 0.99 is as accurate, but
    its likelihood is much lower (page "von Mises-Fisher embeddings").
    """
    odds = max(num_classes - 1, 1) * CONFIDENT / (1 - CONFIDENT)
    cosine = math.sqrt(math.log(odds) * math.exp(log_temperature))
    return min(max(cosine, CONFIDENCES[0]), CONFIDENCES[1])


class VMFHead(ClassVectorHead, TemperatureHead):
    """Expected softmax over classes, where embedding and classes are von Mises-Fisher distributions.

    An embedding z represents the distribution with mean direction z / |z| and concentration |z|, and a class vector w
    represents a distribution in the same way. The loss is an upper bound on the expected cross-entropy of the logits
    `beta * x.y`, with x from the embedding and y from the classes. The expectation over y is in closed form; that over
    x uses S samples in antithetic pairs. The output contains z as `embeddings` and |z| as `concentration`, which is low
    for out-of-distribution images.

    The head needs a data-dependent initialization: `initialize_from_data` computes, from embeddings of training images,
    the constant factor that gives embeddings the initial concentration of the classes, and stores it in a buffer. The
    recipes and `SphereTrainer` do this; call `hf_sphere.training.initialize_from_data` in other loops.

    In eval mode the logits are the logarithm of the mean softmax over S samples of the embedding and of each class. All
    images share one fixed set of random numbers, so the prediction for an image does not depend on its batch. With few
    samples, predictions close to a tie depend on these numbers; `num_samples` can be increased in the `head_kwargs` of
    a saved model. In training mode, and always with `prediction="mean"`, the logits are `beta` times the dot product
    of the means. A model exported to ONNX contains the random numbers.

    The samples of the training loss are random. In the recipes they depend on the run's seed, the optimizer step and
    the position of the image in the global batch; in a loop that does not call `before_forward`, or if the head gets
    several embeddings per image, on torch's global generator.

    Args:
        embedding_dim: Length d of the embeddings, at least 2.
        num_samples: Number S of samples from each distribution.
        kappa_confidence: Initial expected cosine l in (0, 1) between a sample and its mean direction, which gives
            concentrations of about l (d - 1) / (1 - l^2). `auto` is the smallest one that allows confident
            predictions, see `find_confidence`; 0.7 in the paper's fine-grained runs, 0.4 in its other ones.
        prediction: `samples` for the mean softmax over samples, `mean` for the softmax of the means, which is faster
            and has a less accurate confidence.
        log_temperature: Initial logarithm of the learned temperature; -2.773 in the paper's runs on birds and products.
        temperature_lr: Learning rate of `log_temperature`; as for the other parameters if None.
        blockwise: Whether to compute the loss in blocks of classes, twice: less memory, and more time. `auto` if the
            samples have more than `hf_sphere.nn.heads.mixins.MANY_LOGITS` logits; the output keeps its logits.
        shard_classes: See `hf_sphere.nn.heads.mixins.ClassVectorHead`, also for `sample_rate`.

    Raises:
        ValueError: If `embedding_dim`, `num_samples`, `kappa_confidence` or `prediction` is invalid.

    Reference:
        Scott, Gallagher and Mozer, "von Mises-Fisher loss: an exploration of embedding geometries for supervised
        learning", ICCV 2021.

    Example:
        >>> VMFHead(4, 3).eval()(embeddings).logits.shape
        torch.Size([60, 3])
    """

    name = "vmf"
    without_decay = ("weight",)  # the norm of a class vector is a concentration
    embedding_scale: Tensor
    is_initialized: Tensor  # whether `embedding_scale` is

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        num_samples: int = 10,
        kappa_confidence: float | Literal["auto"] = "auto",
        prediction: Literal["samples", "mean"] = "samples",
        log_temperature: float = INITIAL_LOG_TEMPERATURE,
        temperature_lr: float | None = None,
        blockwise: bool | Literal["auto"] = "auto",
        shard_classes: bool = False,
        sample_rate: float = 1.0,
    ) -> None:
        options: Any = {"log_temperature": log_temperature, "temperature_lr": temperature_lr}
        options |= {"blockwise": blockwise, "shard_classes": shard_classes, "sample_rate": sample_rate}
        super().__init__(check_integer("embedding_dim", embedding_dim, 2), num_classes, **options)
        if kappa_confidence == "auto":
            kappa_confidence = find_confidence(num_classes, log_temperature)
        self.num_samples = self.logits_per_class = check_integer("num_samples", num_samples, 1)
        self.kappa_confidence: float = check_number("kappa_confidence, if not 'auto',", kappa_confidence, "(0, 1)")
        self.prediction = check_choice("prediction", prediction, ("samples", "mean"))
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self._keys: Tensor | None = None  # no buffer: those of the first process would be copied to the others
        self.register_buffer("embedding_scale", torch.empty(()))
        self.register_buffer("is_initialized", torch.empty((), dtype=torch.bool))
        self.reset_parameters()
        self.keep_own_classes()

    @property
    def initial_concentration(self) -> float:
        """Initial concentration of embeddings and classes."""
        return self.kappa_confidence * (self.embedding_dim - 1) / (1 - self.kappa_confidence**2)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw class directions with the initial concentration; the embedding scale must be initialized from data."""
        super().reset_parameters()
        nn.init.normal_(self.weight)
        self.weight.copy_(self.initial_concentration * F.normalize(self.weight, dim=-1))
        self.embedding_scale.fill_(1.0)
        self.is_initialized.fill_(False)
        self._warned.discard("scale")

    @property
    def needs_data_initialization(self) -> bool:  # type: ignore[override]  # a class attribute of the other heads
        """Whether `initialize_from_data` has not been called yet."""
        return not bool(self.is_initialized)

    @torch.no_grad()
    def initialize_from_data(self, embeddings: Tensor) -> None:
        """Scale embeddings (N, d) to about the initial concentration of the classes.

        Afterwards sqrt(d) times the mean absolute value of a coordinate equals that concentration. For Gaussian
        embeddings the mean concentration is a quarter larger.

        Raises:
            ValueError: If the embeddings are zero or not finite, or so small that the scale is not finite.
        """
        typical = self.upcast(embeddings).abs().mean()
        # The norm of a vector of d coordinates with the same absolute value is sqrt(d) times that value.
        scale = (self.initial_concentration / self.embedding_dim**0.5 / typical).to(self.embedding_scale.dtype)
        if not 0 < scale < math.inf:
            raise ValueError(f"embeddings with a mean absolute value of {typical.item():g} cannot be scaled.")
        self.embedding_scale.copy_(scale)
        self.is_initialized.fill_(True)

    def before_forward(self, seed: int, positions: Tensor) -> None:
        """Determine the samples of the next forward pass in training by `seed` and the `positions` of its examples."""
        super().before_forward(seed, positions)
        self._keys = sampling.keyed_integers(seed, positions)

    def transform(self, embeddings: Tensor) -> Tensor:
        """Scale: (B, d) -> (B, d), direction times concentration, in float32 or better."""
        embeddings = self.upcast_embeddings(embeddings)
        if self.training and not torch.compiler.is_compiling() and "scale" not in self._warned:
            if self.needs_data_initialization:
                self._warn_once(
                    "scale",
                    "is trained without its data-dependent initialization: the concentrations of embeddings may start "
                    "far from the classes. Call hf_sphere.training.initialize_from_data(model, batches) before "
                    "training, as the recipes do.",
                )
            self._warned.add("scale")  # reading the buffer synchronizes the device: once per head
        return self.embedding_scale.to(embeddings.dtype) * embeddings

    def compute_concentration(self, embeddings: Tensor) -> Tensor:
        """Return |z|: (B, d) -> (B,)."""
        return torch.linalg.vector_norm(embeddings, dim=-1)

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Return log-probabilities in eval mode and the logits of the means in training mode: (B, K)."""
        with torch.autocast(embeddings.device.type, enabled=False):
            weight = self.weight.to(embeddings.dtype)
            if self.training or self.prediction == "mean":
                means = means_from_natural_parameters(torch.cat([embeddings, weight]))[0]
                of_embeddings, of_classes = means.split([embeddings.shape[0], weight.shape[0]])
                return self.inverse_temperature() * of_embeddings @ of_classes.T
            of_samples = self._log_softmaxes(embeddings, weight)
            return functools.reduce(torch.logaddexp, of_samples) - math.log(self.num_samples)

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute `mean_s log sum_k C(w_k) / C(w_k + beta s) - beta E[z].E[w_y]` of each example: (B,)."""
        of_means = type(self) is VMFHead and (self.training or self.prediction == "mean")  # a subclass may have others
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.loss_in_blocks(embeddings, labels, *([logits] if of_means else []))

    def loss_in_blocks(self, embeddings: Tensor, labels: Tensor, logits: Tensor | None = None) -> Tensor:
        """Compute the loss of each example from the target logit, by the logits of the means if given: (B,)."""
        exchange, beta = self.exchange(labels), self.inverse_temperature()
        (weight,), local = self.select_classes(exchange.gather(labels))
        keys = exchange.gather(self._take_keys(embeddings)) if self.training else None
        samples = self._draw(exchange.gather(embeddings), keys)
        recompute, own = self.in_blocks or self.is_large(embeddings), local if logits is None else None
        inputs = (*samples, weight.to(embeddings.dtype), exchange.copied(beta), own)
        total, target_weights = log_class_sum(*inputs, recompute=recompute)
        if logits is not None:
            targets = logits.gather(1, labels[:, None]).squeeze(1)
        else:
            of_embeddings, of_classes = means_from_natural_parameters(embeddings, exchange.sum(target_weights))
            targets = beta * (of_embeddings * of_classes).sum(-1)
        return exchange.log_sum(total.T).mean(dim=1) - targets

    def _draw(self, embeddings: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw S samples of each embedding by its key, or by fixed noise without keys: arguments of `log_class_sum`."""
        direction, concentration = _split(embeddings)
        half = (self.num_samples + 1) // 2
        if keys is not None:
            streams = sampling.indices(self.num_samples + half, embeddings.device)[:, None]
            of_cosine, of_tangent = sampling.keyed_integers(keys, streams).split([self.num_samples, half])
            if keys.device.type == "cpu" and not torch.compiler.is_compiling():  # with as few proposals as needed
                cosine, sine = sampling.sample_cosine(
                    concentration.expand_as(of_cosine), self.embedding_dim, keys=of_cosine
                )
                normals = sampling.keyed_normals(of_tangent, self.embedding_dim, embeddings.dtype)
                return direction, cosine, sine, sampling.tangent_directions(direction.detach(), normals)
            noise = sampling.keyed_noise(of_cosine, of_tangent, self.embedding_dim, embeddings.dtype)
        else:
            noise = self._fixed_noise((self.num_samples, 1), embeddings)
        cosine, sine = sampling.cosine_from_noise(concentration, self.embedding_dim, noise)
        normals = noise.normals[:half]
        return direction, cosine, sine, sampling.tangent_directions(direction.detach(), normals)

    def _take_keys(self, embeddings: Tensor) -> Tensor:
        """Return the keys of this forward pass, (B,), those of `before_forward` at most once."""
        keys, self._keys = self._keys, None
        if keys is not None and len(embeddings) == 2 * len(keys):  # examples with two labels
            return keys.repeat(2)
        if keys is None or len(keys) != len(embeddings):  # a model may pass several embeddings per example
            return torch.randint(2**62, embeddings.shape[:1], device=embeddings.device)
        return keys

    def _log_softmaxes(self, embeddings: Tensor, weight: Tensor) -> Iterator[Tensor]:
        """Yield the log-softmax of `beta * x.y` for each of S samples of embeddings and classes: (N, K)."""
        direction, concentration = _split(weight)
        noise = self._fixed_noise((self.num_samples, 1), embeddings)
        samples = self.inverse_temperature() * sampling.points_from_noise(*_split(embeddings), noise)
        # As many samples of the classes at once as are small: all would take the memory of S weight matrices.
        size = sampling.seeds_at_once((self.num_classes,), self.embedding_dim)
        for start in range(0, self.num_samples, size):
            seeds = range(start + 1, min(start + size, self.num_samples) + 1)
            uniforms, normals = self._fixed_noise((self.num_classes,), weight, seeds)
            rows = slice(self.classes.start, self.classes.stop)
            classes = sampling.points_from_noise(
                direction, concentration, sampling.Noise(uniforms[..., rows], normals[:, rows])
            )
            for points, vectors in zip(samples[start : start + size], classes, strict=True):
                logits = points @ vectors.T
                if self.is_sharded:
                    yield logits - log_sum_over_processes(logits.logsumexp(-1, keepdim=True))
                else:
                    yield logits.log_softmax(-1)

    def _fixed_noise(self, shape: tuple[int, ...], like: Tensor, seed: int | range = 0) -> sampling.Noise:
        return sampling.fixed_noise(shape, self.embedding_dim, seed, like.dtype, like.device)


def _split(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions (..., d) and norms (...); vectors up to a norm of 1e-3 are divided by 0.1, which is theirs."""
    # Near zero the mean is z / d at any concentration, so that z / 0.1 has its gradient, with less noise than z / |z|.
    directions, norms = divide_by_norms(vectors, 0.1, 1e-3)
    return directions, norms.squeeze(-1)
