"""Evaluation of image models, and what is measured on data before training."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from hf_sphere.data.batches import ImageBatches
from hf_sphere.training.tasks import Measure, measure_classification


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: ImageBatches, accelerator: Accelerator, measure: Measure = measure_classification
) -> dict[str, float]:
    """Measure a model over all processes' shares of a split.

    Args:
        model: An image model; put into eval mode.
        batches: The split.
        accelerator: Sums over the processes.
        measure: What to measure beside the loss.

    Returns:
        The means over all images, for instance `accuracy` in [0, 1], and `loss`, also that a mean over the images.
    """
    model.eval()
    kind = torch.float32 if accelerator.device.type == "mps" else torch.float64
    sums: dict[str, Any] = {"count": 0}
    for batch in batches.epoch():
        output = model(**batch)
        count = len(batch["labels"])
        loss = output.loss / count if loss_is_sum(model) else output.loss
        for name, value in {**measure(output, batch), "loss": loss}.items():
            sums[name] = sums.get(name, 0) + value.to(kind) * count
        sums["count"] += count
    # As numbers by name: a process without a single image knows no other names.
    shares = gather_object([{name: float(value) for name, value in sums.items()}])
    total = sum(share.pop("count") for share in shares)
    return {name: sum(share.get(name, 0.0) for share in shares) / total for name in max(shares, key=len)}


def loss_is_sum(model: nn.Module) -> bool:
    """Whether a model's loss is the sum over the batch, not the mean."""
    return getattr(model, "loss_reduction", "mean") == "sum"


@torch.no_grad()
def fit_confidence(model: nn.Module, batches: ImageBatches, accelerator: Accelerator) -> None:
    """Fit the confidence of a head that can do that to held-out images, all processes' shares of them."""
    head: Any = getattr(model, "head", None)
    if not hasattr(head, "fit_concentration"):
        return
    any_model: Any = model.eval()
    seen = []
    for batch in batches.epoch():
        embeddings = any_model.base_model(batch["pixel_values"]).embeddings
        seen.append((any_model.head_inputs(embeddings).float().cpu(), batch["labels"].cpu()))
    embeddings, labels = zip(*gather_object(seen), strict=True)
    device = accelerator.device
    head.fit_concentration(torch.cat(embeddings).to(device), torch.cat(labels).to(device))


@torch.no_grad()
def calibrate_head(model: nn.Module, batches: ImageBatches, *, max_examples: int = 10_000) -> None:
    """Show a head that asks for it the embeddings of training images, in eval mode.

    Args:
        model: An image model; with classes it has a `head`. Its training state and its batch-norm statistics
            stay as they are.
        batches: Training batches.
        max_examples: Images to show.
    """
    head: Any = getattr(model, "head", None)
    encoder: Any = model.base_model
    inputs_of: Any = getattr(model, "head_inputs", None)
    if head is None or not head.needs_calibration:
        return
    was_training = model.training
    model.eval()
    embeddings: list[Tensor] = []
    for batch in batches.epoch(augment=False):
        embeddings.append(inputs_of(encoder(batch["pixel_values"]).embeddings))
        if sum(map(len, embeddings)) >= max_examples:
            break
    head.calibrate(torch.cat(embeddings)[:max_examples])
    model.train(was_training)
