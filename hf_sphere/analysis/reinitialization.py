"""Critical layers of a trained network: its accuracy with one layer at a time reset to an earlier state."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from hf_sphere.analysis import model_state, replacements
from hf_sphere.analysis.activation_reuse import ActivationReuse
from hf_sphere.analysis.layers import LayerSelection, filters, find_layers
from hf_sphere.analysis.robustness import LayerRobustness, ReinitializationRobustness

_NOT_OBSERVED = (
    "{} cannot be observed, as in a compiled model, so the batch norms that follow it are unknown; let evaluate run "
    "the model that it receives without compiling it, or pass include_batch_norm=False."
)


def reinitialization_robustness(
    model: nn.Module,
    snapshots: Sequence[replacements.SnapshotLike],
    evaluate: Callable[[Any], float],
    *,
    layers: LayerSelection = "all",
    include_1x1: bool = True,
    include_batch_norm: bool = True,
    num_random: int = 0,
    seed: int = 0,
    fresh: Callable[[], nn.Module] | None = None,
    reuse_activations: bool = True,
    max_cached_bytes: int = 2 * 2**30,
    finished: MutableMapping[str, float] | None = None,
    progress: bool = False,
) -> ReinitializationRobustness:
    """Reset one layer at a time to earlier or new random weights, keep the others trained, and measure the accuracy.

    A layer consists of all tensors of its module (weight and bias). The model is unchanged afterwards: the same
    tensors, modes, attributes and hooks, also after an exception.

    Activations before the layer are reused in each `nn.Sequential` of the model (see
    `hf_sphere.analysis.activation_reuse`), if no attribute or buffer of the model changes when it runs. The accuracies
    equal those of full passes.

    Args:
        model: The trained model, any module; on any device, of any dtype.
        snapshots: Snapshots, their paths, state dicts or modules, in order. The label of a snapshot or a path is its
            epoch, that of the others their position in the list. Only the current layer of a file is read.
        evaluate: Runs the model that it receives over its batches and returns the accuracy in [0, 1]. Weights outside
            of modules, in a list for instance, are not replaced.
        layers: Kinds of layers: `conv`, `linear` or `all`.
        include_1x1: Include pointwise (1x1) convolutions.
        include_batch_norm: Reset a batch norm (weights and running statistics) together with the layer whose output is
            its input. Otherwise it keeps its trained state.
        num_random: Number of random initializations per layer.
        seed: Seed of these; the random state of the caller does not change.
        fresh: Builds the model with new random weights; one is kept in memory per initialization. By default a model
            of transformers is built from its configuration, and other layers are initialized by their
            `reset_parameters`.
        reuse_activations: False runs the complete model in every evaluation.
        max_cached_bytes: Memory for activations, on the device of the model.
        finished: Known accuracies, under `<layer>@<label>`, `<layer>@random<number>` and `baseline`, which are not
            measured again. New ones are added one by one, so that an interrupted run can resume. The baseline is
            measured again if another accuracy is missing.
        progress: Show a progress bar.

    Returns:
        The accuracies.

    Raises:
        ValueError: If the model has no such layer, or the names of the layer in the state dict do not match its path;
            no snapshot exists and `num_random` is 0; a snapshot is of another architecture; `evaluate` returns no
            accuracy; the batch norms that follow a layer are unknown; or a layer can only be initialized by `fresh`,
            which is missing.
        TypeError: If a snapshot is none of the above.

    References:
        Zhang, Bengio and Singer, "Are All Layers Created Equal?", 2019.
    """
    modules = find_layers(model, layers, include_1x1)
    for path, module in modules.items():
        filters(module, path)  # raises an error for quantized, sharded and offloaded weights
    if num_random < 0 or max_cached_bytes < 0:
        raise ValueError(
            f"num_random and max_cached_bytes cannot be negative; got num_random={num_random} and "
            f"max_cached_bytes={max_cached_bytes}."
        )
    found, missing = replacements.open_snapshots(snapshots)
    if missing:
        warnings.warn(f"{len(missing)} snapshots are missing and skipped: {', '.join(missing)}.", stacklevel=2)
    if not found and not num_random:
        raise ValueError("there are no weights to reset the layers to; pass existing snapshots, or num_random.")
    state = model_state.named_tensors(model)
    norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    norms = norms if include_batch_norm else {}
    replacements.check_names(state, modules | norms)
    for label, tensors in found.items():
        replacements.check_architecture(state, label, tensors, modules | norms)
    random = replacements.RandomWeights(model, seed, fresh, modules) if num_random else None
    random_labels = {f"random{number}": number for number in range(num_random)}
    compiled = model_state.compiled_modules(model)
    if norms and (inside := [path for path, module in modules.items() if module in compiled]):
        raise ValueError(_NOT_OBSERVED.format(f"the layer {inside[0]!r}"))

    known = {} if finished is None else finished
    labels = [*found, *random_labels]
    left = [(layer, label) for layer in modules for label in labels if f"{layer}@{label}" not in known]
    reuse = ActivationReuse(model, max_cached_bytes) if reuse_activations else None

    def measure(values: Mapping[str, Tensor], record: bool = False) -> float:
        changed = [state[name] for name in values]
        with model_state.evaluation_mode(model) as is_stateful:
            if reuse is not None:
                reuse.install(changed, record=record)
            accuracy = _check_accuracy(model_state.evaluate_with(model, evaluate, values))
            if reuse is not None and record and is_stateful():
                reuse.clear()
        return accuracy

    def replacement(layer: str, label: str, following: Sequence[str]) -> dict[str, Tensor]:
        paths = [layer, *following]
        names = dict.fromkeys(name for path in paths for name in replacements.tensor_names(state, path))
        weights = found[label] if random is None or label in found else random.sample(random_labels[label], paths)
        return replacements.read_tensors(state, weights, names)

    if left or "baseline" not in known:
        with tqdm(total=1 + len(left), desc="baseline", disable=not progress) as bar:
            with model_state.observed_batch_norms(model, modules if norms else {}) as following:
                known["baseline"] = measure({}, record=bool(left))
            if norms and not following:
                raise ValueError(_NOT_OBSERVED.format("every layer"))
            bar.update()
            for layer, label in left:
                bar.set_description(f"{layer} of {label}")
                values = replacement(layer, label, following.get(layer, []))
                same = all(torch.equal(value, state[name]) for name, value in values.items())
                known[f"{layer}@{label}"] = known["baseline"] if same else measure(values)
                bar.update()
    results = {
        layer: LayerRobustness(
            {label: known[f"{layer}@{label}"] for label in found},
            [known[f"{layer}@{label}"] for label in random_labels],
        )
        for layer in modules
    }
    return ReinitializationRobustness(known["baseline"], results, missing)


def _check_accuracy(value: Any) -> float:
    try:
        accuracy = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"evaluate must return the accuracy, a number; got a {type(value).__name__}.") from error
    if not 0 <= accuracy <= 1:  # also NaN
        raise ValueError(f"evaluate must return the accuracy as a fraction in [0, 1]; got {accuracy}.")
    return accuracy
