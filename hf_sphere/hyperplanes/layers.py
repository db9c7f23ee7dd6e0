"""The layers of a network and their filters as rows, from a module, state dict or safetensors files; their distances.

A filter holds the weights of one output of a layer: a row of a linear layer, or a kernel of a convolution over all its
input channels. As a vector it is the normal of a hyperplane.

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

import inspect
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pandas import DataFrame
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from transformers.pytorch_utils import Conv1D

from hf_sphere.utils.files import read_json
from hf_sphere.utils.modules import eval_mode
from hf_sphere.utils.snapshots import ORDER_KEY, Snapshot

logger = logging.getLogger(__name__)

LayerKind = Literal["conv", "linear"]
LayerSelection = Literal["conv", "linear", "all"]

POINTWISE = "1x1 conv"
ADAPTER = re.compile(r"(.*\.)?(lora([_.].*)?|base_layer|(original_module|modules_to_save)(\..*)?)")
"""Names of layers of PEFT."""
LEFT_OUT = re.compile(r"(.*\.)?((in|[qkv])_proj_weight|weight_[ih]h_l\d.*)")
"""Names of weights of `nn.MultiheadAttention` and recurrent layers, which have several in one module."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {one.forward for one in (nn.Linear, Conv1D, *_CONVOLUTIONS, *_TRANSPOSED)}
_CONVOLVE = {None, *(one._conv_forward for one in (_ConvNd, *_CONVOLUTIONS))}


def find_layers(model: nn.Module, layers: LayerSelection = "conv", include_1x1: bool = False) -> dict[str, nn.Module]:
    """Return the layers of a model by path, in order; those that share the weight of an earlier one are left out."""
    kinds, problems, seen = dict[str, str](), dict[str, str](), set[int]()
    for name, module in model.named_modules():
        kind = "conv" if isinstance(module, _ConvNd) else "linear" if isinstance(module, nn.Linear | Conv1D) else None
        # Layers of torch.ao, GPTQ and AWQ do not subclass the layer they replace.
        if kind is None and (inspect.ismethod(getattr(module, "weight", None)) or hasattr(module, "qweight")):
            kind = "conv" if "conv" in type(module).__name__.lower() else "linear"
            problems[name] = "is quantized"
        weight = module._parameters.get("weight")  # a parametrized weight is computed at every access, and not shared
        identity = id(module if weight is None else weight)
        if kind is not None and identity not in seen:
            kinds[name] = POINTWISE if math.prod(getattr(module, "kernel_size", (0,))) == 1 else kind
            seen.add(identity)
    log_left_out([name for name, _ in model.named_parameters()], layers)
    selected = select_layers(kinds, problems, layers, include_1x1, f"the model, a {type(model).__name__},")
    return {name: model.get_submodule(name) for name in selected}


def log_left_out(names: list[str], layers: LayerSelection) -> None:
    """Name linear maps that are no layers here."""
    if layers != "conv" and (left_out := [name for name in names if LEFT_OUT.fullmatch(name)]):
        logger.warning("Not among the linear layers: %s.", ", ".join(left_out))


def select_layers(
    kinds: Mapping[str, str], problems: Mapping[str, str], layers: LayerSelection, include_1x1: bool, owner: str
) -> list[str]:
    """Select layers by kind, `conv`, `linear` or `POINTWISE`; none is an error, and so is one with a problem."""
    wanted = {"conv", "linear"} if layers == "all" else {layers}
    wanted |= {POINTWISE} if include_1x1 and layers != "linear" else set()
    selected = [name for name, kind in kinds.items() if kind in wanted]
    if not selected:
        has = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds.values()).items())) or "neither"
        what = f"{owner} has no layer with layers={layers!r} and include_1x1={include_1x1}; it has {has}"
        raise ValueError(f"{what}. Choose layers='conv', 'linear' or 'all', or include_1x1=True.")
    for name in selected:
        if ADAPTER.fullmatch(name):
            raise ValueError(f"{name} belongs to an adapter of PEFT. Pass what model.merge_and_unload() returns.")
        if name in problems:
            raise ValueError(f"{name or 'the layer'} {problems[name]}. Pass the model, before quantization.")
    return selected


def filters(module: Any, name: str = "") -> Tensor:
    """Return the filters of a layer as rows (F, N), as evaluation mode uses them, detached; a view where possible.

    Those of a transposed convolution are the kernels that contribute to one output channel.
    """
    convolve = getattr(type(module), "_conv_forward", None)
    if getattr(module.forward, "__func__", None) not in _FORWARDS or convolve not in _CONVOLVE:
        what = f"a {type(module).__name__}, has its own forward pass, which may change its weight"
        raise ValueError(
            f"{name or 'the model'}, {what}. To analyze stored weights instead, pass the state dict of the model."
        )
    with eval_mode(module), torch.no_grad():
        # Normalization and pruning by hooks set the attribute before a forward pass; until then it may be outdated.
        for hook in module._forward_pre_hooks.values() if module._parameters.get("weight") is None else ():
            hook(module, ())
        weight = module.weight.detach()
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, ...)
        return weight.unflatten(0, (module.groups, -1)).transpose(1, 2).reshape(module.out_channels, -1)
    return weight.T if isinstance(module, Conv1D) else weight.flatten(1)


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
    kinds, problems = dict[str, str](), dict[str, str]()
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
    log_left_out([*tensors], layers)
    selected = select_layers(kinds, problems, layers, include_1x1, f"a checkpoint of {len(tensors)} tensors")
    return {
        name: ("linear" if kinds[name] == "linear" else "conv", tensors[f"{name}.weight" if name else "weight"].read)
        for name in selected
    }


def open_tensors(source: Mapping[str, Any] | str | PathLike | Snapshot) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, of a safetensors file or index, or of a folder, without reading them."""
    if isinstance(source, Mapping):  # which may have other entries, such as `_extra_state`
        return {k: StoredTensor(tuple(v.shape), v.detach) for k, v in source.items() if isinstance(v, Tensor)}
    path = source.path if isinstance(source, Snapshot) else Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        files = [file for file in files if file.name.startswith("model.safetensors")] or files
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:5]) or "no *.safetensors"
            raise FileNotFoundError(f"{path} has {found}; pass a folder or the path of one checkpoint. {CONVERT}")
        path = files[0]
    if path.suffix == ".json":
        shard_of, tensors = read_json(path)["weight_map"], dict[str, StoredTensor]()
        for shard in {*shard_of.values()}:
            tensors |= open_tensors(path.parent / Path(shard).name)
        return {name: tensors[name] for name in sorted({*tensors, *shard_of}, key=_natural)}
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

    def read(name: str) -> Tensor:
        with safe_open(path, framework="pt") as file:  # one that stays open would keep all pages that were read
            return file.get_tensor(name)

    return {name: StoredTensor(shape, partial(read, name)) for name, shape in shapes.items()}


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
            if not numbers.sum().isfinite() and not numbers.isfinite().all():  # a sum is faster
                wrong = numbers[~numbers.isfinite()][0].item()
                raise ValueError(f"layer {self.name} has a weight that is {wrong}. Pass an earlier snapshot.")
            yield numbers


def open_layers(source: Source, layers: LayerSelection, include_1x1: bool) -> dict[str, Callable[[], LayerWeight]]:
    """Return a function per layer that reads it, by name. Arguments and errors are those of `iterate_layers`."""
    readers: dict[str, tuple[LayerKind, Callable[[], Tensor]]] = {}
    if isinstance(source, nn.Module):
        for name, module in find_layers(source, layers, include_1x1).items():
            readers[name] = "conv" if isinstance(module, _ConvNd) else "linear", partial(filters, module, name)
    else:
        tensors = open_tensors(source)
        if isinstance(source, Mapping):  # which has tied tensors several times
            memory = {n: (source[n].data_ptr() or n, shape, source[n].stride()) for n, (shape, _) in tensors.items()}
            first = {place: name for name, place in reversed(memory.items())}
            tensors = {name: tensor for name, tensor in tensors.items() if first[memory[name]] == name}
        readers = named_layers(tensors, layers, include_1x1)

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
            memory at a time. `hf_sphere.hyperplanes.layers` defines what a layer of a file or a state dict is.
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


@dataclass(frozen=True)
class LayerDistance:
    """Distance of the weights of a layer, without biases, from the initial ones.

    Attributes:
        l2: |W - W0|_2 / |W0|_2, over all weights.
        l_inf: |W - W0|_inf / |W0|_inf, the largest change of a weight relative to the largest initial weight.
        relative: False if all initial weights are zero or there are none; both distances are then absolute.
    """

    l2: float
    l_inf: float
    relative: bool


@dataclass(frozen=True)
class Distances:
    """Distances of all layers; prints as a table.

    Attributes:
        layers: Distances by module path.
    """

    layers: Mapping[str, LayerDistance]

    def __str__(self) -> str:
        return DataFrame.from_dict(self.to_dict()["layers"], orient="index").to_string(float_format="{:.4g}".format)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)


def distance_from_initialization(
    model: Source, initial: Source, layers: LayerSelection = "conv", include_1x1: bool = False
) -> Distances:
    """Compute the distance of each layer from its initialization, in float64, in the order of `model`.

    `model` is a module, a state dict, a snapshot, or the path of safetensors files, and `initial` the same model before
    training, in any of these forms. For the other arguments, see `iterate_layers`.

    Raises:
        ValueError: If the architectures differ (the message names the layers or the shapes), a weight is not finite, or
            `iterate_layers` raises it.

    Example:
        >>> distance_from_initialization(network, network).layers["0"].l2
        0.0
    """
    trained, untrained = open_layers(model, layers, include_1x1), open_layers(initial, layers, include_1x1)
    if only := sorted(trained.keys() ^ untrained.keys()):
        names = ", ".join(only[:5])
        raise ValueError(f"only one of the model and its initialization has {names}. Architectures must match.")
    distances: dict[str, LayerDistance] = {}
    for name, read in trained.items():
        layer, before = read(), untrained[name]()
        if layer.weight.shape != before.weight.shape:
            shapes = f"{tuple(layer.weight.shape)}, but {tuple(before.weight.shape)}"
            raise ValueError(f"{name} has filters of shape {shapes} in the initialization: other architectures.")
        pairs = zip(layer.chunks(), before.chunks(), strict=True) if layer.weight.numel() else ()
        changes = ((after - start, start) for after, start in pairs)
        norms = [[0.0] * 4, *([x.norm() for x in pair] + [x.abs().max() for x in pair] for pair in changes)]
        l2, initial_l2, l_inf, initial_l_inf = torch.tensor(norms, dtype=torch.float64).T
        relative = bool(initial_l2.any())
        divisors = (float(initial_l2.norm()), float(initial_l_inf.max())) if relative else (1.0, 1.0)
        distances[name] = LayerDistance(float(l2.norm()) / divisors[0], float(l_inf.max()) / divisors[1], relative)
    return Distances(distances)
