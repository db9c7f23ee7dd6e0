"""Layers of safetensors files and of state dicts, told by names and shapes alone, without a model.

The rule:

- A convolution is a tensor `<module>.weight` of three to five axes, outputs first. Transposed convolutions store inputs
  first and cannot be told from others: give the model where there are some.
- A linear layer is a tensor `<module>.weight` of two axes, unless the last part of the module's name is that of an
  embedding table: it ends with `emb`, `embed`, `embeds`, `embedding`, `embeddings`, `embed_tokens`, `embed_positions`,
  `embed_in`, `embedding_table` or `codebook`, or is `wte`, `wpe`, `shared` or `relative_attention_bias`. Whatever its
  name, what has a bias as long as one of the axes is no table.
- The `Conv1D` of transformers (GPT-2) stores a linear layer with the inputs first. It is told by a bias as long as the
  second axis and not as the first; a square weight with a bias is taken for what the nearest others in the module tree
  are.
- A layer normalisation over two axes, or three, has the shape of a linear layer, or a convolution, and so has
  `nn.Bilinear`, of a convolution; they cannot be told from those. Give the model where there are some.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_sphere.analysis.layers import (
    LayerKind,
    LayerSelection,
    check_weight_dtype,
    describe,
    is_selected,
    no_such_layer,
    quantised,
    readable,
)
from hf_sphere.utils.snapshots import ORDER_KEY

EMBEDDING_TABLE = re.compile(
    r".*(emb|embed(ding)?s?|embed(_tokens|_positions|_in|ding_table)|codebook)|wte|wpe|shared|relative_attention_bias"
)
IN_PARTS = re.compile(r"(?:^|(.*)\.)(?:weight_(?:v|orig)|parametrizations\.weight\.original1?)")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

CONVERT = (
    "Only safetensors files are read; pickled ones can run code. Convert it where you trust it: "
    "`model.save_pretrained(folder)`, or `safetensors.torch.save_model(model, path)`."
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet.

    Attributes:
        shape: Its shape.
        check: Raises ValueError if its numbers need a scale that is stored elsewhere.
        read: Reads it.
    """

    shape: tuple[int, ...]
    check: Callable[[], None]
    read: Callable[[], Tensor]


def named_layers(
    tensors: Mapping[str, StoredTensor], layers: LayerSelection, include_1x1: bool
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, LayerKind]]:
    """Find layers by the rule of this file.

    Args:
        tensors: All tensors by name.
        layers: Which kinds; `all` are both.
        include_1x1: Also convolutions whose kernel is a single point.

    Returns:
        What reads the filters, (F, N), of each chosen layer; and the kinds of all layers, chosen or not.

    Raises:
        ValueError: If there is no such layer, or one is quantised or stored in parts.
    """
    kinds: dict[str, LayerKind] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, tensor in tensors.items():
        _refuse_other_forms(key, tensor, layers)
        name = key.removesuffix("weight").removesuffix(".")
        if key not in ("weight", f"{name}.weight"):
            continue
        if 3 <= len(tensor.shape) <= 5:
            kinds[name] = "conv"
        elif len(tensor.shape) == 2 and (
            not EMBEDDING_TABLE.fullmatch(name.rpartition(".")[2]) or _bias_length(name, tensors) in tensor.shape
        ):
            kinds[name] = "linear"
        else:
            continue
        shapes[name] = tensor.shape

    inputs_first = _stored_inputs_first(tensors, {name: shapes[name] for name in kinds if kinds[name] == "linear"})
    readers: dict[str, Callable[[], Tensor]] = {}
    left_out: Counter[str] = Counter()
    for name, kind in kinds.items():
        pointwise = kind == "conv" and math.prod(shapes[name][2:]) == 1
        if is_selected(kind, pointwise, layers, include_1x1):
            tensor = tensors[f"{name}.weight" if name else "weight"]
            tensor.check()
            readers[name] = partial(_read_filters, tensor, name, kind, name in inputs_first)
        else:
            left_out[describe(kind, pointwise)] += 1
    if not readers:
        raise ValueError(no_such_layer(f"a checkpoint of {len(tensors)} tensors", layers, include_1x1, left_out))
    return readers, kinds


def tensors_of_state_dict(state: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict, tied ones once.

    Raises:
        ValueError: If it holds no tensors at all, but for instance a state dict under some key.
    """
    tensors: dict[str, StoredTensor] = {}
    seen = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):  # `_extra_state` of a module may be anything
            continue
        place = None if tensor.is_meta or hasattr(tensor, "full_tensor") else tensor.data_ptr() or None
        identity = (place, tensor.shape, tensor.stride())
        if place is None or identity not in seen:
            tensors[name] = StoredTensor(
                tuple(tensor.shape), partial(check_weight_dtype, name, tensor.dtype), partial(_itself, tensor)
            )
        seen.add(identity)
    if not tensors:
        raise ValueError(
            f"a state dict maps names to tensors; got the keys {', '.join(map(str, list(state)[:5])) or 'none'}. If it "
            "is one of these entries, give that."
        )
    return tensors


def open_tensors(path: str | PathLike) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, of an index, or of a folder with either, unread.

    In the order of the model where the file says it, as snapshots do; else by name, with numbers as numbers, so that
    `layers.10` comes after `layers.9`.

    Raises:
        FileNotFoundError: If there is no such file or folder, or a part of a sharded checkpoint is missing.
        ValueError: If a file is damaged or pickled, or the checkpoint is quantised.
    """
    path = _find_file(Path(path))
    _refuse_quantised_config(path.parent)
    return _open_shards(path) if path.suffix == ".json" else _open_file(path)


def _find_file(path: Path) -> Path:
    """Return the safetensors file or the index that is meant."""
    if path.is_file():
        if path.suffix in PICKLED:
            raise ValueError(f"{path} is a pickled file. {CONVERT}")
        return path
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is neither a file nor a folder. If it is the name of a model on the Hub, download it first: "
            "huggingface_hub.snapshot_download returns the folder."
        )
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(path.glob(pattern))
        standard = path / pattern.replace("*", "model")
        if standard in found:
            return standard
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{path} has several checkpoints: {', '.join(file.name for file in found[:5])}"
                f"{', ...' if len(found) > 5 else ''}; give the path of one."
            )
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise ValueError(f"{path} has no safetensors file but pickled ones, {', '.join(pickled[:3])}. {CONVERT}")
    raise FileNotFoundError(f"{path} has no *.safetensors and no *.safetensors.index.json.")


def _open_file(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            order = {name: at for at, name in enumerate(_order(file.metadata() or {}))}
            for name in sorted(file.keys(), key=lambda name: (order.get(name, len(order)), _natural(name))):
                part = file.get_slice(name)
                check = partial(_check_stored_dtype, name, part.get_dtype())
                tensors[name] = StoredTensor(tuple(part.get_shape()), check, partial(_read_tensor, path, name))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged, or no safetensors file: {error}. Download or save it again. {CONVERT}"
        ) from error
    return tensors


def _order(metadata: Mapping[str, str]) -> list[str]:
    """Return the names in the order of the model; none if the file does not say it, or means another thing by it."""
    try:
        names = json.loads(metadata.get(ORDER_KEY, "[]"))
    except ValueError:
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _read_tensor(path: Path, name: str) -> Tensor:
    """Read a tensor by a mapping of its own, whose pages are given back with it: an open file would keep them all."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    content = _read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(
            f"{index} has no weight_map from names to files, so it is no index of safetensors files. Give a folder or "
            "a file."
        )
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names {len(names)} files, of which are not there: {', '.join(missing)}. Download them as well."
        )
    shards = {name: _open_file(index.parent / name) for name in names}
    for name, place in places.items():
        if name not in shards[place]:
            raise ValueError(f"{index} says that {name} is in {place}, but it is not. Download or save both again.")
    return {name: shards[places[name]][name] for name in sorted(places, key=_natural)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Download or save it again.") from error


def _refuse_quantised_config(folder: Path) -> None:
    config = folder / "config.json"
    content = _read_json(config) if config.is_file() else {}
    method = content.get("quantization_config") if isinstance(content, dict) else None
    if method:
        name = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ValueError(quantised(f"the checkpoint in {folder}", f"its config.json says quantization_config: {name}"))


def _refuse_other_forms(key: str, tensor: StoredTensor, layers: LayerSelection) -> None:
    """Refuse layers whose weight is not there as one tensor."""
    if key.endswith(".qweight") and layers != "conv":
        raise ValueError(quantised(key.removesuffix(".qweight"), key))
    match = IN_PARTS.fullmatch(key)
    if match and 2 <= len(tensor.shape) <= 5 and layers in ("linear" if len(tensor.shape) == 2 else "conv", "all"):
        raise ValueError(
            f"the weight of {match[1] or 'the module'} is stored in parts ({key}): by weight normalisation, spectral "
            "normalisation or pruning. Give the model, which puts them together."
        )


def _bias_length(name: str, tensors: Mapping[str, StoredTensor]) -> int | None:
    bias = tensors.get(f"{name}.bias" if name else "bias")
    return bias.shape[0] if bias is not None and len(bias.shape) == 1 else None


def _stored_inputs_first(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return which linear layers are stored as transformers' Conv1D; see the rule above."""
    turned: dict[str, bool] = {}
    square = []
    for name, (rows, columns) in shapes.items():
        bias = _bias_length(name, tensors)
        if bias not in (rows, columns):
            continue
        if rows == columns:
            square.append(name)
        else:
            turned[name] = bias == columns
    found = {name for name, inputs_first in turned.items() if inputs_first}
    if found:
        found |= {name for name in square if _nearest(name, turned)}
    return found


def _nearest(name: str, turned: Mapping[str, bool]) -> bool:
    """Tell whether those that share the longest part of the name are all turned."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length]) + "."
        near = [value for other, value in turned.items() if other.startswith(prefix)]
        if near:
            return all(near)
    return all(turned.values())


def _natural(name: str) -> list[tuple[int, str]]:
    """Order of names in which numbers are numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read_filters(tensor: StoredTensor, name: str, kind: LayerKind, inputs_first: bool) -> Tensor:
    weight = readable(tensor.read(), kind, name or "the layer")
    return weight.T if inputs_first else weight.flatten(1)


def _check_stored_dtype(name: str, dtype: str) -> None:
    if dtype not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(quantised(name, dtype))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
