"""Critical layers of a trained network: its accuracy with one layer at a time reset to an earlier state."""

import contextlib
import copy
import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from hf_sphere.hyperplanes.layers import LayerSelection, Source, StoredTensor, find_layers, open_tensors
from hf_sphere.utils.checks import check_not_text
from hf_sphere.utils.files import write_json
from hf_sphere.utils.modules import eval_mode
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.snapshots import Snapshot, read_snapshot

logger = logging.getLogger(__name__)

COLUMNS = 10  # of the printed table; those in the middle are left out

StoredTensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class LayerRobustness:
    """Accuracies with one layer reset to other weights.

    Attributes:
        snapshots: Accuracies with the weights of each snapshot, by its label (epoch or position in the list), in the
            order of the list.
        random: Accuracies with each random initialization.
    """

    snapshots: dict[str, float] = field(default_factory=dict)
    random: list[float] = field(default_factory=list)

    @property
    def random_mean(self) -> float | None:
        """Mean over the random initializations, None without any."""
        return statistics.fmean(self.random) if self.random else None

    @property
    def random_deviation(self) -> float | None:
        """Sample standard deviation over the random initializations, None for fewer than two."""
        return statistics.stdev(self.random) if len(self.random) > 1 else None


@dataclass(frozen=True)
class ReinitializationRobustness:
    """Accuracies with each layer reset in turn; prints as a table.

    Attributes:
        accuracy: Accuracy of the trained model.
        layers: Accuracies by layer path, in the order in which the model defines the layers.
    """

    accuracy: float
    layers: dict[str, LayerRobustness]

    def critical_layers(self, drop: float = 0.05) -> list[str]:
        """Return the layers whose reset reduces the accuracy by more than `drop`, the largest loss first.

        A layer is reset to the first snapshot or, without snapshots, to random weights; their mean accuracy is used.
        """
        resets = {name: next(iter(one.snapshots.values()), one.random_mean) for name, one in self.layers.items()}
        losses = {name: self.accuracy - reset for name, reset in resets.items() if reset is not None}
        return sorted((name for name, loss in losses.items() if loss > drop + 1e-9), key=lambda name: -losses[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the accuracies, with mean and deviation of the random ones, as JSON-compatible values."""
        layers = {}
        for name, layer in self.layers.items():
            random = {"mean": layer.random_mean, "deviation": layer.random_deviation, "values": layer.random}
            layers[name] = {"snapshots": layer.snapshots, "random": random if layer.random else None}
        return {"accuracy": self.accuracy, "layers": layers}

    def save(self, path: str | PathLike) -> None:
        """Write a JSON file."""
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        return self.table()

    def table(self, drop: float = 0.05) -> str:
        """Return a line per layer, a column per snapshot, and the names of the `critical_layers(drop)`."""
        names, rows = {path: path or "(the model)" for path in self.layers}, dict[str, dict[str, float | None]]()
        for path, layer in self.layers.items():
            random = {"random": layer.random_mean, "±": layer.random_deviation} if layer.random else {}
            rows[names[path]] = {**layer.snapshots, **random}
        frame = DataFrame.from_dict(rows, orient="index", dtype=float).dropna(axis=1, how="all")
        lines = [f"accuracy of the trained model: {self.accuracy:.4f}"]
        lines.append(frame.to_string(max_cols=COLUMNS, na_rep="", float_format="{:.4f}".format))
        critical, labels = self.critical_layers(drop), [*next(iter(self.layers.values())).snapshots]
        reset = f"snapshot {labels[0]}" if labels else "random weights"
        lists = {
            f"lose more than {drop:g} when reset to {reset} (critical)": [names[path] for path in critical],
            f"lose at most {drop:g}": [names[path] for path in self.layers if path not in critical],
        }
        return "\n".join([*lines, *(f"{what}: {', '.join(listed) or 'none'}" for what, listed in lists.items())])


def reinitialization_robustness(
    model: nn.Module,
    snapshots: Sequence[Source],
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

    A layer consists of all tensors of its module (weight and bias). They are overwritten and restored: the model has
    the same tensors, values, modes and hooks afterwards, also after an exception.

    Args:
        model: The trained model, any module; on any device, of any dtype.
        snapshots: Snapshots, their paths, state dicts or modules, in order. The label of a snapshot or a path is its
            epoch, other labels are positions in the list. Only the current layer of a file is read.
        evaluate: Runs the model over its batches and returns the accuracy in [0, 1].
        layers: Kinds of layers: `conv`, `linear` or `all`.
        include_1x1: Include pointwise (1x1) convolutions.
        include_batch_norm: Reset a batch norm (weights and running statistics) together with the layer that is defined
            directly before it in the same module. Otherwise it keeps its trained state.
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
        FileNotFoundError: If there is no such snapshot.
        ValueError: If the model has no such layer; there is no snapshot and `num_random` is 0; a snapshot is of another
            architecture; `evaluate` returns no fraction; or `fresh` is missing.

    Reference:
        Zhang, Bengio and Singer, "Are All Layers Created Equal?", 2019.

    Example:
        >>> reinitialization_robustness(network, ["epoch-0000.safetensors"], evaluate=accuracy)  # doctest: +SKIP
    """
    check_not_text("snapshots", snapshots)
    modules = find_layers(model, layers, include_1x1)
    if not snapshots and not num_random:
        raise ValueError("there are no weights to reset the layers to; pass snapshots, or num_random.")
    state = named_tensors(model)
    norms = following_batch_norms(model, modules) if include_batch_norm else {}
    of_layers = following_batch_norms(model, dict(model.named_modules())).values()
    alone = [path for path, part in model.named_modules() if isinstance(part, _BatchNorm) and path not in of_layers]
    if alone and include_batch_norm:
        text = "%d batch norm(s), such as %s, do not directly follow a layer of their size, and keep their state."
        logger.warning(text, len(alone), alone[0])
    resettable = modules | {path: model.get_submodule(path) for path in norms.values()}
    paths = {path: [f"{path}.{name}" if path else name for name in named_tensors(m)] for path, m in resettable.items()}

    def select(label: str, tensors: StoredTensors) -> StoredTensors:
        """Return the tensors of layers by their names in the model; those of tied ones may have others."""
        selected: dict[str, StoredTensor] = {}
        for name in itertools.chain.from_iterable(paths.values()):
            value = state[name]
            tied = [other for other in (name, *state) if other in tensors and state[other] is value]
            if not tied or tensors[tied[0]].shape != tuple(value.shape):
                has = f"{name} of shape {tensors[tied[0]].shape}" if tied else f"no {name}"
                what = f"snapshot {label} has {has}, but the model has it of shape {tuple(value.shape)}"
                raise ValueError(f"{what}. Pass snapshots of this architecture.")
            selected[name] = tensors[tied[0]]
        return selected

    by_label: dict[str, StoredTensors] = {}
    for position, snapshot in enumerate(snapshots):
        source: Any = named_tensors(snapshot) if isinstance(snapshot, nn.Module) else snapshot
        if not isinstance(source, Mapping | Snapshot):
            source = read_snapshot(source)
        label = str(source.epoch if isinstance(source, Snapshot) else position)
        if label in by_label:
            raise ValueError(f"several snapshots have the label {label}; give one per epoch.")
        by_label[label] = select(label, open_tensors(source))
    if num_random and fresh is None and not isinstance(model, PreTrainedModel):
        raise ValueError(f"random weights of a {type(model).__name__} need fresh, which builds a new model.")
    build = fresh or (lambda: type(model)(copy.deepcopy(model.config)))
    random_labels = [f"random{index}" for index in range(num_random)]
    accuracies = {} if finished is None else finished
    labels = [*by_label, *random_labels]
    remaining = [(layer, label) for layer in modules for label in labels if f"{layer}@{label}" not in accuracies]

    @cache
    def sample(label: str) -> StoredTensors:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(mix_seed(seed, random_labels.index(label)))
            return select(label, open_tensors(build().state_dict(keep_vars=True)))

    def measure(values: Mapping[str, Tensor]) -> float:
        with with_values(model, values), torch.no_grad():
            accuracy = float(evaluate(model))
        if not 0 <= accuracy <= 1:  # also NaN
            raise ValueError(f"evaluate must return the accuracy as a fraction in [0, 1]; got {accuracy}.")
        return accuracy

    if remaining or "baseline" not in accuracies:
        with progress_bar(total=1 + len(remaining), desc="baseline", disable=not progress) as bar:
            accuracies["baseline"] = measure({})
            bar.update()
            for layer, label in remaining:
                bar.set_description(f"{layer} of {label}")
                changed = [name for path in {layer, norms.get(layer, layer)} for name in paths[path]]
                weights = by_label[label] if label in by_label else sample(label)
                values = {name: weights[name].read().detach().to(state[name]) for name in changed}
                same = all(torch.equal(value, state[name]) for name, value in values.items())
                accuracies[f"{layer}@{label}"] = accuracies["baseline"] if same else measure(values)
                bar.update()
    results = {}
    for layer in modules:
        random = [accuracies[f"{layer}@{label}"] for label in random_labels]
        results[layer] = LayerRobustness({label: accuracies[f"{layer}@{label}"] for label in by_label}, random)
    return ReinitializationRobustness(accuracies["baseline"], results)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model (not copies) by all their names in its state dict."""
    return {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


@contextlib.contextmanager
def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put a model into eval mode with other values in some tensors; modes, values and buffers are restored."""
    state = named_tensors(model)
    tensors = [*(state[name] for name in values), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with eval_mode(model):
            with torch.no_grad():
                for name, value in values.items():
                    state[name].copy_(value)
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def following_batch_norms(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return by layer the batch norm of its size that is defined directly after it in the same module, as paths."""
    found: dict[str, str] = {}
    previous = ""
    for path, module in model.named_modules():
        layer, together = layers.get(previous), path.rpartition(".")[0] == previous.rpartition(".")[0]
        size = getattr(layer, "out_channels", getattr(layer, "out_features", None))
        if together and isinstance(module, _BatchNorm) and module.num_features == size:
            found[previous] = path
        if not isinstance(module, nn.Identity):
            previous = path
    return found
