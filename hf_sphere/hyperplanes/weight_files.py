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
- Weights in parts (weight and spectral normalization, pruning, scaled weight standardization) and adapters are refused.
- Plain weight standardization, as in timm's `StdConv2d`, and angular layers change the weight in their forward pass,
  which no name or shape shows, so the stored weight is read. Give the model if it has any.
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
    Kinds,
    LayerKind,
    LayerSelection,
    blocks_of_stages,
    filters,
    find_layers,
    layer_kind,
    quantized,
    readable,
    select_layers,
    stages_of_model,
)
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import read_json
from hf_sphere.utils.snapshots import ORDER_KEY, Snapshot

EMBEDDING_TABLE = re.compile(
    r".*(emb|embed(ding)?s?|embed(_tokens|_positions|_in|ding_table)|codebook)|wte|wpe|shared|relative_attention_bias"
)
IN_PARTS = re.compile(r"(?:^|(.*)\.)(?:weight_(?:v|orig)|parametrizations\.weight\.original1?)")
ADAPTER = re.compile(r"(.*\.)?(lora([_.].*)?|base_layer|(original_module|modules_to_save)(\..*)?)")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

CONVERT = (
    "Only safetensors files are read; pickled ones can run code. Convert trusted files with "
    "`model.save_pretrained(folder)`, or `safetensors.torch.save_model(model, path)`."
)
PASS_MODEL = "Pass the model, which computes the weight."

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
    kinds: Kinds = {}
    weights: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        _refuse_other_forms(key, tensor, layers)
        name = key.removesuffix("weight").removesuffix(".")
        axes, stored_bias = len(tensor.shape), tensors.get(f"{name}.bias" if name else "bias")
        bias = () if stored_bias is None else stored_bias.shape
        if key not in ("weight", f"{name}.weight") or not 2 <= axes <= 5 or len(bias) > 1:
            continue
        if axes > 2:
            kinds[name] = ("conv", math.prod(tensor.shape[2:]) == 1)
        elif EMBEDDING_TABLE.fullmatch(name.rpartition(".")[2]) and (not bias or bias[0] not in tensor.shape):
            continue
        elif layers != "conv" and bias == tensor.shape[1:] != tensor.shape[:1]:
            raise ValueError(f"{name} is stored with the inputs first, as a Conv1D of transformers. Pass the model.")
        else:
            kinds[name] = ("linear", False)
        weights[name] = tensor

    selected = select_layers(kinds, layers, include_1x1, f"a checkpoint of {len(tensors)} tensors")
    for name in selected:
        if ADAPTER.fullmatch(name):
            raise ValueError(f"{name} {OF_ADAPTER}")
        if (gain := f"{name}.gain") in tensors:  # as in timm's ScaledStdConv2d
            raise ValueError(f"the weight of {name} is standardized and multiplied by {gain}. {PASS_MODEL}")

    def read(name: str) -> Tensor:
        return readable(weights[name].read(), kinds[name][0], name or "the layer").flatten(1)

    return {name: (kinds[name][0], partial(read, name)) for name in selected}


def stored_tensors(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, without other entries such as `_extra_state`."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: StoredTensor(tuple(value.shape), value.detach) for name, value in tensors.items()}


def tensors_of_state_dict(state: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, tied ones once; raise a ValueError if it has none."""
    tensors = stored_tensors(state)
    if not tensors:
        keys = ", ".join(map(str, list(state)[:5])) or "none"
        raise ValueError(f"a state dict maps names to tensors; got the keys {keys}. Pass the entry that is one.")
    seen = set()
    for name in list(tensors):
        tensor = state[name]
        address = None if tensor.is_meta or hasattr(tensor, "full_tensor") else tensor.data_ptr() or None
        identity = (address, tensor.shape, tensor.stride())
        if address is not None and identity in seen:
            del tensors[name]
        seen.add(identity)
    return tensors


def open_tensors(path: str | PathLike) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, of an index, or of a folder with either, without reading them.

    They are in the order of the model if the file defines it, as snapshots do, and otherwise in natural order of their
    names, so that `layers.10` comes after `layers.9`. A part of a sharded checkpoint that is missing is an error, and a
    checkpoint that is damaged, pickled, quantized or an adapter.
    """
    path = _find_file(Path(path))
    if path.name == "adapter_model.safetensors":  # of any method of PEFT
        raise ValueError(f"{path} {OF_ADAPTER}")
    _refuse_quantized_config(path.parent)
    return _open_shards(path) if path.suffix == ".json" else open_file(path)


def _find_file(path: Path) -> Path:
    """Return the safetensors file or the index at a path or in a folder."""
    if path.is_file():
        if path.suffix in PICKLED:
            raise ValueError(f"{path} is a pickled file. {CONVERT}")
        return path
    if not path.is_dir():
        advice = "Download a model of the Hub with huggingface_hub.snapshot_download"
        raise FileNotFoundError(f"{path} is neither a file nor a folder. {advice}.")
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        files = sorted(path.glob(pattern))
        standard = path / pattern.replace("*", "model")
        if standard in files:
            return standard
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files[:5])
            raise ValueError(f"{path} has several checkpoints: {names}; pass the path of one.")
    if pickled := sorted(file.name for file in path.iterdir() if file.suffix in PICKLED):
        raise ValueError(f"{path} has pickled files but no safetensors file: {', '.join(pickled[:3])}. {CONVERT}")
    raise FileNotFoundError(f"{path} has no *.safetensors and no *.safetensors.index.json.")


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file without reading them; order and errors are those of `open_tensors`."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            order = {name: at for at, name in enumerate(_order(file.metadata() or {}))}
            names = sorted(file.keys(), key=lambda name: (order.get(name, len(order)), _natural(name)))
            return {
                name: StoredTensor(tuple(file.get_slice(name).get_shape()), partial(_read_tensor, path, name))
                for name in names
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}. {CONVERT}") from error


def _order(metadata: Mapping[str, str]) -> list[str]:
    """Return the names in the order of the model; none if the file does not define it."""
    try:
        names = json.loads(metadata.get(ORDER_KEY, "[]"))
    except ValueError:
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _read_tensor(path: Path, name: str) -> Tensor:
    """Read a tensor from a new memory mapping; one that stays open would keep all pages that were read."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    content = read_json(index)
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise ValueError(f"{index} has no weight_map and so is not an index. Pass a folder or a file.")
    names = sorted(set(shard_of.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} names {outside[0]}, which is not in its folder.")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise FileNotFoundError(f"{index} refers to files that are missing: {', '.join(missing)}. Download them.")
    shards = {name: open_file(index.parent / name) for name in names}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise ValueError(f"according to {index}, {name} is in {shard}, but it is not. Download or save both again.")
    return {name: shards[shard_of[name]][name] for name in sorted(shard_of, key=_natural)}


def _refuse_quantized_config(folder: Path) -> None:
    config = folder / "config.json"
    content = read_json(config) if config.is_file() else {}
    if isinstance(content, dict) and (method := content.get("quantization_config")):
        name = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ValueError(quantized(f"the checkpoint in {folder}", f"its config.json has quantization_config: {name}"))


def _refuse_other_forms(key: str, tensor: StoredTensor, layers: LayerSelection) -> None:
    """Raise ValueError for layers whose weight is not stored as one tensor."""
    if key.endswith(".qweight") and layers != "conv":
        raise ValueError(quantized(key.removesuffix(".qweight"), key))
    match = IN_PARTS.fullmatch(key)
    if match and 2 <= len(tensor.shape) <= 5 and layers in ("linear" if len(tensor.shape) == 2 else "conv", "all"):
        name = match[1] or "the module"
        raise ValueError(f"the weight of {name} is stored in parts ({key}). {PASS_MODEL}")


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
        stage: Stage of the network that the layer is in; None in a file or state dict.
        block: Number of the layer among the selected ones of its stage; None without a stage.
    """

    name: str
    kind: LayerKind
    dim: int
    weight: Tensor
    stage: int | None
    block: int | None

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
    stage_of: dict[str, int] = {}
    if isinstance(source, nn.Module):
        modules = find_layers(source, layers, include_1x1).items()
        readers = {name: (kind, partial(filters, one, name)) for name, one in modules if (kind := layer_kind(one))}
        stage_of = stages_of_model(source)
    else:
        if isinstance(source, Mapping):
            tensors = tensors_of_state_dict(source)
        elif isinstance(source, str | PathLike | Snapshot):
            tensors = open_tensors(source.path if isinstance(source, Snapshot) else source)
        else:
            kinds = "a torch.nn.Module, a state dict, a Snapshot or the path of safetensors files"
            raise TypeError(f"weights must be {kinds}; got {type(source).__name__}.")
        readers = named_layers(tensors, layers, include_1x1)
    stages = [stage_of.get(name) for name in readers]
    rows = zip(readers.items(), stages, blocks_of_stages(stages), strict=True)
    return {name: partial(_read, name, kind, stage, block, read) for (name, (kind, read)), stage, block in rows}


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
        TypeError: If the source is none of these.
        FileNotFoundError: If there is no such file or folder, or a part of a sharded checkpoint is missing.
        ValueError: If there is no such layer or selection; if weights are quantized, offloaded, sharded in memory,
            stored in parts or of adapters; if the weight that a forward pass uses cannot be determined; if a file is
            damaged, or pickled instead of safetensors.

    Example:
        >>> [layer.name for layer in iterate_layers(network, "all")]
        ['0', '2', '5']
    """
    for read in open_layers(source, layers, include_1x1).values():
        yield read()


def _read(name: str, kind: LayerKind, stage: int | None, block: int | None, read: Callable[[], Tensor]) -> LayerWeight:
    weight = read()
    return LayerWeight(name, kind, weight.shape[1], weight, stage, block)
