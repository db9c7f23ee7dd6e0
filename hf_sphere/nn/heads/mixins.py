"""Base classes for heads with class vectors, a temperature, or running statistics."""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import is_batched
from hf_sphere.geometry.sampling import keyed_uniforms
from hf_sphere.nn.class_softmax import own_rows, sum_over_other_classes
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.labels import require
from hf_sphere.nn.layers import read_scalar, register_scalar
from hf_sphere.nn.processes import Exchange, count_processes, share_of
from hf_sphere.utils.checks import check_choice, check_number

MANY_LOGITS = 2**24
"""Logits of a batch above which a loss with `blockwise="auto"` is computed in blocks of classes."""


class ClassVectorHead(Head):
    """Base class of heads with weights for each class and a cross-entropy loss, for any number of classes.

    With any of the three options set, the loss is computed in blocks of classes, and in training the output has no
    logits: a batch of 1,024 and a million classes would need 4 GB for them, and as much for their gradient. Examples
    then have one class each.

    Args:
        blockwise: Whether to compute the loss in blocks of classes. It is the same up to rounding. `auto` for those of
            `hf_sphere.losses`, if a batch has more than `MANY_LOGITS` logits; the output of a head keeps its logits.
        shard_classes: Whether each process of the default group holds the weights of only a part of the classes. The
            group must exist when the head is built, all processes must call the head at the same time, and each gets
            the loss of its own examples. `DistributedDataParallel` must not average these weights: the models of this
            library exclude them; for another one, see `exclude_class_shards`.
        sample_rate: Expected fraction of the classes, in (0, 1], in the sum over the classes of a training step: those
            of the batch, and others at random.
        **options: See `Head`.

    Raises:
        ValueError: If there are fewer classes than processes, or the sample rate is out of range.

    Reference:
        An et al., "Partial FC: training 10 million identities on a single machine", ICCV workshops 2021.
    """

    class_parameters: tuple[str, ...] = ("weight",)
    normalizes_classes: ClassVar[bool] = False
    """Whether class vectors are normalized."""
    logits_per_class: int = 1
    """Logits that the loss of an example computes per class, such as the number of samples or sub-centers."""

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        blockwise: bool | Literal["auto"] = "auto",
        shard_classes: bool = False,
        sample_rate: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        if shard_classes and num_classes < count_processes():
            raise ValueError(f"{num_classes} classes cannot be spread over {count_processes()} processes; use fewer.")
        self.shard_classes = shard_classes
        self.classes = range(num_classes)
        """The classes whose weights are on this process."""
        self.sample_rate = check_number("sample_rate", sample_rate, "(0, 1]")
        self.blockwise = check_choice("blockwise", blockwise, (True, False, "auto"))
        self.in_blocks = blockwise is True or shard_classes or sample_rate < 1.0
        self._seed: int | None = None

    def is_large(self, embeddings: Tensor) -> bool:
        """Whether `blockwise` is `auto` and embeddings (B, d) have so many logits that blocks are used if possible."""
        logits = len(embeddings) * self.num_classes * self.logits_per_class
        return self.blockwise == "auto" and logits > MANY_LOGITS

    def omits_logits(self, embeddings: Tensor, labels: Tensor, needs_logits: bool) -> bool:
        """See `Head.omits_logits`; that of `auto` requires what blocks support."""
        if self.in_blocks:
            return self.training or not needs_logits
        if needs_logits or labels.ndim > 1 or not self.is_large(embeddings) or torch.compiler.is_compiling():
            return False
        if not type(self).__module__.startswith("hf_sphere."):  # a subclass elsewhere may have other logits
            return False
        return not (is_batched(embeddings) or is_batched(self._read_parameters()[0]))

    @property
    def is_sharded(self) -> bool:
        """Whether the class vectors are on several processes."""
        return len(self.classes) < self.num_classes

    def keep_own_classes(self) -> None:
        """Reduce the parameters to the classes of this process, if `shard_classes` is set.

        Constructors call it last. A model that `from_pretrained` builds without data calls it after loading.
        """
        for name in self.class_parameters if self.shard_classes else ():
            module, _, attribute = name.rpartition(".")
            parameter = self.get_parameter(name)
            if not parameter.is_meta and len(parameter) == self.num_classes:
                self.classes = share_of(self.num_classes)
                rows = parameter.detach()[self.classes.start : self.classes.stop].clone()
                kept: Any = nn.Parameter(rows, parameter.requires_grad)
                kept._is_hf_initialized = True  # transformers would initialize it as if it were all classes
                setattr(self.get_submodule(module), attribute, kept)

    def exchange(self, batch: Tensor) -> Exchange:
        """Return the exchange between processes for a batch whose first axis is that of the examples."""
        if self.shard_classes and self.classes != share_of(self.num_classes):
            raise RuntimeError("a head with shard_classes was built before the process group; create the group first.")
        return Exchange(batch, shared=self.shard_classes)

    def before_forward(self, seed: int, positions: Tensor) -> None:
        """Determine the sampled classes of the next forward pass in training by `seed`."""
        super().before_forward(seed, positions)
        self._seed = seed

    def check_labels(self, labels: Tensor) -> None:
        """Raise an error also for labels of several classes per example if the loss is computed in blocks."""
        if self.in_blocks and labels.ndim != 1:
            raise ValueError("blockwise, shard_classes and sample_rate need one class per example; leave them out.")
        super().check_labels(labels)

    def logit_inputs(self, embeddings: Tensor) -> Tensor:
        """Map transformed embeddings (B, d) to those whose products with class vectors or directions are the logits."""
        return self.upcast(embeddings)

    def target_logits(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        """Compute the logits (B,) for the vectors (B, d) of the own classes, without bias and with a margin, if any."""
        return (self.logit_inputs(embeddings) * weights).sum(-1)

    def loss_in_blocks(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each example without the logits of all classes: (B,)."""
        exchange = self.exchange(labels)
        parameters, local = self.select_classes(exchange.gather(labels))
        bias = parameters[1] if len(parameters) > 1 else None
        inputs = self.logit_inputs(embeddings)
        sums = {"normalize": self.normalizes_classes, "sum_logits": self.label_smoothing > 0}
        others, total, targets = sum_over_other_classes(exchange.gather(inputs), parameters[0], bias, local, **sums)
        targets = exchange.sum(targets)
        targets = F.normalize(targets, dim=-1) if self.normalizes_classes else targets
        if targets.ndim == 3:  # the best center
            best = (targets * inputs[:, None]).sum(-1).argmax(1)
            targets = targets[torch.arange(len(targets), device=targets.device), best]
        target = self.target_logits(embeddings, targets)
        if bias is not None:
            target = target + exchange.sum(own_rows(bias, local).to(target.dtype))
        loss = -F.logsigmoid(target - exchange.log_sum(others))
        if total is None:
            return loss
        return loss + self.label_smoothing * (target - (exchange.sum(total) + target) / self.num_classes)

    def _read_parameters(self) -> list[Tensor]:  # not `get_parameter`: plain tensors in the copies of `DataParallel`
        return [attrgetter(name)(self) for name in self.class_parameters]

    def select_classes(self, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the class parameters of a step, and the rows of labels (B,) in them; outside for other processes.

        In training with a `sample_rate` below 1, the classes are sampled. The sample is a function of the seed of
        `before_forward`, thus the same on any number of processes.
        """
        parameters = self._read_parameters()
        start, count = self.classes.start, len(self.classes)
        local = labels - start if start else labels
        if self.sample_rate == 1.0 or not self.training:
            return parameters, local
        if self.label_smoothing:  # checked here, since a Trainer can set it
            raise ValueError(f"sample_rate {self.sample_rate} excludes label smoothing; leave out one of them.")
        seed, self._seed = self._seed, None
        kept = _draw_classes(seed, self.classes, self.sample_rate, labels.device)
        inside = (local >= 0) & (local < count)
        kept[local[inside]] = True
        rows = kept.cumsum(0) - 1
        return [parameter[kept] for parameter in parameters], torch.where(inside, rows[local.clamp(0, count - 1)], -1)

    def _losses(self, embeddings: Tensor, logits: Tensor | None, labels: Tensor) -> Tensor:
        if not self.in_blocks and logits is not None:
            return super()._losses(embeddings, logits, labels)
        # An invalid label would be a class that no process has.
        require(((labels >= 0) & (labels < self.num_classes)).all(), "labels must be indices of the classes.")
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.loss_in_blocks(embeddings, labels)

    def _predict(self, embeddings: Tensor) -> Tensor:
        """Compute the logits; those of classes on other processes are added by them."""
        if not self.is_sharded:
            return self.compute_logits(embeddings)
        if self.training and torch.is_grad_enabled():
            raise ValueError("a head with shard_classes has no logits in training; pass labels for its loss.")
        exchange = self.exchange(embeddings)
        others = (self.classes.start, self.num_classes - self.classes.stop)
        return exchange.sum(F.pad(self.compute_logits(exchange.gather(embeddings)), others))


@torch.compiler.disable  # inductor's integers do not wrap around
def _draw_classes(seed: int | None, classes: range, sample_rate: float, device: torch.device) -> Tensor:
    """Return which of the classes are drawn, at least one: (K,)."""
    key = torch.tensor(int(torch.randint(2**62, ())) if seed is None else seed % 2**63, device=device)
    indices = torch.arange(classes.start, classes.stop, device=device)
    drawn = keyed_uniforms(key, indices, torch.float32)
    return (drawn < sample_rate) | (drawn == drawn.min())


def class_shards(model: nn.Module) -> dict[str, ClassVectorHead]:
    """Return the head of each parameter that has only the classes of this process, by parameter name."""
    return {
        f"{name}.{parameter}".removeprefix("."): head
        for name, head in model.named_modules()
        if isinstance(head, ClassVectorHead) and head.shard_classes
        for parameter in head.class_parameters
    }


def exclude_class_shards(model: nn.Module) -> None:
    """Exclude the class vectors of this process from the averages of `DistributedDataParallel(model)`.

    Their gradients are already those of the mean loss over processes.
    """
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(class_shards(model)))


INITIAL_LOG_TEMPERATURE = -2.773
"""Default initial value of a learned temperature: a scale of 16, which is the largest possible logit."""


class TemperatureHead(Head):
    """Base class of heads whose bounded logits are multiplied by a scale, the inverse of a temperature.

    The scale is learned by default, through the logarithm of the temperature.

    Args:
        log_temperature: Initial logarithm of a learned temperature, so that the initial scale is exp(-log_temperature);
            if None, that of `default_scale`, or -2.773, a scale of 16.
        scale: A positive number for a fixed scale; `learned` for a learned one; `default_scale` if None. To learn it
            from another initial value, set `log_temperature = -log(scale)` instead.
        temperature_lr: Learning rate of a learned `log_temperature`; that of the other parameters if None. The recipes
            and `SphereTrainer` train it without weight decay and, with SGD, without momentum; the stock Trainer trains
            it like any other parameter.
        **options: See `Head`.

    Raises:
        ValueError: If both `log_temperature` and `scale` are given, a fixed scale has a learning rate, or a value is
            out of range.
    """

    log_temperature: Tensor
    default_scale: ClassVar[float | None] = None
    """Fixed scale if neither `scale` nor `log_temperature` is given; None for a learned one."""

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        log_temperature: float | None = None,
        scale: float | Literal["learned"] | None = None,
        temperature_lr: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        if log_temperature is not None and scale is not None:
            raise ValueError(f"log_temperature {log_temperature} and scale {scale!r} are exclusive; set only one.")
        if scale is None:
            scale = "learned" if log_temperature is not None else self.default_scale or "learned"
        if temperature_lr is not None:
            check_number("temperature_lr", temperature_lr, "[0, inf)")
        self.scale, self.temperature_lr = scale, temperature_lr
        if scale != "learned":
            log_temperature = -math.log(check_number("scale, if not 'learned',", scale, "(0, inf)"))
        elif log_temperature is None:
            log_temperature = -math.log(self.default_scale) if self.default_scale else INITIAL_LOG_TEMPERATURE
        self.initial_log_temperature = float(log_temperature)
        register_scalar(self, "log_temperature", self.initial_log_temperature, scale == "learned")
        if scale != "learned" and temperature_lr is not None:
            raise ValueError(f"temperature_lr {temperature_lr} needs a learned scale, but scale {scale} is fixed.")

    def reset_parameters(self) -> None:
        """Set the temperature to its initial value."""
        nn.init.constant_(self.log_temperature, self.initial_log_temperature)

    def inverse_temperature(self) -> Tensor:
        """Return the scale `exp(-log_temperature)`, a scalar of float32 or better."""
        return read_scalar(self, "log_temperature", self.initial_log_temperature).neg().exp()

    def parameter_options(self) -> dict[str, Mapping[str, Any]]:
        """A learned temperature has its own learning rate and, with SGD, no momentum."""
        options = dict(super().parameter_options())
        if isinstance(self.log_temperature, nn.Parameter):
            lr = {} if self.temperature_lr is None else {"lr": self.temperature_lr}
            options["log_temperature"] = {"momentum": 0.0, **lr}
        return options


class RunningStatistics:
    """Mixin of heads with running statistics, updated once per optimizer step from the sums of `measure`.

    In a loop that does not call `before_forward` and `after_step`, each process makes an update per batch. The mixin
    comes before `Head` among the base classes.
    """

    _sums: Tensor | None = None  # no buffer: those of the first process would be copied to the others

    measure: Callable[[Tensor, Tensor], Tensor]
    """Return three sums over the examples of transformed embeddings (B, d') without the label -100: (3,)."""
    update_statistics: Callable[[Tensor], None]
    """Update the statistics from the sums of `measure` over all examples of an optimizer step."""

    @torch.no_grad()
    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Update the statistics, or only their sums if `after_step` will follow."""
        if not torch.compiler.is_compiling() and is_batched(embeddings):
            return
        measured = self.measure(embeddings.detach(), labels)
        if self._sums is None:
            self.update_statistics(measured)
        else:
            self._sums = self._sums + measured

    def division_advice(self) -> str:
        """Return what to do where no `after_step` follows, so that every batch updates the statistics."""
        advice = "every part updates its running statistics. Use SphereTrainer, or add SphereCallback to the Trainer."
        return advice if self._sums is None else ""

    def before_forward(self, seed: int, positions: Tensor) -> None:
        """Accumulate sums until `after_step`."""
        super().before_forward(seed, positions)  # type: ignore[misc]  # that of `Head`
        if self._sums is None:
            self._sums = torch.zeros(3, device=positions.device)

    @torch.no_grad()
    def after_step(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Update the statistics from all batches since the last optimizer step."""
        if self._sums is not None:
            self.update_statistics(reduce(self._sums))
            self._sums = None
