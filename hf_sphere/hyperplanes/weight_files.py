"""Layers and their filters from a model, a state dict or safetensors files.

Rules for state dicts and files, whose layers are identified by names and shapes, without a model:

- A convolution is a tensor `<module>.weight` of three to five axes, outputs first. Transposed convolutions store inputs
  first and cannot be distinguished; give the model if it has any.
- A linear layer is a tensor `<module>.weight` of two axes, unless the last part of the module's name is that of an
  embedding table, see `EMBEDDING_TABLE`. With a bias as long as one of its axes it is a linear layer under any name.
- The `Conv1D` of transformers (GPT-2) stores a linear layer with the inputs first. Where a bias as long as the second
  axis but not as the first shows that, an error asks for the model.
- Weights in parts (weight and spectral normalization, pruning, scaled weight standardization), quantized ones and
  adapters are refused. A weight beside a bias of several axes is a stack of weights, as in `CondConv2d`, and no layer.
- Plain weight standardization, as in timm's `StdConv2d`, and angular layers change the weight in their forward pass,
  which no name or shape shows, so the stored weight is read.
- A layer normalization over two or three axes has the shape of a linear layer or a convolution, and `nn.Bilinear` that
  of a convolution; they cannot be distinguished. Give the model if it has any.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hf_sphere.hyperplanes.layers import (
    POINTWISE,
    LayerKind,
    LayerSelection,
    filters,
    find_layers,
    layer_kind,
    select_layers,
)
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import read_json
from hf_sphere.utils.snapshots import ORDER_KEY, Snapshot

EMBEDDING_TABLE = re.compile(
    r".*(emb|embed(ding)?s?|embed(_tokens|_positions|_in|ding_table)|codebook)|wte|wpe|shared|relative_attention_bias"
)
WEIGHT = re.compile(r"(?:(?P<name>.*)\.)?(?P<form>weight|qweight|weight_v|weight_orig|parametrizations\.weight\.\w+)")

CONVERT = (
    "Only safetensors files are read; pickled ones can run code. Convert trusted files with "
    "`model.save_pretrained(folder)`, or `safetensors.torch.save_model(model, path)`."
)

Source = nn.Module | Mapping[str, Tensor] | str | PathLike | Snapshot
"""A model, its state dict, or safetensors files."""

NUMBERS_AT_A_TIME = 2**17  # weights converted to float64 at a time: 1 MB, which fits the cache


class StoredTensor(NamedTuple):
    """A tensor that has not been read yet, and the function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def named_layers(
    tensors: Mapping[str, StoredTensor], layers: LayerSelection, include_1x1: bool
) -> dict[str, tuple[LayerKind, Callable[[], Tensor]]]:
    """Find layers among all tensors, by the rules of this module: their kind and how to read the weight."""
    kinds: dict[str, str] = {}
    problems: dict[str, str] = {}
    for key, (shape, _) in tensors.items():
        match = WEIGHT.fullmatch(key)
        if match is None or (not 2 <= len(shape) <= 5 and match["form"] != "qweight"):
            continue
        name = match["name"] or ""
        bias = tensors.get(f"{name}.bias" if name else "bias", StoredTensor((), Tensor)).shape
        is_table = EMBEDDING_TABLE.fullmatch(name.rpartition(".")[2]) and (not bias or bias[0] not in shape)
        if len(bias) > 1 or (len(shape) == 2 and is_table):  # a bias of several axes is that of a stack of weights
            continue
        kinds[name] = "linear" if len(shape) <= 2 else POINTWISE if math.prod(shape[2:]) == 1 else "conv"
        if match["form"] != "weight" or f"{name}.gain" in tensors:  # of timm's ScaledStdConv2d
            problems[name] = f"has a weight that is quantized or stored in parts ({key})"
        elif len(shape) == 2 and bias == shape[1:] != shape[:1]:
            problems[name] = "is stored with the inputs first, as a Conv1D of transformers"
    selected = select_layers(kinds, layers, include_1x1, f"a checkpoint of {len(tensors)} tensors")
    if refused := [name for name in selected if name in problems]:
        raise ValueError(f"{refused[0] or 'the layer'} {problems[refused[0]]}. Pass the model, before quantization.")
    return {
        name: ("linear" if kinds[name] == "linear" else "conv", tensors[f"{name}.weight" if name else "weight"].read)
        for name in selected
    }


def stored_tensors(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, without other entries such as `_extra_state`."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: StoredTensor(tuple(value.shape), value.detach) for name, value in tensors.items()}


def open_tensors(path: str | PathLike) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, of an index, or of a folder with either, without reading them."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        files = [file for file in files if file.name.startswith("model.safetensors")] or files
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:5]) or "no *.safetensors"
            raise FileNotFoundError(f"{path} has {found}; pass a folder or the path of one checkpoint. {CONVERT}")
        path = files[0]
    if path.suffix != ".json":
        return open_file(path)
    shard_of = read_json(path)["weight_map"]
    shards = [open_file(path.parent / Path(shard).name) for shard in sorted(set(shard_of.values()))]
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    return {name: tensors[name] for name in sorted({*tensors, *shard_of}, key=_natural)}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, in the order of `open_tensors`, without reading them."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Only snapshots have an epoch; the order of another file may be anything.
            names = json.loads(metadata[ORDER_KEY]) if {"epoch", ORDER_KEY} <= metadata.keys() else []
            order = {name: at for at, name in enumerate(names)}
            names = sorted(file.keys(), key=lambda name: (order.get(name, len(order)), _natural(name)))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}. {CONVERT}") from error
    return {name: StoredTensor(shape, partial(_read_tensor, path, name)) for name, shape in shapes.items()}


def _read_tensor(path: Path, name: str) -> Tensor:
    """Read a tensor from a new memory mapping; one that stays open would keep all pages that were read."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for natural order."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


@dataclass(frozen=True, eq=False)  # comparing tensors does not return a bool
class LayerWeight:
    """The filters of a layer.

    Attributes:
        name: Path of the module.
        kind: `conv` or `linear`.
        dim: N, the number of inputs of a filter.
        weight: (F, N), one filter per row, of any floating dtype, on any device: of a module as its forward pass uses
            it in evaluation mode, otherwise as stored.
    """

    name: str
    kind: LayerKind
    dim: int
    weight: Tensor

    def chunks(self) -> Iterator[Tensor]:
        """Yield the filters in float64 on the CPU, several rows at a time; raise a ValueError if one is not finite."""
        for rows in self.weight.split(max(NUMBERS_AT_A_TIME // max(self.dim, 1), 1)):
            numbers = rows.cpu().double()
            # A sum is faster than an elementwise test; it overflows only if the values are not finite or very large.
            if not numbers.sum().isfinite() and not numbers.isfinite().all():
                wrong = numbers[~numbers.isfinite()][0].item()
                what = f"layer {self.name} has a weight that is {wrong}"
                raise ValueError(f"{what}; all must be finite. Pass an earlier snapshot.")
            yield numbers


def open_layers(source: Source, layers: LayerSelection, include_1x1: bool) -> dict[str, Callable[[], LayerWeight]]:
    """Return a function per layer that reads it, by name. Arguments and errors are those of `iterate_layers`."""
    readers: dict[str, tuple[LayerKind, Callable[[], Tensor]]]
    if isinstance(source, nn.Module):
        modules = find_layers(source, layers, include_1x1).items()
        readers = {name: (layer_kind(one) or "linear", partial(filters, one, name)) for name, one in modules}
    elif isinstance(source, Mapping):
        tensors = {name: tensor for name, tensor in source.items() if isinstance(tensor, Tensor)}
        memory = {name: (t.data_ptr() or name, t.shape, t.stride()) for name, t in tensors.items()}  # of tied ones
        first = {place: name for name, place in reversed(memory.items())}
        untied = {name: tensor for name, tensor in tensors.items() if first[memory[name]] == name}
        readers = named_layers(stored_tensors(untied), layers, include_1x1)
    else:
        path = source.path if isinstance(source, Snapshot) else source
        readers = named_layers(open_tensors(path), layers, include_1x1)

    def read(name: str) -> LayerWeight:
        weight = readers[name][1]()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # of a sharded model
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:  # the codes of its numbers
            raise ValueError(f"{name or 'the layer'} is quantized. Pass the model or the files before quantization.")
        weight = weight.flatten(1)
        return LayerWeight(name, readers[name][0], weight.shape[1], weight)

    return {name: partial(read, name) for name in readers}


def iterate_layers(source: Source, layers: LayerSelection = "conv", include_1x1: bool = False) -> Iterator[LayerWeight]:
    """Yield the layers of a model, or of files without building the model.

    Args:
        source: A module; a state dict; or a `Snapshot` or the path of a safetensors file, of the index of a sharded
            checkpoint (`model.safetensors.index.json`) or of a folder with either. Only one layer of a file is in
            memory at a time. `hf_sphere.hyperplanes.weight_files` defines what a layer of a file or a state dict is.
        layers: Kinds of layers; `all` means both.
        include_1x1: Include pointwise (1x1) convolutions.

    Yields:
        The layers of a model in the order of definition, of a state dict in its order, of files sorted by name.

    Raises:
        FileNotFoundError: If there is no such file or folder, or a folder has no checkpoint or several.
        ValueError: If there is no such layer or selection; if weights are quantized, stored in parts or of adapters; if
            a layer of a module has its own forward pass; if a file is damaged, or pickled instead of safetensors.

    Example:
        >>> [layer.name for layer in iterate_layers(network, "all")]
        ['0', '2', '5']
    """
    for read in open_layers(source, layers, include_1x1).values():
        yield read()
