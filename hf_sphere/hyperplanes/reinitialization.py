"""Critical layers of a trained network: its accuracy with one layer at a time reset to an earlier state."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from hf_sphere.hyperplanes import model_state
from hf_sphere.hyperplanes.layers import LayerSelection, filters, find_layers
from hf_sphere.hyperplanes.model_state import evaluate_with, evaluation_mode, named_tensors
from hf_sphere.hyperplanes.results import LayerRobustness, ReinitializationRobustness
from hf_sphere.hyperplanes.weight_files import StoredTensor, open_file, stored_tensors
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.snapshots import Snapshot, find_snapshots

SnapshotLike = Snapshot | str | PathLike | Mapping[str, Tensor] | nn.Module

StoredTensors = Mapping[str, StoredTensor]

_NOT_OBSERVED = (
    "{} cannot be observed, as in a compiled model, so the batch norms that follow it are unknown; let evaluate run "
    "the model that it receives without compiling it, or pass include_batch_norm=False."
)


def open_snapshots(snapshots: Sequence[SnapshotLike]) -> tuple[dict[str, StoredTensors], list[str]]:
    """Return the tensors of the snapshots that exist by label, and the paths of the missing ones.

    The label is the epoch, or the position in the list for entries that are not files. Two with the same label are an
    error, as is a file that is not a snapshot, or an entry of another type.
    """
    if isinstance(snapshots, str | PathLike | Mapping | Snapshot | nn.Module):
        raise TypeError(f"snapshots must be a list, even of one snapshot; got a {type(snapshots).__name__}.")
    opened: list[tuple[str, StoredTensors]] = []
    missing: list[str] = []
    for position, snapshot in enumerate(snapshots):
        if isinstance(snapshot, nn.Module | Mapping):
            state = named_tensors(snapshot) if isinstance(snapshot, nn.Module) else snapshot
            opened.append((str(position), stored_tensors(state)))
        elif isinstance(snapshot, Snapshot | str | PathLike):
            present, absent = find_snapshots([snapshot])
            opened += [(str(one.epoch), open_file(one.path)) for one in present]
            missing += map(str, absent)
        else:
            kind = type(snapshot).__name__
            raise TypeError(f"a snapshot is a Snapshot, a path, a state dict or a module; got a {kind}.")
    labels = [label for label, _ in opened]
    if duplicates := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"several snapshots have the label {', '.join(duplicates)}; give one per epoch.")
    return dict(opened), missing


def check_names(state: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError if names in the state dict do not match the module paths; others would not be replaced."""
    for path, module in modules.items():
        for name in named_tensors(module):
            full = f"{path}.{name}" if path else name
            if full not in state:
                raise ValueError(f"the state dict has no {full}. Pass the model without the wrapper around {path!r}.")


def tensors_of_modules(
    state: Mapping[str, Tensor], label: str, tensors: StoredTensors, paths: Iterable[str]
) -> dict[str, StoredTensor]:
    """Return the tensors of a snapshot for modules and their children, by their names in the state dict.

    A file may store a tensor under the name of another one that is tied to it. One that is missing in the snapshot, or
    has another shape, is an error.
    """
    selected: dict[str, StoredTensor] = {}
    for path in paths:
        for name in state if not path else (name for name in state if name.startswith(f"{path}.")):
            tied = (other for other in tensors if other in state and state[other] is state[name])
            stored = tensors.get(name) or next((tensors[other] for other in tied), None)
            if stored is None or stored.shape != tuple(state[name].shape):
                has = f"has {name} of shape {stored.shape}" if stored else f"has no {name}"
                expected = f"in the layer {path!r} of the model it has the shape {tuple(state[name].shape)}"
                raise ValueError(f"snapshot {label} {has}, but {expected}. Pass snapshots of this architecture.")
            selected[name] = stored
    return selected


def reinitialization_robustness(
    model: nn.Module,
    snapshots: Sequence[SnapshotLike],
    evaluate: Callable[[Any], float],
    *,
    layers: LayerSelection = "all",
    include_1x1: bool = True,
    include_batch_norm: bool = True,
    num_random: int = 0,
    seed: int = 0,
    fresh: Callable[[], nn.Module] | None = None,
    finished: MutableMapping[str, float] | None = None,
    progress: bool = False,
) -> ReinitializationRobustness:
    """Reset one layer at a time to earlier or new random weights, keep the others trained, and measure the accuracy.

    A layer consists of all tensors of its module (weight and bias). The model is unchanged afterwards: the same
    tensors, modes, attributes and hooks, also after an exception.

    Args:
        model: The trained model, any module; on any device, of any dtype.
        snapshots: Snapshots, their paths, state dicts or modules, in order. The label of a snapshot or a path is its
            epoch, other labels are positions in the list. Only the current layer of a file is read.
        evaluate: Runs the model that it receives over its batches and returns the accuracy in [0, 1]. Weights outside
            of modules, in a list for instance, are not replaced.
        layers: Kinds of layers: `conv`, `linear` or `all`.
        include_1x1: Include pointwise (1x1) convolutions.
        include_batch_norm: Reset a batch norm (weights and running statistics) together with the layer whose output is
            its input. Otherwise it keeps its trained state.
        num_random: Number of random initializations per layer.
        seed: Seed of these; the random state of the caller does not change.
        fresh: Builds the model with new random weights; one is kept in memory per initialization. Not needed for a
            model of transformers, which is built from its configuration.
        finished: Known accuracies, under `<layer>@<label>`, `<layer>@random<number>` and `baseline`, which are not
            measured again. New ones are added one by one, so that an interrupted run can resume. The baseline is
            measured again if another accuracy is missing.
        progress: Show a progress bar.

    Returns:
        The accuracies.

    Raises:
        ValueError: If the model has no such layer, or the names of the layer in the state dict do not match its path;
            no snapshot exists and `num_random` is 0; a snapshot is of another architecture; `evaluate` returns no
            accuracy; the batch norms that follow a layer are unknown; or `fresh` is missing.
        TypeError: If a snapshot is none of the above.

    Reference:
        Zhang, Bengio and Singer, "Are All Layers Created Equal?", 2019.

    Example:
        >>> reinitialization_robustness(network, ["epoch-0000.safetensors"], evaluate=accuracy)  # doctest: +SKIP
    """
    modules = find_layers(model, layers, include_1x1)
    for path, module in modules.items():
        filters(module, path)  # raises an error for quantized, sharded and offloaded weights
    if num_random < 0:
        raise ValueError(f"num_random cannot be negative; got {num_random}.")
    by_label, missing = open_snapshots(snapshots)
    if missing:
        warnings.warn(f"{len(missing)} snapshots are missing and skipped: {', '.join(missing)}.", stacklevel=2)
    if not by_label and not num_random:
        raise ValueError("there are no weights to reset the layers to; pass existing snapshots, or num_random.")
    state = named_tensors(model)
    norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    norms = norms if include_batch_norm else {}
    check_names(state, modules | norms)
    for label, tensors in by_label.items():
        tensors_of_modules(state, label, tensors, modules | norms)  # before the first evaluation
    if num_random and fresh is None and not isinstance(model, PreTrainedModel):
        raise ValueError(f"random weights of a {type(model).__name__} need fresh, which builds a new model.")
    build = fresh or (lambda: type(model)(copy.deepcopy(model.config)))
    random_labels = {f"random{index}": index for index in range(num_random)}
    compiled = model_state.compiled_modules(model)
    if norms and (inside := [path for path, module in modules.items() if module in compiled]):
        raise ValueError(_NOT_OBSERVED.format(f"the layer {inside[0]!r}"))

    accuracies = {} if finished is None else finished
    labels = [*by_label, *random_labels]
    remaining = [(layer, label) for layer in modules for label in labels if f"{layer}@{label}" not in accuracies]

    @cache
    def sample(index: int) -> StoredTensors:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(mix_seed(seed, index))
            return stored_tensors(named_tensors(build()))

    def measure(values: Mapping[str, Tensor]) -> float:
        with evaluation_mode(model):
            return _check_accuracy(evaluate_with(model, evaluate, values))

    def replacement(layer: str, label: str, following: Sequence[str]) -> dict[str, Tensor]:
        weights = by_label[label] if label in by_label else sample(random_labels[label])
        stored = tensors_of_modules(state, label, weights, [layer, *following])
        return {name: tensor.read().detach().to(state[name], copy=True) for name, tensor in stored.items()}

    if remaining or "baseline" not in accuracies:
        with progress_bar(total=1 + len(remaining), desc="baseline", disable=not progress) as bar:
            with model_state.observed_batch_norms(model, modules if norms else {}) as following:
                accuracies["baseline"] = measure({})
            if norms and not following:
                raise ValueError(_NOT_OBSERVED.format("every layer"))
            bar.update()
            for layer, label in remaining:
                bar.set_description(f"{layer} of {label}")
                values = replacement(layer, label, following.get(layer, []))
                same = all(torch.equal(value, state[name]) for name, value in values.items())
                accuracies[f"{layer}@{label}"] = accuracies["baseline"] if same else measure(values)
                bar.update()
    results = {}
    for layer in modules:
        random = [accuracies[f"{layer}@{label}"] for label in random_labels]
        results[layer] = LayerRobustness({label: accuracies[f"{layer}@{label}"] for label in by_label}, random)
    return ReinitializationRobustness(accuracies["baseline"], results, missing)


def _check_accuracy(value: Any) -> float:
    try:
        accuracy = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"evaluate must return the accuracy, a number; got a {type(value).__name__}.") from error
    if not 0 <= accuracy <= 1:  # also NaN
        raise ValueError(f"evaluate must return the accuracy as a fraction in [0, 1]; got {accuracy}.")
    return accuracy
