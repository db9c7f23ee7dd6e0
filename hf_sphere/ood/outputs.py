"""Embeddings and logits of any classifier."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_sphere.metrics.checks import check_embeddings, check_labels, check_scores
from hf_sphere.ood.scores import UNFITTED
from hf_sphere.utils.modules import eval_mode

LOGITS_ONLY = ", ".join(name for name, score in UNFITTED.items() if score.needs == ("logits",))


class Outputs(NamedTuple):
    """What a classifier computes for N inputs, and their labels; None for what is not known.

    Attributes:
        embeddings: (N, d), the input of the last layer.
        logits: (N, K).
        labels: (N,), any integers.
        concentrations: (N,), of models that compute one: those with the head `vmf` or `adaface`.
        ids: (N,), integers that identify the inputs, for instance their rows in one dataset: inputs with the same
            number are the same, and others are not, even if their values are equal.
    """

    embeddings: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None
    concentrations: Tensor | None = None
    ids: Tensor | None = None

    def checked(self, needs: Sequence[str] = (), score: str = "") -> "Outputs":
        """Return the outputs in float64 on the CPU.

        Raises:
            ValueError: If a field that a score needs is missing, a shape is wrong, or a value is not finite.
        """
        if missing := [name for name in needs if getattr(self, name) is None]:
            hint = f" The scores {LOGITS_ONLY} need none." if "embeddings" in missing else ""
            raise ValueError(f"the score {score} needs {' and '.join(missing)}, which the data do not have.{hint}")
        fields = {name: values for name, values in self._asdict().items() if values is not None}
        if len({len(values) for values in fields.values()}) > 1:
            lengths = ", ".join(f"{len(values)} {name}" for name, values in fields.items())
            raise ValueError(f"the numbers of rows must be equal; got {lengths}.")
        for name, values in fields.items():
            if name in ("labels", "ids"):
                fields[name] = check_labels(values, len(values)).cpu()
            elif name == "concentrations":
                fields[name] = check_scores(name, values)
            else:
                fields[name] = check_embeddings(values, what=name).cpu().double()
        return Outputs(**fields)


@torch.no_grad()
def model_outputs(model: nn.Module, batches: Iterable[Any]) -> Outputs:
    """Compute embeddings and logits of a classifier of timm, transformers or this library, in eval mode.

    The embeddings are the input of the linear layer or 1 x 1 convolution that computes the logits, or of the head of a
    model of this library, before they are normalized. If there is no such layer, they are None, with a warning.

    Args:
        model: Returns logits (B, K), or an output with `logits`.
        batches: Such as a `DataLoader`. A batch is a mapping of the model's inputs, possibly with `labels` or `label`;
            a tensor of inputs; or a pair of inputs and labels. A tensor instead of batches is a single batch.

    Returns:
        The outputs, float32 or better, on the CPU; labels if all batches have them.

    Raises:
        ValueError: If there is no batch.

    Example:
        >>> model_outputs(network, images.split(4)).embeddings.shape
        torch.Size([8, 64])
    """
    batches = [batches] if isinstance(batches, Tensor) else batches
    head, calls, collected = getattr(model, "head", None) if hasattr(model, "head_inputs") else None, [], []

    def remember(layer: nn.Module, inputs: Any, output: Any) -> None:
        if head is not None or output.ndim == 2 or output.shape[2:] == (1, 1):  # others would take much memory
            calls.append((inputs[0].flatten(1), output))

    layers = [head] if head is not None else [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [layer.register_forward_hook(remember) for layer in layers]
    try:
        with eval_mode(model):
            for batch in batches.epoch() if hasattr(batches, "epoch") else batches:
                inputs, labels = _split(batch, next(model.parameters()).device)
                calls.clear()
                output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
                logits = output if isinstance(output, Tensor) else output["logits"]
                found = [c for c in calls if head is not None or torch.equal(c[1].flatten(1).to(logits.dtype), logits)]
                embeddings, last = found[-1] if found else (None, None)
                collected.append((embeddings, logits, labels, getattr(last, "concentration", None)))
    finally:
        for handle in handles:
            handle.remove()
    if not collected:
        raise ValueError("batches is empty; an iterator can be used only once.")
    outputs = Outputs(*map(_joined, zip(*collected, strict=True)))
    if outputs.embeddings is None:
        logging.getLogger(__name__).warning(
            f"No linear layer of {type(model).__name__} returns its logits, so its embeddings are unknown. The scores "
            f"{LOGITS_ONLY} need none. For others, pass embeddings to `fit_embeddings` and `score_embeddings`."
        )
    return outputs


def _split(batch: Any, device: torch.device) -> tuple[Any, Tensor | None]:
    """Return the inputs of a batch on the device, and its labels."""
    if isinstance(batch, Mapping):
        inputs = {name: value.to(device) for name, value in batch.items() if "label" not in name}
        return inputs, batch.get("labels", batch.get("label"))
    several = batch if isinstance(batch, (tuple, list)) else [batch]
    return several[0].to(device), several[1] if len(several) > 1 else None


def _joined(values: tuple[Tensor | None, ...]) -> Tensor | None:
    if any(value is None for value in values):
        return None
    joined = torch.cat([torch.as_tensor(value).cpu() for value in values])
    return joined.float() if joined.dtype in (torch.float16, torch.bfloat16) else joined
