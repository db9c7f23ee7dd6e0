"""Layers and their filters from a model, a state dict or safetensors files.

Rules for state dicts and files, whose layers are identified by names and shapes, without a model:

- A convolution is a tensor `<module>.weight` of three to five axes, outputs first. Transposed convolutions store inputs
  first and cannot be distinguished; give the model if it has any.
- A linear layer is a tensor `<module>.weight` of two axes, unless the last part of the module's name is that of an
  embedding table: it ends with `emb`, `embed`, `embeds`, `embedding`, `embeddings`, `embed_tokens`, `embed_positions`,
  `embed_in`, `embedding_table` or `codebook`, or is `wte`, `wpe`, `shared` or `relative_attention_bias`. With a bias as
  long as one of its axes it is a linear layer under any name.
- The `Conv1D` of transformers (GPT-2) stores a linear layer with the inputs first. Where a bias as long as the second
  axis but not as the first shows that, an error asks for the model.
- A weight beside a bias of several axes is a stack of weights, as in timm's `CondConv2d`, and no layer.
- Weights in parts (weight and spectral normalization, pruning, scaled weight standardization), quantized ones and
  adapters are refused.
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
    OF_ADAPTER,
    POINTWISE,
    LayerKind,
    LayerSelection,
    check_not_quantized,
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
ADAPTER = re.compile(r"(.*\.)?(lora([_.].*)?|base_layer|(original_module|modules_to_save)(\..*)?)")

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
    """Find layers among all tensors, given by name, by the rules of this module.

    Returns the kind of each selected layer, and a function that reads its filters, (F, N). No such layer is an error,
    and a layer whose weight is quantized, stored in parts or of an adapter.
    """
    kinds: dict[str, str] = {}
    problems: dict[str, str] = {}
    for key, tensor in tensors.items():
        match, axes = WEIGHT.fullmatch(key), len(tensor.shape)
        if match is None or (not 2 <= axes <= 5 and match["form"] != "qweight"):
            continue
        name = match["name"] or ""
        of_layer = f"{name}." if name else ""
        bias = tensors[f"{of_layer}bias"].shape if f"{of_layer}bias" in tensors else ()
        is_table = EMBEDDING_TABLE.fullmatch(name.rpartition(".")[2]) and (not bias or bias[0] not in tensor.shape)
        if len(bias) > 1 or (axes == 2 and is_table):
            continue
        kinds[name] = "linear" if axes <= 2 else POINTWISE if math.prod(tensor.shape[2:]) == 1 else "conv"
        if match["form"] == "qweight":
            problems[name] = f"is quantized ({key}). Pass the model or the files before quantization."
        elif match["form"] != "weight" or f"{of_layer}gain" in tensors:  # of timm's ScaledStdConv2d
            problems[name] = "has a weight that is stored in parts. Pass the model, which computes it."
        elif axes == 2 and bias == tensor.shape[1:] != tensor.shape[:1]:
            problems[name] = "is stored with the inputs first, as a Conv1D of transformers. Pass the model."
        elif ADAPTER.fullmatch(name):
            problems[name] = OF_ADAPTER
    selected = select_layers(kinds, layers, include_1x1, f"a checkpoint of {len(tensors)} tensors")
    if refused := [name for name in selected if name in problems]:
        raise ValueError(f"{refused[0] or 'the layer'} {problems[refused[0]]}")

    def read(name: str) -> Tensor:
        weight = tensors[f"{name}.weight" if name else "weight"].read()
        check_not_quantized(name, weight)
        return weight.flatten(1)

    return {name: ("linear" if kinds[name] == "linear" else "conv", partial(read, name)) for name in selected}


def stored_tensors(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, without other entries such as `_extra_state`."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: StoredTensor(tuple(value.shape), value.detach) for name, value in tensors.items()}


def without_tied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, each only under the first of its names."""
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            address = tensor.data_ptr() or name  # empty tensors have none
            first.setdefault((address, tensor.shape, tensor.stride()), name)
    return {name: state[name] for name in first.values()}


def open_tensors(path: str | PathLike) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, of an index, or of a folder with either, without reading them.

    They are in the order of the model if the file defines it, as snapshots do, and otherwise in natural order of their
    names, so that `layers.10` comes after `layers.9`. A part of a sharded checkpoint that is missing is an error, and a
    checkpoint that is damaged or pickled.
    """
    path = _find_file(Path(path))
    if path.suffix != ".json":
        return open_file(path)
    shard_of = read_json(path)["weight_map"]
    shards = [open_file(path.parent / Path(shard).name) for shard in sorted(set(shard_of.values()))]
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    if missing := sorted(shard_of.keys() - tensors.keys()):
        raise ValueError(f"the files of {path} lack {missing[0]}. Download or save them again.")
    return {name: tensors[name] for name in sorted(tensors, key=_natural)}


def _find_file(path: Path) -> Path:
    """Return the safetensors file or the index at a path or in a folder."""
    if not path.is_dir():
        return path
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        files = sorted(path.glob(pattern))
        standard = path / pattern.replace("*", "model")
        if len(files) == 1 or standard in files:
            return standard if standard in files else files[0]
        if files:
            names = ", ".join(file.name for file in files[:5])
            raise ValueError(f"{path} has several checkpoints: {names}; pass the path of one.")
    raise FileNotFoundError(f"{path} has no *.safetensors and no *.safetensors.index.json. {CONVERT}")


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file without reading them; order and errors are those of `open_tensors`."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Only snapshots have an epoch; the order of another file may be anything.
            names = json.loads(metadata[ORDER_KEY]) if {"epoch", ORDER_KEY} <= metadata.keys() else []
            order = {name: at for at, name in enumerate(names)}
            names = sorted(file.keys(), key=lambda name: (order.get(name, len(order)), _natural(name)))
            return {
                name: StoredTensor(tuple(file.get_slice(name).get_shape()), partial(_read_tensor, path, name))
                for name in names
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}. {CONVERT}") from error


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
                name = f"layer {self.name}" if self.name else "the layer"
                raise ValueError(f"{name} has a weight that is {wrong}; all must be finite. Pass an earlier snapshot.")
            yield numbers


def open_layers(source: Source, layers: LayerSelection, include_1x1: bool) -> dict[str, Callable[[], LayerWeight]]:
    """Return a function per layer that reads it, by name. Arguments and errors are those of `iterate_layers`."""
    readers: dict[str, tuple[LayerKind, Callable[[], Tensor]]]
    if isinstance(source, nn.Module):
        modules = find_layers(source, layers, include_1x1).items()
        readers = {name: (layer_kind(one) or "linear", partial(filters, one, name)) for name, one in modules}
    elif isinstance(source, Mapping):
        readers = named_layers(stored_tensors(without_tied(source)), layers, include_1x1)
    else:
        tensors = open_tensors(source.path if isinstance(source, Snapshot) else source)
        readers = named_layers(tensors, layers, include_1x1)

    def read(name: str) -> LayerWeight:
        weight = readers[name][1]()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # of a sharded model
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
        FileNotFoundError: If there is no such file or folder, or a part of a sharded checkpoint is missing.
        ValueError: If there is no such layer or selection; if weights are quantized, stored in parts or of adapters; if
            a layer of a module has its own forward pass; if a file is damaged, or pickled instead of safetensors.

    Example:
        >>> [layer.name for layer in iterate_layers(network, "all")]
        ['0', '2', '5']
    """
    for read in open_layers(source, layers, include_1x1).values():
        yield read()
