"""Replacement weights for the layers of a model: those of snapshots, and new random ones."""

import contextlib
import copy
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.analysis.model_state import named_tensors
from hf_sphere.analysis.weight_files import StoredTensor, open_file, stored_tensors
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.snapshots import Snapshot, find_snapshots

SnapshotLike = Snapshot | str | PathLike | Mapping[str, Tensor] | nn.Module

StoredTensors = Mapping[str, StoredTensor]


def open_snapshots(snapshots: Sequence[SnapshotLike]) -> tuple[dict[str, StoredTensors], list[str]]:
    """Find the snapshots that exist.

    Returns:
        Their tensors by label, which is the epoch, or the position in the list for entries that are not files; and the
        paths of the missing ones.

    Raises:
        ValueError: If a file is not a snapshot, or two have the same epoch.
        TypeError: If an entry has another type.
    """
    if isinstance(snapshots, str | PathLike | Mapping | Snapshot | nn.Module):
        raise TypeError(f"snapshots must be a list, even of one snapshot; got a {type(snapshots).__name__}.")
    found: list[tuple[str, StoredTensors]] = []
    missing: list[str] = []
    for position, snapshot in enumerate(snapshots):
        if isinstance(snapshot, nn.Module):
            found.append((str(position), stored_tensors(named_tensors(snapshot))))
        elif isinstance(snapshot, Mapping):
            found.append((str(position), stored_tensors(snapshot)))
        elif isinstance(snapshot, Snapshot | str | PathLike):
            present, absent = find_snapshots([snapshot])
            found += [(str(one.epoch), open_file(one.path)) for one in present]
            missing += map(str, absent)
        else:
            raise TypeError(
                f"a snapshot is a Snapshot, a path, a state dict or a module; got a {type(snapshot).__name__}."
            )
    refuse_duplicates([label for label, _ in found])
    return dict(found), missing


def refuse_duplicates(labels: Sequence[str | int]) -> None:
    """Raise ValueError if two snapshots have the same label."""
    duplicates = sorted({label for label in labels if labels.count(label) > 1})
    if duplicates:
        raise ValueError(f"several snapshots have the label {', '.join(map(str, duplicates))}; give one per epoch.")


def tensor_names(state: Mapping[str, Any], path: str) -> list[str]:
    """Return the names of the tensors of a module and its children, including those of parametrizations."""
    prefix = f"{path}." if path else ""
    return [name for name in state if name.startswith(prefix)]


def check_names(state: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Check that the names in the state dict match the module paths; other tensors would not be replaced.

    Raises:
        ValueError: If the name of a tensor does not match the path of its module.
    """
    for path, module in modules.items():
        for name in named_tensors(module):
            full = f"{path}.{name}" if path else name
            if full not in state:
                raise ValueError(
                    f"the state dict of the model has no {full}: a wrapper around the module {path!r}, as for "
                    "activation checkpointing, changes its names. Pass the model without the wrapper."
                )


def check_architecture(state: Mapping[str, Tensor], label: str, tensors: StoredTensors, paths: Iterable[str]) -> None:
    """Check that the tensors of a snapshot fit those of the model in the modules that will be replaced.

    Raises:
        ValueError: If a tensor of these modules is missing, or has another shape.
    """
    for path in paths:
        for name in tensor_names(state, path):
            stored = _find(state, tensors, name)
            if stored is None or stored.shape != tuple(state[name].shape):
                has = f"has {name} of shape {stored.shape}" if stored else f"has no {name}"
                raise ValueError(
                    f"snapshot {label} {has}, but in the layer {path!r} of the model it has the shape "
                    f"{tuple(state[name].shape)}. Pass snapshots of this architecture."
                )


def read_tensors(state: Mapping[str, Tensor], tensors: StoredTensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Read tensors for a model: copies in its dtype and on its device."""
    found = {name: _find(state, tensors, name) for name in names}
    return {name: one.read().detach().to(state[name], copy=True) for name, one in found.items() if one is not None}


def _find(state: Mapping[str, Tensor], tensors: StoredTensors, name: str) -> StoredTensor | None:
    """Return a stored tensor; a file may store it under the name of a tied tensor."""
    tied = (other for other in tensors if other in state and state[other] is state[name])
    return tensors.get(name) or next((tensors[other] for other in tied), None)


class RandomWeights:
    """Samples initial weights for the layers of a model; the random state of the caller does not change.

    Args:
        model: The model.
        seed: Seed of all samples.
        build: Builds the model with new random weights. By default a model of transformers is built from its
            configuration, and other layers are sampled by their `reset_parameters`.
        layers: The layers to sample.

    Raises:
        ValueError: If a layer cannot be sampled without `build`.
    """

    def __init__(
        self, model: nn.Module, seed: int, build: Callable[[], nn.Module] | None, layers: Mapping[str, nn.Module]
    ) -> None:
        self._model = model
        self._seed = seed
        transformers = sys.modules.get("transformers.modeling_utils")
        if build is None and transformers is not None and isinstance(model, transformers.PreTrainedModel):
            build = partial(_build_from_config, model)
        self._build = build
        self._built: dict[int, StoredTensors] = {}  # a complete model per sample
        if build is None:
            for path, module in layers.items():
                if not callable(getattr(module, "reset_parameters", None)) or self._keeps_weights(path, module):
                    raise ValueError(
                        f"the layer {path!r}, a {type(module).__name__}, cannot initialize its own weights; pass "
                        "fresh, a function that builds the model with new random weights."
                    )

    def sample(self, number: int, paths: Sequence[str]) -> StoredTensors:
        """Sample the weights of some modules; the same for the same seed, number and paths."""
        if self._build is None:
            modules = {path: self._reset(path, self._model.get_submodule(path), number) for path in paths}
            return stored_tensors(
                {
                    f"{path}.{name}" if path else name: tensor
                    for path, module in modules.items()
                    for name, tensor in named_tensors(module).items()
                }
            )
        if number not in self._built:
            with _seeded(self._seed, number):
                self._built[number] = stored_tensors(named_tensors(self._build()))
        check_architecture(named_tensors(self._model), f"random{number}", self._built[number], paths)
        return self._built[number]

    def _reset(self, path: str, module: Any, number: int) -> nn.Module:
        module = copy.deepcopy(module)
        with _seeded(self._seed, number, zlib.crc32(path.encode())):
            module.reset_parameters()
        return module

    def _keeps_weights(self, path: str, module: nn.Module) -> bool:
        """Return whether `reset_parameters` leaves weights unchanged, as in parametrized layers."""
        new, old = named_tensors(self._reset(path, module, 0)), named_tensors(module)
        return any(tensor.ndim > 1 and torch.equal(new[name], tensor) for name, tensor in old.items())


@contextlib.contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(mix_seed(*numbers))
        yield


def _build_from_config(model: Any) -> nn.Module:
    return type(model)(copy.deepcopy(model.config))
