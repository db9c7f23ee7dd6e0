"""Evaluation of image classifiers, and what is measured on data before training."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_sphere.data.batches import ImageBatches


@torch.inference_mode()
def evaluate_classification(model: nn.Module, batches: ImageBatches, accelerator: Accelerator) -> dict[str, float]:
    """Measure accuracy and mean loss of a classifier over all processes' shares of a split.

    Args:
        model: An image classifier; put into eval mode.
        batches: The split.
        accelerator: Sums over the processes.

    Returns:
        `accuracy` in [0, 1] and `loss`.
    """
    model.eval()
    kind = torch.float32 if accelerator.device.type == "mps" else torch.float64
    sums = torch.zeros(3, dtype=kind, device=accelerator.device)
    for batch in batches.epoch():
        output = model(**batch)
        count = len(batch["labels"])
        sums[0] += count_correct(output.logits, batch["labels"])
        sums[1] += output.loss * count
        sums[2] += count
    correct, loss, count = accelerator.reduce(sums, "sum").tolist()
    return {"accuracy": correct / count, "loss": loss / count}


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of rows of logits (B, K) whose largest entry is the label's (B,)."""
    return (logits.argmax(dim=-1) == labels).sum()


@torch.no_grad()
def calibrate_head(model: nn.Module, batches: ImageBatches, *, max_examples: int = 10_000) -> None:
    """Show a head that asks for it the embeddings of training images, in eval mode.

    Args:
        model: A model with `head` and `base_model`. Its training state and its batch-norm statistics stay as they are.
        batches: Training batches.
        max_examples: Images to show.
    """
    head: Any = model.head
    encoder: Any = model.base_model
    if not head.needs_calibration:
        return
    was_training = model.training
    model.eval()
    embeddings: list[Tensor] = []
    for batch in batches.epoch(augment=False):
        embeddings.append(encoder(batch["pixel_values"]).embeddings)
        if sum(map(len, embeddings)) >= max_examples:
            break
    head.calibrate(torch.cat(embeddings)[:max_examples])
    model.train(was_training)
