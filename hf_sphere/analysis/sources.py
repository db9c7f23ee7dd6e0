"""Layers and their filters from a model, a state dict, or files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike

from torch import Tensor, nn

from hf_sphere.analysis.layers import LayerKind, LayerSelection, filters, find_layers, layer_kind
from hf_sphere.analysis.stages import blocks_of_stages, stages_of_model, stages_of_names
from hf_sphere.analysis.weight_files import named_layers, open_tensors, tensors_of_state_dict
from hf_sphere.utils.snapshots import Snapshot

Source = nn.Module | Mapping[str, Tensor] | str | PathLike | Snapshot
"""A model, its state dict, or safetensors files."""

NUMBERS_AT_A_TIME = 2**17  # weights converted to float64 at a time: 1 MB, which fits the cache


@dataclass(frozen=True, eq=False)  # comparing tensors does not return a bool
class LayerWeight:
    """The filters of a layer.

    Attributes:
        name: Path of the module.
        kind: `conv` or `linear`.
        dim: N, the number of inputs of a filter.
        weight: (F, N), one filter per row, as stored: of any floating dtype, on any device.
        stage: Stage of the network that the layer is in; None in a file whose names do not number stages.
        block: Number of the layer among the selected ones of its stage; None without a stage.
    """

    name: str
    kind: LayerKind
    dim: int
    weight: Tensor
    stage: int | None
    block: int | None

    def chunks(self) -> Iterator[Tensor]:
        """Yield the filters in float64 on the CPU, several rows at a time.

        Raises:
            ValueError: If a weight is not finite.
        """
        for rows in self.weight.split(max(NUMBERS_AT_A_TIME // max(self.dim, 1), 1)):
            numbers = rows.cpu().double()
            # A sum is faster than an elementwise test; it overflows only if the values are not finite or very large.
            if not numbers.sum().isfinite() and not numbers.isfinite().all():
                wrong = numbers[~numbers.isfinite()][0].item()
                raise ValueError(
                    f"{self.name or 'the layer'} has a weight that is {wrong}; all must be finite. The training "
                    "diverged, or the file was converted to a dtype with too small a range: pass an earlier snapshot."
                )
            yield numbers


def open_layers(
    source: Source, layers: LayerSelection = "conv", include_1x1: bool = False
) -> dict[str, Callable[[], LayerWeight]]:
    """Return a function per layer that reads it, by name. Arguments and errors are those of `iterate_layers`."""
    readers: Mapping[str, Callable[[], Tensor]]
    if isinstance(source, nn.Module):
        modules = find_layers(source, layers, include_1x1)
        kinds = {name: kind for name, module in modules.items() if (kind := layer_kind(module))}
        readers = {name: partial(filters, module, name) for name, module in modules.items()}
        known = stages_of_model(source)
    else:
        if isinstance(source, Mapping):
            tensors = tensors_of_state_dict(source)
        elif isinstance(source, str | PathLike | Snapshot):
            tensors = open_tensors(source.path if isinstance(source, Snapshot) else source)
        else:
            raise TypeError(
                "weights must be a torch.nn.Module, a state dict, a Snapshot, or the path of a safetensors file, of "
                f"its index or of a folder with either; got {type(source).__name__}."
            )
        readers, kinds = named_layers(tensors, layers, include_1x1)
        known = stages_of_names(kinds) or {}
    stages = [known.get(name) for name in readers]
    blocks = blocks_of_stages(stages)
    return {
        name: partial(_read, name, kinds[name], stage, block, read)
        for (name, read), stage, block in zip(readers.items(), stages, blocks, strict=True)
    }


def iterate_layers(source: Source, layers: LayerSelection = "conv", include_1x1: bool = False) -> Iterator[LayerWeight]:
    """Yield the layers of a model, or of files without building the model.

    Args:
        source: A module; a state dict; or a `Snapshot` or the path of a safetensors file, of the index of a sharded
            checkpoint (`model.safetensors.index.json`) or of a folder with either. Only one layer of a file is in
            memory at a time. `hf_sphere.analysis.weight_files` defines what a layer of a file or a state dict is.
        layers: Kinds of layers; `all` means both.
        include_1x1: Include pointwise (1x1) convolutions.

    Yields:
        The layers of a model in the order of definition, of a state dict in its order, of files sorted by name.

    Raises:
        TypeError: If the source is none of these.
        FileNotFoundError: If there is no such file or folder, or a part of a sharded checkpoint is missing.
        ValueError: If there is no such layer or selection; if weights are quantized, offloaded, sharded in memory or
            stored in parts; if a file is damaged, or pickled instead of safetensors.
    """
    for read in open_layers(source, layers, include_1x1).values():
        yield read()


def _read(
    name: str, kind: LayerKind, stage: int | None, block: int | None, read_filters: Callable[[], Tensor]
) -> LayerWeight:
    weight = read_filters()
    return LayerWeight(name, kind, weight.shape[1], weight, stage, block)
