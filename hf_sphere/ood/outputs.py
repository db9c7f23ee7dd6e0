"""Embeddings and logits of any classifier."""

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_sphere.geometry.checks import check_embeddings, check_labels, check_scores
from hf_sphere.utils.modules import eval_mode, unwrap
from hf_sphere.utils.problem_types import problem_type, why_no_accuracy

logger = logging.getLogger(__name__)


class Outputs(NamedTuple):
    """What a classifier computes for N inputs, and their labels; None for what is not known.

    Attributes:
        embeddings: (N, d), the input of the last layer.
        logits: (N, K).
        labels: (N,), any integers; scores that are fitted to classes refuse negative ones, such as -100 for none.
        concentrations: (N,), of models that compute one: those with the head `vmf` or `adaface`.
        ids: (N,), integers that identify the inputs, for instance their rows in one dataset: inputs with the same
            number are the same, and others are not, even if their values are equal.
    """

    embeddings: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None
    concentrations: Tensor | None = None
    ids: Tensor | None = None

    def checked(self) -> "Outputs":
        """Return the outputs in float64 on the CPU; a wrong shape or a value that is not finite is a `ValueError`."""
        fields: dict[str, Tensor] = {name: values for name, values in self._asdict().items() if values is not None}
        for name in fields.keys() - {"labels", "ids"}:
            is_flat = name == "concentrations"
            checked = check_scores(name, fields[name]) if is_flat else check_embeddings(fields[name], what=name)
            fields[name] = checked.cpu().double()
        numbers = {name: len(values) for name, values in fields.items() if name not in ("labels", "ids")}
        if len({*numbers.values()}) > 1:
            lengths = ", ".join(f"{number} {name}" for name, number in numbers.items())
            raise ValueError(f"the numbers of rows must be equal; got {lengths}.")
        count = next(iter(numbers.values()), len(next(iter(fields.values()), ())))
        for name in fields.keys() & {"labels", "ids"}:
            fields[name] = check_labels(fields[name], count, name).cpu()
        return Outputs(**fields)

    def require(self, needs: Sequence[str], score: str) -> None:
        """Raise a ValueError if a field that a score needs is missing."""
        if missing := [name for name in needs if getattr(self, name) is None]:
            hint = " A score such as energy needs none." if "labels" in missing else ""
            raise ValueError(f"the score {score} needs {' and '.join(missing)}, which the data do not have.{hint}")


@torch.no_grad()
def model_outputs(model: nn.Module | str | os.PathLike, batches: Any) -> Outputs:
    """Compute embeddings and logits of a classifier of timm, transformers or this library, in eval mode.

    The embeddings are the input of the linear layer or 1 x 1 convolution that computes the logits, or of the head of a
    model of this library, before they are normalized. If there is no such layer, they are None, with a warning.

    Args:
        model: Returns logits (B, K), or an output with `logits`; or the name of an image classifier, `timm:<name>` too.
        batches: Such as a `DataLoader`. A batch is a mapping of the model's inputs, possibly with `labels` or `label`,
            whose other keys are ignored; a tensor of inputs; or a pair of inputs and labels. A tensor or mapping
            instead of batches is a single batch. A folder or dataset by name, or paths of images, are prepared as the
            model needs them, see `like` of `load_image_split`; names of classes become labels if the model has them.

    Returns:
        The outputs, float32 or better, on the CPU; labels if all batches have them.

    Raises:
        ValueError: If there is no batch, a batch does not fit the model, the preprocessing of the model is unknown, an
            image is damaged, or the model has only some of the names of classes.
        OSError: If a model or dataset is named that cannot be loaded.

    Example:
        >>> model_outputs(network, images.split(4)).embeddings.shape
        torch.Size([8, 64])
    """
    if isinstance(model, str | os.PathLike):
        from hf_sphere.utils.model_sources import load_classifier

        loaded = load_classifier(os.fspath(model)).model
        return model_outputs(loaded.to("cuda" if torch.cuda.is_available() else "cpu"), batches)
    model = unwrap(model)  # for the hooks
    weight = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    paths, names = batches if isinstance(batches, list | tuple) else [batches], None
    if paths and all(isinstance(path, str | os.PathLike) for path in paths):
        from hf_sphere.data import ImageSourceOptions, load_image_split
        from hf_sphere.search import ImageSource

        source = ImageSource.of(batches)
        options: Any = {"dataset": source.encoded, "like": model, "device": weight.device, "progress": False}
        images, names = load_image_split(ImageSourceOptions(), "train", **options).batches, source.labels
        batches = (batch["pixel_values"].to(weight.dtype) for batch in images)
    elif isinstance(batches, Tensor | Mapping):
        batches = [batches]
    head, calls, collected = getattr(model, "head", None) if hasattr(model, "head_inputs") else None, [], []

    def remember(layer: nn.Module, inputs: Any, output: Any) -> None:
        if head is not None or output.ndim == 2 or output.shape[2:] == (1, 1):  # others would take much memory
            calls.append((inputs[0].flatten(1), output))

    layers = [head] if head is not None else [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    with eval_mode(model), ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_hook(remember))
        for batch in batches.epoch() if hasattr(batches, "epoch") else batches:
            inputs, labels = _split(batch, weight.device, model)
            if isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels):
                labels = class_indices(model, labels)
            calls.clear()
            output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
            logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
            logits = output.get("logits") if isinstance(output, Mapping) else logits
            last = [c for c in calls if head is not None or torch.equal(c[1].flatten(1).to(logits.dtype), logits)][-1:]
            embeddings, of_head = last[0] if last else (None, None)
            collected.append((embeddings, logits, labels, getattr(of_head, "concentration", None)))
    if not collected:
        raise ValueError("batches is empty; an iterator can be used only once.")
    outputs = Outputs(*map(_joined, zip(*collected, strict=True)))
    if reason := why_no_accuracy(problem_type(model)):
        logger.warning(f"Scores of logits are left out: {reason}.")
        outputs = outputs._replace(logits=None)
    if names is not None:
        outputs = outputs._replace(labels=class_indices(model, names))
    if outputs.embeddings is None:
        what = "returns its logits, so its embeddings are unknown. Use a score of logits, or pass embeddings."
        logger.warning(f"No linear layer of {type(model).__name__} {what}")
    return outputs


def _split(batch: Any, device: torch.device, model: nn.Module) -> tuple[Any, Any]:
    """Return the inputs of a batch on the device, and its labels."""
    if not isinstance(batch, Mapping):
        several = batch if isinstance(batch, (tuple, list)) else [batch]
        if not isinstance(several[0], Tensor):
            raise ValueError(f"batches must have tensors, or mappings of these; got {type(several[0]).__name__}.")
        return several[0].to(device), several[1] if len(several) > 1 else None
    labels = batch.get("labels", batch.get("label"))
    values = {k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor) and "label" not in k}
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # of PEFT
    parameters = inspect.signature(inner.forward).parameters
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    inputs = {p.name: values[p.name] for p in named if p.name in values}
    if inputs and all(p.name in inputs or p.default is not p.empty for p in named):
        return inputs, labels
    main = {"pixel_values"} & {*values} or {*values}
    arrays = {name: value for name, value in values.items() if name in main and value.ndim > 1}  # no index
    if not named or len(arrays) == 1:
        return arrays if not named else next(iter(arrays.values())), labels
    takes = f"{type(model).__name__} takes {', '.join(parameters)}"
    raise ValueError(
        f"the {takes}, but one of the batches has {', '.join(values) or 'no tensors'}; name the inputs so."
    )


def class_indices(model: nn.Module | None, names: Sequence[str]) -> Tensor | None:
    """Return the indices of the model's classes with these names; None if it has none, an error if it has some."""
    label2id: dict[str, int] = getattr(getattr(model, "config", None), "label2id", None) or {}
    unknown = {*names} - {*label2id}
    if unknown and unknown != {*names}:
        raise ValueError(f"the model has a class {min({*names} - unknown)!r}, but none {min(unknown)!r}; rename it.")
    return torch.tensor([label2id[name] for name in names]) if names and not unknown else None


def _joined(values: tuple[Tensor | None, ...]) -> Tensor | None:
    if any(value is None for value in values):
        return None
    joined = torch.cat([torch.as_tensor(value).cpu() for value in values])
    return joined.float() if joined.dtype in (torch.float16, torch.bfloat16) else joined
