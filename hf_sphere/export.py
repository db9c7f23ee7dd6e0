"""Export of the models to ONNX."""

import copy
import importlib.util
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sphere.utils.checks import check_extra, error_text
from hf_sphere.utils.files import atomic_files
from hf_sphere.utils.modules import eval_mode

__all__ = ["export_onnx"]


def export_onnx(model: PreTrainedModel, path: str | os.PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Write an image or text model to an ONNX file.

    The inputs are named as those of the model: `pixel_values`; or `input_ids`, `attention_mask` and, for an encoder
    with more than one token type, `token_type_ids`. The outputs are the tensors of the model's output, such as
    `logits`, `embeddings` and `concentration`. Batch size and text length are variable; the image size is that of the
    configuration. A model in half precision is exported in float32. Weights of more than 1.5 GB are written to a second
    file, `path` with the suffix `.data` appended.

    The outputs equal those of the model in eval mode, with its calibration; onnxruntime checks it if it is installed.
    The head `vmf` adds its random numbers, about 4 S K (d + 300) bytes for S samples and K classes in d dimensions,
    unless it has `prediction="mean"`.

    A model with a rejection has the outputs `known`, `p_value` and `class_p_values` too, and the metadata `rejection`:
    its score, level, `by_class` and number of images as JSON.

    The runtime needs float64, in which the spherization accumulates.

    Args:
        model: The model; its state and mode are not changed.
        path: The file; its folder is created if necessary, and an existing file is replaced.
        metadata: Texts to store in the file's metadata, for instance the preprocessing of images.

    Raises:
        ImportError: If onnx or onnxscript is missing.
        RuntimeError: If onnxruntime cannot run the file, or computes other outputs.
        ValueError: If the model has other inputs, or has changed since its rejection was fitted, or `path` is a folder.

    Example:
        >>> export_onnx(model, "digits.onnx")
        >>> session = onnxruntime.InferenceSession("digits.onnx")
        >>> logits, embeddings = session.run(["logits", "embeddings"], {"pixel_values": images.numpy()})
    """
    check_extra("onnx", "exporting to ONNX", "onnx", "onnxscript")
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"path must be a file, but {path} is a folder. Use for instance {path / 'model.onnx'}.")
    about = {}
    if (rejection := getattr(model, "rejection", None)) is not None:
        if change := model.find_change():
            raise ValueError(f"the {change}; fit it again by `fit_rejection`, or remove it by `set_rejection(None)`.")
        kept = {name: rejection.settings[name] for name in ("score", "level", "by_class", "num_images")}
        about["rejection"] = json.dumps(kept)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in model.state_dict().values()):
        model = copy.deepcopy(model).float()
    inputs = _example_inputs(model)
    with eval_mode(model), torch.no_grad():
        wrapped = _TupleOfTensors(model, inputs).eval()
        program: Any = torch.onnx.export(
            wrapped,
            tuple(inputs.values()),
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=wrapped.output_names,
            dynamic_shapes=(_variable_axes(inputs),),
        )
        expected = dict(zip(wrapped.output_names, wrapped(*inputs.values()), strict=True))
    if wrong := [name for name, values in expected.items() if not values.isfinite().all()]:
        raise ValueError(f"the {wrong[0]} of the model are not finite, so it is not exported; its weights are damaged.")
    program.model.metadata_props.update(about | dict(metadata or {}))
    with atomic_files(path.parent) as folder:
        program.save(folder / path.name)
        if importlib.util.find_spec("onnxruntime"):
            _check_file(folder / path.name, inputs, expected)


def _check_file(file: Path, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise an error unless onnxruntime computes the outputs of the model."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        outputs = session.run(list(expected), {name: value.numpy(force=True) for name, value in inputs.items()})
    except Exception as error:  # of onnxruntime, of many classes
        raise RuntimeError(f"onnxruntime cannot run the exported model: {error_text(error)}") from error
    for (name, values), output in zip(expected.items(), outputs, strict=True):
        if values.dtype == torch.bool:  # of a rejection, whose p-value is compared
            continue
        # On average, since rounding may move a single value across a threshold, for instance of the samples of `vmf`.
        difference = (torch.from_numpy(output) - values.cpu()).abs().mean().item()
        if not difference <= 1e-3 * max(1.0, values.abs().max().item()):
            hint = "Use other versions of torch and onnxscript."
            raise RuntimeError(
                f"in onnxruntime the {name} differ from the model by {difference:.2g} on average. {hint}"
            )


class _TupleOfTensors(nn.Module):
    """A model with positional inputs that returns the tensors of its output as a tuple."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.input_names = list(inputs)
        self.output_names: list[str] = []
        seen: list[Any] = []  # an output can have two names
        for name, value in model(**inputs, return_dict=True).items():
            if isinstance(value, Tensor) and not any(value is other for other in seen):
                seen.append(value)
                self.output_names.append(name)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(**dict(zip(self.input_names, inputs, strict=True)), return_dict=True)
        return tuple(output[name] for name in self.output_names)


def _example_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return inputs of the model, by name; no axis of variable length is 0 or 1, which torch would treat as fixed."""
    parameters = inspect.signature(model.forward).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    config: Any = model.config
    if model.main_input_name == "pixel_values" and set(required) <= {"pixel_values"}:
        size = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        pixels = torch.randn(2, config.num_channels, *size, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(model.device)}
    if model.main_input_name == "input_ids" and not required:
        names = ["input_ids", "attention_mask"]
        if "token_type_ids" in parameters and getattr(config, "type_vocab_size", 0) > 1:
            names.append("token_type_ids")
        return {name: torch.ones(2, 8, dtype=torch.int64, device=model.device) for name in names}
    raise ValueError(
        f"export_onnx supports models whose only required input is pixel_values or input_ids; {type(model).__name__} "
        f"requires {', '.join(required) or model.main_input_name}. Export its encoder, `model.base_model`, instead."
    )


def _variable_axes(inputs: dict[str, Tensor]) -> tuple[dict[int, Any], ...]:
    """Return the names of the variable axes of each input: batch and, for token ids, length."""
    count = 1 if "pixel_values" in inputs else 2
    names: dict[int, Any] = dict(enumerate(["batch", "length"][:count]))
    # The axes of the other inputs get the same names, since they must have the same lengths.
    return (names, *(dict.fromkeys(names, torch.export.Dim.DYNAMIC) for _ in list(inputs)[1:]))
