"""Metrics of batches and splits, and initialization of models from data."""

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from hf_sphere.metrics import retrieval_scores
from hf_sphere.nn import Head, PoleRegression
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.nn.processes import count_processes
from hf_sphere.utils.modules import eval_mode, widest_dtype

if TYPE_CHECKING:  # text tasks do not import the dependencies of image tasks
    from hf_sphere.data.batches import FewShotBatches, ImageBatches

_NUMBERS_AT_ONCE = 1 << 24  # maximum number of query-prototype differences computed at once: 64 MB


Batch: TypeAlias = Mapping[str, Tensor]
Measure: TypeAlias = Callable[[Any, Batch], dict[str, Tensor]]
"""Means over a batch, each a scalar tensor, from the model's output and the batch."""


class Batches(Protocol):
    """The interface that the training loop and the evaluation require.

    If the loss averages over something other than examples, such as the tokens of a language model, the class also has
    a method `num_targets(batch)` that returns their number. If processes get several examples at a time in turn, as
    with episodes, it has their number as `dealt_together`.
    """

    def __len__(self) -> int: ...

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, starting with batch `start`."""
        ...


def global_places(together: int, start: int, batch: Batch, accelerator: Accelerator | PartialState) -> Tensor:
    """Return the place of each example of a batch among all of an optimizer step, over all processes: int64, (B,).

    Each process gets `together` examples at a time, in turn; `start` are in earlier batches of the step, on this one.
    """
    local = torch.arange(start, start + count_examples(batch), device=accelerator.device)
    turn = (local // together) * accelerator.num_processes + accelerator.process_index
    return turn * together + local % together


def count_examples(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return len(next(iter(batch.values())))


def loss_is_sum(model: nn.Module) -> bool:
    """Whether a model's loss is the sum over the batch instead of the mean: that of a head, or its `loss_reduction`."""
    for module in model.modules():
        if isinstance(module, (Head, PoleRegression)) and module.reduction == "sum":
            return True
    return getattr(model, "loss_reduction", "mean") == "sum"


def measure_images(output: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the metrics of the predictions that the output of an image model has.

    They are the accuracy, the fraction of images whose largest logit is that of their class; the fraction of images
    that are `rejected` as unknown; and the mean absolute error of a regression, in the unit of the values.
    """
    metrics = {}
    if getattr(output, "logits", None) is not None:  # otherwise the loss may have been computed in blocks of classes
        metrics["accuracy"] = _mean(output.logits.argmax(dim=-1) == batch["labels"])
    if getattr(output, "known", None) is not None:
        metrics["rejected"] = _mean(~output.known)
    if getattr(output, "predictions", None) is not None:
        values = batch.get("regression_labels", batch["labels"])  # beside classes, in joint prediction
        metrics["mean_absolute_error"] = _mean((output.predictions - values).abs())
    return metrics


def measure_tokens(output: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the accuracy: the fraction of target tokens whose logit is the largest."""
    predictions, labels = output.logits.argmax(dim=-1).flatten(), batch["labels"].flatten()
    if len(predictions) < len(labels):  # those of the targets alone, as from ModernBERT with sparse_prediction
        labels = labels[labels >= 0]
    targets = labels >= 0
    right = (predictions == labels) & targets
    return {"accuracy": _mean(right) / _mean(targets)}


def perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexity, the exponential of the mean loss per token."""
    return {"perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}


def _mean(values: Tensor) -> Tensor:
    """Mean in float64 if the device supports it, so that 9,913 of 10,000 is exactly 0.9913."""
    return values.to(widest_dtype(values)).mean()


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Batches, accelerator: Accelerator, measure: Measure = measure_images
) -> dict[str, float]:
    """Evaluate a model on a split, over all processes.

    Args:
        model: A model whose output has a loss; set to eval mode.
        batches: The split.
        accelerator: Sums over the processes.
        measure: Computes the metrics besides the loss.

    Returns:
        Means over all images, or over all target tokens of a text: `loss`, and for instance `accuracy` in [0, 1].

    Example:
        >>> evaluate(model, data.test, Accelerator())["accuracy"]  # doctest: +SKIP
    """
    model.eval()
    sums: Any = Counter()
    is_sum = loss_is_sum(model)
    batch: Batch = {}
    # If class vectors are spread over processes, these must call the model equally often: the last batch is repeated.
    calls = max(gather_object([len(batches)])) if class_shards(model) else len(batches)
    for new in itertools.chain(batches.epoch(), itertools.repeat(None, calls - len(batches))):
        batch = batch if new is None else new
        with accelerator.autocast():  # an averaged model was not prepared by Accelerate
            output = model(**batch)
        count = 0 if new is None else getattr(batches, "num_targets", count_examples)(batch)
        loss = output.loss / max(count, 1) if is_sum else output.loss
        for name, value in {**measure(output, batch), "loss": loss}.items():
            sums[name] += value.to(widest_dtype(accelerator.device)) * count
        sums["count"] += count
    # Gathered by name, since a process without a batch has no metrics.
    totals: Counter[str] = Counter()
    for each in gather_object([dict(zip(sums, map(float, sums.values()), strict=True))]):
        totals.update(each)  # which adds
    count = totals.pop("count")
    return {name: value / count for name, value in totals.items()}


@torch.inference_mode()
def evaluate_retrieval(model: Any, batches: "ImageBatches", accelerator: Accelerator) -> dict[str, float]:
    """Compute retrieval metrics with each image of a split as a query, using the distance of the model's head.

    Args:
        model: An image model with a head; set to eval mode. The classes of the head are not used.
        batches: The split; its labels need not be classes of the head.
        accelerator: Gathers over the processes.

    Returns:
        `recall_at_1`, `r_precision`, `map_at_r` in [0, 1], and the number of images that are the only one of a class.

    Example:
        >>> evaluate_retrieval(model, data.test, Accelerator())["recall_at_1"]  # doctest: +SKIP
    """
    embeddings, labels = _gather(model.eval(), batches, accelerator)
    scores = retrieval_scores(model.head.transform(embeddings), labels, **model.head.metric())
    return {name: float(value) for name, value in scores.items() if name != "num_queries"}


@torch.inference_mode()
def evaluate_frozen(model: Any, batches: "ImageBatches", accelerator: Accelerator) -> dict[str, float]:
    """Compute retrieval metrics of the features of a model's backbone, with the cosine distance; see above."""
    scores = retrieval_scores(*_gather(model.eval(), batches, accelerator, model.base_model.backbone))
    return {name: float(scores[name]) for name in ("recall_at_1", "map_at_r")}


@torch.inference_mode()
def evaluate_few_shot(model: Any, batches: "FewShotBatches", accelerator: Accelerator) -> dict[str, float]:
    """Classify the queries of the episodes of the first epoch, which do not depend on the number of processes.

    In eval mode an embedding does not depend on the episode, so each image is embedded once and the episodes are formed
    from the embeddings.

    Args:
        model: A few-shot model: an encoder as `base_model` and a `classifier` of embeddings; set to eval mode.
        batches: The episodes.
        accelerator: Gathers over the processes.

    Returns:
        Means over the episodes: `accuracy` in [0, 1] and `loss`; `accuracy_interval`, the half-width of the accuracy's
        95 % interval, 1.96 standard errors (NaN for a single episode); and `num_episodes`.

    Example:
        >>> evaluate_few_shot(model, data.test, Accelerator())["accuracy"]  # doctest: +SKIP
    """
    used, episodes = batches.images.episode_indices().unique(return_inverse=True)
    embeddings = _gather_images(model.eval(), batches, used, accelerator)
    numbers = batches.way * batches.query * batches.way * embeddings.shape[1]
    accuracies, loss = [], 0.0
    for some in episodes.split(max(1, _NUMBERS_AT_ONCE // numbers)):
        support, query = batches.divide(embeddings[some.to(embeddings.device)])
        labels = batches.labels(len(some))
        output = model.classifier(query, support, labels)
        accuracies.append((output.logits.argmax(dim=-1) == labels).sum(dim=-1).cpu().double() / labels.shape[1])
        loss += output.loss.item() * len(some)
    accuracy = torch.cat(accuracies)
    return {
        "accuracy": accuracy.mean().item(),
        "accuracy_interval": 1.96 * accuracy.std().item() / len(accuracy) ** 0.5 if len(accuracy) > 1 else math.nan,
        "loss": loss / len(accuracy),
        "num_episodes": len(accuracy),
    }


def _gather_images(model: Any, batches: "FewShotBatches", indices: Tensor, accelerator: Accelerator) -> Tensor:
    """Embed the images at indices (N,) over all processes: (N, d), float32, in the order of the indices."""
    order = torch.arange(len(indices))
    mine = order[accelerator.process_index :: accelerator.num_processes]
    pixels = batches.images.take(indices[mine], batches.eval_batch_size)
    seen = [model.base_model(images).embeddings.float().cpu() for images in pixels]
    # The embedding dimension is unknown on a process without images.
    gathered = gather_object([(mine, torch.cat(seen))] if seen else [])
    positions, embeddings = zip(*gathered, strict=True)
    return torch.cat(embeddings)[torch.cat(positions).argsort()].to(accelerator.device)


def _gather(
    model: Any, batches: "ImageBatches", accelerator: Accelerator, embed: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the embeddings of a split, by default the inputs of the model's head, (N, d), float32, and the labels."""
    embed = embed or (lambda pixels: model.head_inputs(model.base_model(pixels).embeddings))
    seen = [(embed(batch["pixel_values"]).float().cpu(), batch["labels"].cpu()) for batch in batches.epoch()]
    embeddings, labels = zip(*gather_object(seen), strict=True)
    return torch.cat(embeddings).to(accelerator.device), torch.cat(labels).to(accelerator.device)


@torch.inference_mode()
def gather_logits(model: Any, batches: "ImageBatches", accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Return the logits of a split, (N, K), float32, and the labels (N,), over all processes."""
    return _gather(model.eval(), batches, accelerator, lambda pixels: model(pixel_values=pixels).logits)


@torch.no_grad()
def initialize_from_data(
    model: nn.Module, batches: "ImageBatches | Iterable[Batch]", *, max_examples: int = 10_000
) -> None:
    """Initialize the backbone and the head from training images, where they require that.

    The backbone gets images of the first process, and the head embeddings of images of all processes; see
    `Head.initialize_from_data`. They are computed in eval mode, except that trainable batch norms use batch statistics,
    as in the first training step. With several processes, each must call this function.

    Args:
        model: Any module with a `Head`, or an image model of this library. Mode and statistics are restored.
        batches: Training batches of this process; any iterable of mappings with the inputs of the model, on its device.
        max_examples: Maximum number of images, over all processes.

    Raises:
        ValueError: If the forward pass does not use the head.

    Example:
        >>> initialize_from_data(model, data.train)  # doctest: +SKIP
    """
    heads = [head for head in heads_of(model) if head.needs_data_initialization]
    backbone: Any = getattr(getattr(model, "base_model", model), "backbone", None)
    of_backbone = getattr(backbone, "needs_data_initialization", False)
    if not heads and not of_backbone:
        return
    processes = count_processes()
    count = math.ceil(max_examples / processes)
    unaugmented: Any = batches.epoch(augment=False) if hasattr(batches, "epoch") else batches
    if of_backbone:
        pixels = _first(count, (batch["pixel_values"] for batch in unaugmented))
        unaugmented = [{"pixel_values": images} for images in pixels]  # for the head: batches may be readable only once
        backbone.initialize_from_data(torch.cat(pixels)[:count])
        for tensor in backbone.state_dict().values() if processes > 1 else ():
            tensor.copy_(broadcast(tensor))
    for head in heads:
        with eval_mode(model):  # which restores all modes
            # Before training, running statistics do not match the data: with a scale initialized from them, embeddings
            # are much longer in the first training step.
            model.train()
            norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
            kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
            model.eval()
            for norm in norms:
                norm.train()
            try:
                some = torch.cat(_first(count, (inputs_of(head, model, batch) for batch in unaugmented)))[:count]
            finally:
                for buffer, value in kept:
                    buffer.copy_(value)
        head.initialize_from_data(torch.cat(gather_object([some.cpu()])).to(some.device) if processes > 1 else some)


class _ReachedHeadError(Exception):
    """Ends a forward pass before the head, whose logits are not needed."""


def inputs_of(head: Head, model: nn.Module, batch: Batch, forward: Callable[..., Any] | None = None) -> Tensor:
    """Return the embeddings (B, d) that a model passes to its head; its `forward` would run without its hooks."""

    def stop(head: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        raise _ReachedHeadError(positional[0] if positional else named["embeddings"])

    accepted = inspect.signature(model.forward).parameters.values()
    takes_all, names = any(p.kind is p.VAR_KEYWORD for p in accepted), [p.name for p in accepted]
    with head.register_forward_pre_hook(stop, with_kwargs=True):
        try:
            (forward or model)(**{name: value for name, value in batch.items() if takes_all or name in names})
        except _ReachedHeadError as reached:
            return reached.args[0]
    raise ValueError("the model's forward pass does not call its head, so the head cannot be initialized from data.")


def _first(count: int, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the first tensors, until they have `count` rows."""
    first: list[Tensor] = []
    for tensor in tensors:
        first.append(tensor)
        if sum(map(len, first)) >= count:
            break
    return first
