"""Embedding a split with a saved model: what the recipes share that write embeddings and that look at them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import AutoConfig

from hf_sphere.data import ImageBatches
from hf_sphere.embeddings.store import Columns
from hf_sphere.models import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionImageProcessor,
    SphereVisionModel,
)

MODELS = {
    "SphereVisionForImageClassification": SphereVisionForImageClassification,
    "SphereVisionModel": SphereVisionModel,
    "SphereVisionForFewShotClassification": SphereVisionModel,  # its encoder: episodes have no part in embeddings
}
"""What embeds images, by the name of the class that was saved."""


def load_embedder(name: str) -> Any:
    """Load a classifier or an encoder, whichever was saved; of a few-shot model its encoder.

    Args:
        name: Folder, or id on the Hub.

    Raises:
        ValueError: If it is a model of another kind.
    """
    config = AutoConfig.from_pretrained(name)
    if not isinstance(config, SphereVisionConfig):
        raise ValueError(f"{name} is a model of type {config.model_type}; this recipe embeds images by sphere_vision.")
    built = (config.architectures or ["model of an unknown class"])[0]
    if built not in MODELS:
        raise ValueError(f"{name} is a {built}; this recipe takes a {' or a '.join(MODELS)}.")
    return MODELS[built].from_pretrained(name)


def class_names_of(model: Any) -> list[str]:
    """Names of the classes that a model predicts, by index; none without a head."""
    labels = model.config.id2label
    return [labels[index] for index in range(len(labels))] if hasattr(model, "head") else []


def find_preparation(
    name: str, config: SphereVisionConfig, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> dict[str, Any]:
    """Find out how a model wants its images: from its image processor, or from its configuration and what is given.

    The configuration knows the size but not the statistics, and guessed ones would make other embeddings.

    Args:
        name: Folder of the model, or id on the Hub.
        config: Its configuration.
        mean: Mean a channel, for a model without image processor.
        std: Standard deviation a channel, likewise.

    Returns:
        Fields of `hf_sphere.data.ImageDataOptions`: image_size, num_channels, image_mean and image_std.

    Raises:
        ValueError: If mean and deviation are neither in the processor nor given, or in both.
    """
    given = [option for option, values in (("image_mean", mean), ("image_std", std)) if values is not None]
    try:
        processor = SphereVisionImageProcessor.from_pretrained(name)
    except OSError as error:
        if len(given) < 2:
            raise ValueError(
                f"{name} has no image processor that says how images are normalised. Give --image_mean and "
                "--image_std of its training images."
            ) from error
        size, channels = list(config.input_size), config.num_channels
        return {"image_size": size, "num_channels": channels, "image_mean": mean, "image_std": std}
    if given:
        raise ValueError(f"{name} has an image processor that says --{given[0]}; leave it out.")
    return {
        "image_size": [processor.size["height"], processor.size["width"]],
        "num_channels": processor.num_channels,
        "image_mean": processor.image_mean,
        "image_std": processor.image_std,
    }


@torch.inference_mode()
def embed(model: Any, batches: ImageBatches, accelerator: Accelerator, *, labelled: bool = True) -> Iterator[Columns]:
    """Yield the columns of each batch of this process, as `hf_sphere.embeddings.store` describes them.

    Args:
        model: A model that `load_embedder` gives, in eval mode.
        batches: The split.
        accelerator: Precision of the model.
        labelled: Whether the labels of the batches are classes.

    Raises:
        ValueError: If something is not finite.
    """
    rows = batches.epoch_rows().split(batches.batch_size)
    for batch, index in zip(batches.epoch(), rows, strict=True):
        with accelerator.autocast():
            output = model(pixel_values=batch["pixel_values"])
        columns = {"embedding": output.embeddings.float().cpu()}
        if labelled:
            columns["label"] = batch["labels"].cpu()
        if "logits" in output:
            logits = output.logits.float().cpu()
            confidence, prediction = logits.softmax(-1).max(-1)
            columns |= {"prediction": prediction, "confidence": confidence, "logits": logits}
        if output.get("concentration") is not None:
            columns["concentration"] = output.concentration.float().cpu()
        _check_finite(columns, index)
        yield {**columns, "index": index}


def in_order(own: Iterator[Columns], batches: ImageBatches) -> Iterator[Columns]:
    """Yield the rows of all processes in the order of the split, on each process, one batch of each at a time.

    Processes have every n-th image, so their batches of one number make a piece of the split without gaps.
    """
    longest = math.ceil(batches.num_examples / batches.num_processes)
    for _ in range(math.ceil(longest / batches.batch_size)):
        parts = [part for part in gather_object([next(own, None)]) if part is not None]
        order = torch.cat([part["index"] for part in parts]).argsort()
        yield {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _check_finite(columns: Columns, index: Tensor) -> None:
    """Refuse what is not a number: it would spoil every measure later."""
    for name, values in columns.items():
        wrong = ~values.isfinite().reshape(len(index), -1).all(-1)
        if wrong.any():
            raise ValueError(
                f"{name} of image {int(index[wrong][0])} is not finite. Is the model a trained one? With "
                "--mixed_precision fp16 values may be too large: try bf16, or no."
            )
