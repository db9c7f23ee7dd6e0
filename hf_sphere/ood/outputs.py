"""Embeddings and logits of any classifier."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_sphere.metrics.checks import check_embeddings, check_labels, check_scores
from hf_sphere.utils.modes import eval_mode


class Outputs(NamedTuple):
    """What a classifier computes for N inputs, and their labels; None for what is not known.

    Attributes:
        embeddings: (N, d), the input of the last layer.
        logits: (N, K).
        labels: (N,), integers of any range.
        concentrations: (N,), of models that compute one: those with the head `vmf` or `adaface`.
    """

    embeddings: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None
    concentrations: Tensor | None = None

    def checked(self) -> "Outputs":
        """Return them in float64 on the CPU.

        Raises:
            ValueError: If there is nothing, a shape is wrong, or a value is not finite.
            TypeError: If the labels are not integers, or other values are complex.
        """
        embeddings, logits = (
            None if values is None else check_embeddings(values, what=name).cpu().double()
            for name, values in (("embeddings", self.embeddings), ("logits", self.logits))
        )
        rows = embeddings if logits is None else logits
        if rows is None:
            raise ValueError("embeddings or logits must be given; got neither.")
        labels = None if self.labels is None else check_labels(self.labels, len(rows)).cpu()
        concentrations = None if self.concentrations is None else check_scores("concentrations", self.concentrations)
        for name, values in (("embeddings", embeddings), ("concentrations", concentrations)):
            if values is not None and len(values) != len(rows):
                raise ValueError(f"got {len(values)} {name} for {len(rows)} inputs; their numbers must be equal.")
        return Outputs(embeddings, logits, labels, concentrations)


@torch.no_grad()
def model_outputs(model: nn.Module, batches: Iterable[Any]) -> Outputs:
    """Compute embeddings and logits of a classifier of timm, transformers or this library, in eval mode.

    The embeddings are the input of the linear layer that computes the logits, or of the head of a model of this
    library, before they are normalized.

    Args:
        model: Returns logits (B, K), or an output with `logits`.
        batches: Such as a `DataLoader`. A batch is a mapping of the model's inputs, possibly with `labels` or `label`;
            a tensor of inputs; or a pair of inputs and labels.

    Returns:
        The outputs, float32 or better, on the CPU; labels if all batches have them.

    Raises:
        ValueError: If there is no batch, or no layer whose output is the logits.
    """
    heads: list[Any] = [model.head] if hasattr(model, "head_inputs") else []
    calls: list[tuple[Tensor, Any]] = []

    def remember(layer: nn.Module, inputs: Any, output: Any) -> None:
        if heads or output.ndim == 2:  # not the layers applied to all tokens, which would take much memory
            calls.append((inputs[0], output))

    layers = heads or [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(remember) for layer in layers]
    parts: list[tuple[Tensor | None, ...]] = []
    try:
        with eval_mode(model):
            for batch in batches.epoch() if hasattr(batches, "epoch") else batches:
                inputs, labels = _split(batch, next(model.parameters()).device)
                calls.clear()
                output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
                logits = output if isinstance(output, Tensor) else output["logits"]
                found = [call for call in calls if heads or _same(call[1], logits)]
                if not found:
                    raise ValueError(
                        f"no linear layer of {type(model).__name__} returns its logits, so its embeddings are not "
                        "known. Compute them, and use `fit_embeddings` and `score_embeddings`."
                    )
                embeddings, returned = found[-1]
                parts.append((embeddings, logits, labels, getattr(returned, "concentration", None)))
    finally:
        for handle in handles:
            handle.remove()
    if not parts:
        raise ValueError("batches is empty; an iterator can be used only once.")
    return Outputs(*map(_joined, zip(*parts, strict=True)))


def _split(batch: Any, device: torch.device) -> tuple[Any, Tensor | None]:
    """Return the inputs of a batch on the device, and its labels."""
    if isinstance(batch, Mapping):
        inputs = {name: value.to(device) for name, value in batch.items() if "label" not in name}
        return inputs, batch.get("labels", batch.get("label"))
    several = batch if isinstance(batch, (tuple, list)) else [batch]
    return several[0].to(device), several[1] if len(several) > 1 else None


def _same(output: Tensor, logits: Tensor) -> bool:
    return output.shape == logits.shape and torch.equal(output.to(logits.dtype), logits)


def _joined(values: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [torch.as_tensor(value).cpu() for value in values if value is not None]
    if len(known) < len(values):
        return None
    joined = torch.cat(known)
    return joined.to(torch.promote_types(joined.dtype, torch.float32)) if joined.is_floating_point() else joined
