"""Which layers a trained network needs: accuracy with one layer at a time put back to what it was in training."""

import warnings
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from hf_sphere.analysis.activation_reuse import ActivationReuse
from hf_sphere.analysis.layers import LayerSelection, filters, find_layers
from hf_sphere.analysis.replacements import (
    FreshWeights,
    SnapshotLike,
    Weights,
    check_architecture,
    check_names,
    open_snapshots,
    read_for,
    tensor_names,
)
from hf_sphere.analysis.robustness import LayerRobustness, ReinitializationRobustness
from hf_sphere.analysis.swapping import (
    compiled_modules,
    evaluation_mode,
    left_as_it_was,
    named_tensors,
    observed_batch_norms,
    swapped_tensors,
)

Column = Callable[[Sequence[str]], Weights]
"""Where the weights of a column of the table come from, given the paths of the modules that they are for."""

_UNSEEN = (
    "evaluate runs {} of the model where it cannot be seen which batch norms take their output (compiled?); let it run "
    "the model that it is given, not compiled, or pass include_batch_norm=False."
)


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
    reuse_activations: bool = True,
    max_cached_bytes: int = 2 * 2**30,
    finished: MutableMapping[str, float] | None = None,
    progress: bool = False,
) -> ReinitializationRobustness:
    """Put each layer alone back to earlier or fresh weights, leave the rest trained, and measure the accuracy.

    A layer is its weights and bias, all that its module holds. What the model computes before the layer is computed
    once and used again for each of its cells, where a trial on a few examples proves that this is right; elsewhere
    (a connection past the layer, weights that are used twice) the next outer module is tried, then the whole model
    runs. The model is left as it was, the same tensors and attributes in the same places, also after an exception.
    Trials take time: of a deep model and few images the table may be had sooner with `reuse_activations=False`.

    Args:
        model: The trained model, any module; on any device, of any dtype.
        snapshots: Snapshots, their paths, state dicts or modules, in order. A snapshot and a path are called by the
            epoch, the others by their place in the list. Of a file only the layer at hand is read.
        evaluate: Runs the model that it is given over its batches and returns the accuracy in [0, 1]. The batches and
            their order must be the same each time. It may use only what the model returns: hooks see, and attributes
            keep, nothing of the modules that do not run again. Weights that are kept outside of modules, in a list for
            instance, are not put back.
        layers: Which layers: `conv`, `linear` or `all`.
        include_1x1: Also convolutions whose kernel is one point.
        include_batch_norm: A batch norm that takes the very output of a layer goes with the layer: its weights and its
            running statistics. Without it they remain those of the trained layer.
        num_random: Number of fresh random draws a layer.
        seed: Of these draws; the caller's random state is not touched.
        fresh: Builds the model with new random weights; one is held in memory for each draw. By default a model of
            transformers is built from its configuration, and layers of others draw by their `reset_parameters`.
        reuse_activations: False lets the whole model run for each cell.
        max_cached_bytes: Room for what is computed once, on the model's device.
        finished: Accuracies that are known already, by `<layer>@<label>`, `<layer>@random<draw>` and `baseline`; they
            are not computed again, and new ones are put in one by one, so that a run can stop and go on. The baseline
            is measured again if any other is left to measure.
        progress: Show a bar.

    Returns:
        The accuracies.

    Raises:
        ValueError: If the model has no such layer, or under other names in its state dict, no snapshot is there and
            nothing is drawn, a snapshot is of another architecture, `evaluate` returns no share, or where activations
            are reused gives the model other inputs than the first time, it cannot be seen which batch norms go with a
            layer, or a layer can only be drawn by `fresh` and that is not given.
        TypeError: If a snapshot is none of the above.

    Reference:
        Zhang, Bengio and Singer, "Are All Layers Created Equal?", 2019.
    """
    modules = find_layers(model, layers, include_1x1)
    for path, module in modules.items():
        filters(module, path)  # refuses what is quantised, sharded, or not there
    if num_random < 0 or max_cached_bytes < 0:
        raise ValueError(
            f"num_random and max_cached_bytes cannot be negative; got num_random={num_random} and "
            f"max_cached_bytes={max_cached_bytes}."
        )
    found, missing = open_snapshots(snapshots)
    if missing:
        warnings.warn(f"{len(missing)} snapshots are missing and left out: {', '.join(missing)}.", stacklevel=2)
    if not found and not num_random:
        raise ValueError("there is nothing to put into the layers; give snapshots that are there, or num_random.")
    state = named_tensors(model)
    norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    norms = norms if include_batch_norm else {}
    check_names(state, modules | norms)
    for weights in found:
        check_architecture(state, weights, modules | norms)
    draw_labels = [f"random{number}" for number in range(num_random)]
    columns: dict[str, Column] = {weights.label: partial(_same, weights) for weights in found}
    if num_random:
        draws = FreshWeights(model, seed, fresh, modules)
        columns |= {label: partial(draws.draw, number) for number, label in enumerate(draw_labels)}
    known = {} if finished is None else finished
    left = {layer: [label for label in columns if f"{layer}@{label}" not in known] for layer in modules}
    left = {layer: labels for layer, labels in left.items() if labels}
    observed = modules if norms else {}
    compiled = {inner for outer in compiled_modules(model) for inner in outer.modules()}
    if unseen := [path for path, module in observed.items() if module in compiled]:
        raise ValueError(_UNSEEN.format(f"the layer {unseen[0]!r}"))

    def paths(layer: str) -> list[str]:
        return [layer, *seen.get(layer, [])]

    def names(layer: str) -> list[str]:
        return list(dict.fromkeys(name for path in paths(layer) for name in tensor_names(state, path)))

    def measure(model: nn.Module) -> float:
        with left_as_it_was(model):  # so that no cell depends on those before it
            return _check_accuracy(evaluate(model))

    reuse = ActivationReuse(model, measure, list(left), names, max_cached_bytes, reuse_activations)
    if left or "baseline" not in known:
        num_cells = 1 + sum(map(len, left.values()))
        bar = tqdm(total=num_cells, desc="untouched model", disable=not progress)
        with bar, evaluation_mode(model):
            with observed_batch_norms(model, observed) as seen:
                known["baseline"] = reuse.baseline()
            if observed and not seen:
                raise ValueError(_UNSEEN.format("no layer"))
            bar.update()
            for layer in reuse.layers:
                reuse.enter(layer, len(left[layer]))
                for label in left[layer]:
                    bar.set_description(f"{layer} of {label}")
                    values = read_for(state, columns[label](paths(layer)), names(layer))
                    if all(torch.equal(value, state[name]) for name, value in values.items()):
                        accuracy = known["baseline"]
                    else:
                        with swapped_tensors(model, values):
                            accuracy = reuse.evaluate(layer)
                    known[f"{layer}@{label}"] = accuracy
                    bar.update()
    results = {
        layer: LayerRobustness(
            {weights.label: known[f"{layer}@{weights.label}"] for weights in found},
            [known[f"{layer}@{label}"] for label in draw_labels],
        )
        for layer in modules
    }
    return ReinitializationRobustness(known["baseline"], results, missing)


def _check_accuracy(value: Any) -> float:
    try:
        accuracy = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"evaluate must return the accuracy, a number; got a {type(value).__name__}.") from error
    if not 0 <= accuracy <= 1:  # NaN is not either
        raise ValueError(f"evaluate must return the accuracy as a share in [0, 1]; got {accuracy}.")
    return accuracy


def _same(weights: Weights, paths: Sequence[str]) -> Weights:
    return weights
