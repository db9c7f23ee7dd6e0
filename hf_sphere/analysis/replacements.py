"""Other weights for the layers of a model: those of snapshots, and fresh random ones."""

import contextlib
import copy
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hf_sphere.analysis.swapping import named_tensors
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.snapshots import Snapshot, find_snapshots

SnapshotLike = Snapshot | str | PathLike | Mapping[str, Tensor] | nn.Module


@dataclass(frozen=True)
class Weights:
    """The weights of a snapshot, read one by one.

    Attributes:
        label: Its epoch, or its place in the list.
        source: A safetensors file, or a state dict.
    """

    label: str
    source: Path | Mapping[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that there is."""
        if isinstance(self.source, Path):
            with safe_open(self.source, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return {name: tuple(value.shape) for name, value in self.source.items() if isinstance(value, Tensor)}

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Read some tensors and no others."""
        if isinstance(self.source, Path):
            with safe_open(self.source, framework="pt") as file:
                return [file.get_tensor(name) for name in names]
        return [self.source[name] for name in names]


def open_snapshots(snapshots: Sequence[SnapshotLike]) -> tuple[list[Weights], list[str]]:
    """Find out what snapshots there are.

    Returns:
        Those that are there, in order, and the paths of those that are not.

    Raises:
        ValueError: If a file is no snapshot, or two have the same epoch.
        TypeError: If an entry is nothing of what a snapshot can be.
    """
    if isinstance(snapshots, str | PathLike | Mapping | Snapshot | nn.Module):
        raise TypeError(f"snapshots must be a list, also of one; got a {type(snapshots).__name__}.")
    found: list[Weights] = []
    missing: list[str] = []
    for place, snapshot in enumerate(snapshots):
        if isinstance(snapshot, nn.Module):
            found.append(Weights(str(place), named_tensors(snapshot)))
        elif isinstance(snapshot, Mapping):
            found.append(Weights(str(place), snapshot))
        elif isinstance(snapshot, Snapshot | str | PathLike):
            present, absent = find_snapshots([snapshot])
            found += [Weights(str(one.epoch), one.path) for one in present]
            missing += map(str, absent)
        else:
            raise TypeError(
                f"a snapshot is a Snapshot, a path, a state dict or a module; got a {type(snapshot).__name__}."
            )
    labels = [weights.label for weights in found]
    if len(set(labels)) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"several snapshots are called {', '.join(twice)}; give one of each epoch.")
    return found, missing


def tensor_names(state: Mapping[str, Tensor], path: str) -> list[str]:
    """Return the names of what a module and its children hold, whatever its weights are parametrised by."""
    prefix = f"{path}." if path else ""
    return [name for name in state if name.startswith(prefix)]


def check_names(state: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose tensors go by other names, so that none of them would be replaced.

    Args:
        state: The model's tensors by their names.
        modules: Modules of it by their paths.

    Raises:
        ValueError: If a tensor of a module is not to be found under the module's path.
    """
    for path, module in modules.items():
        for name in named_tensors(module):
            full = f"{path}.{name}" if path else name
            if full not in state:
                raise ValueError(
                    f"the state dict of the model has no {full}, for something around the module {path!r} changes the "
                    "names in it (a wrapper for activation checkpointing?). Give the model without it."
                )


def read_for(state: Mapping[str, Tensor], weights: Weights, names: Sequence[str]) -> dict[str, Tensor]:
    """Read tensors for a model, of its dtype and on its device; copies, so that the snapshot stays what it is."""
    shapes = weights.shapes()
    stored = [_stored_name(state, shapes, name) or name for name in names]
    values = weights.read(stored)
    return {name: value.detach().to(state[name], copy=True) for name, value in zip(names, values, strict=True)}


def check_architecture(state: Mapping[str, Tensor], weights: Weights, paths: Iterable[str]) -> None:
    """Refuse weights of another architecture.

    Args:
        state: The model's tensors by their names.
        weights: Those of a snapshot.
        paths: Paths of the modules that the weights are for.

    Raises:
        ValueError: If a tensor of these modules is missing, or has another shape.
    """
    shapes = weights.shapes()
    source = f" ({weights.source})" if isinstance(weights.source, Path) else ""
    for path in paths:
        for name in tensor_names(state, path):
            stored = _stored_name(state, shapes, name)
            if stored is None or shapes[stored] != tuple(state[name].shape):
                has = f"has {name} of shape {shapes[stored]}" if stored else f"has no {name}"
                raise ValueError(
                    f"snapshot {weights.label}{source} {has}, where the layer {path!r} of the model has the shape "
                    f"{tuple(state[name].shape)}. Give snapshots of this architecture."
                )


def _stored_name(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str) -> str | None:
    """Tell under which name a tensor is stored: a file holds tied tensors once."""
    if name in shapes:
        return name
    return next((other for other in shapes if other in state and state[other] is state[name]), None)


class FreshWeights:
    """Draws random weights as a model has them before it is trained; the caller's random state stays as it is.

    Args:
        model: The model.
        seed: Seed of all draws.
        build: Builds the model with new random weights. By default a model of transformers is built from its
            configuration, and the layers of others are drawn by their own `reset_parameters`.
        layers: The layers to draw.

    Raises:
        ValueError: If a layer cannot be drawn without `build`.
    """

    def __init__(
        self, model: nn.Module, seed: int, build: Callable[[], nn.Module] | None, layers: Mapping[str, nn.Module]
    ) -> None:
        self._model = model
        self._seed = seed
        transformers = sys.modules.get("transformers.modeling_utils")
        if build is None and transformers is not None and isinstance(model, transformers.PreTrainedModel):
            build = partial(_build_anew, model)
        self._build = build
        self._built: dict[int, Weights] = {}  # one whole model a draw
        if build is None:
            for path, module in layers.items():
                if not callable(getattr(module, "reset_parameters", None)) or self._keeps_weights(path, module):
                    raise ValueError(
                        f"the layer {path!r}, a {type(module).__name__}, cannot draw its weights anew by itself; pass "
                        "fresh, a function that builds the model with new random weights."
                    )

    def draw(self, number: int, paths: Sequence[str]) -> Weights:
        """Draw the weights of some modules, the same for the same seed, number and paths."""
        if self._build is None:
            state = {}
            for path in paths:
                module = self._reset(path, self._model.get_submodule(path), number)
                state.update({f"{path}.{name}" if path else name: v for name, v in named_tensors(module).items()})
            return Weights(f"random{number}", state)
        if number not in self._built:
            with _seeded(self._seed, number):
                weights = Weights(f"random{number}", named_tensors(self._build()))
            self._built[number] = weights
        check_architecture(named_tensors(self._model), self._built[number], paths)
        return self._built[number]

    def _reset(self, path: str, module: Any, number: int) -> nn.Module:
        module = copy.deepcopy(module)
        with _seeded(self._seed, number, zlib.crc32(path.encode())):
            module.reset_parameters()
        return module

    def _keeps_weights(self, path: str, module: nn.Module) -> bool:
        """Tell whether new weights do not get to the parameters, as where they are parametrised."""
        new, old = named_tensors(self._reset(path, module, 0)), named_tensors(module)
        return any(tensor.ndim > 1 and torch.equal(new[name], tensor) for name, tensor in old.items())


@contextlib.contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(mix_seed(*numbers))
        yield


def _build_anew(model: Any) -> nn.Module:
    return type(model)(copy.deepcopy(model.config))
