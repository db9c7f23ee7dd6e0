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
import transformers
from PIL import Image
from torch import Tensor, nn

from hf_sphere import models
from hf_sphere.nn.layers import names_kept_in_float32
from hf_sphere.utils.checks import check_extra
from hf_sphere.utils.files import atomic_files
from hf_sphere.utils.loading import load_model, load_pretrained
from hf_sphere.utils.modules import eval_mode
from hf_sphere.utils.problem_types import SINGLE_LABEL, problem_type

__all__ = ["export_onnx"]

PREPROCESSING = ["num_channels", "size", "crop_size", "crop_pct", "resample"]
PREPROCESSING += ["rescale_factor", "image_mean", "image_std"]
"""Options of an image processor that determine its pixels, besides those that begin with `do_`."""

TEXT_INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


def export_onnx(
    model: Any, path: str | os.PathLike, metadata: Mapping[str, str] | None = None, *, int8: bool = False
) -> None:
    """Write an image or text model, or a SentenceTransformer with all its modules, to an ONNX file.

    The inputs are named as in the model: `pixel_values`; or `input_ids`, `attention_mask` and, for an encoder
    with more than one token type, `token_type_ids`. The outputs are the tensors of the model's output, such as
    `logits`, `embeddings` and `concentration`. Batch size and text length are variable; the image size is fixed by the
    configuration. A model in half precision is exported in float32. Weights of more than 1.5 GB are written to a second
    file, `path` with the suffix `.data` appended.

    The outputs equal the model in eval mode, with its calibration; onnxruntime checks it if it is installed.
    The head `vmf` adds its random numbers, about 4 S K (d + 300) bytes for S samples and K classes in d dimensions,
    unless it has `prediction="mean"`.

    A model with a rejection has the outputs `known`, `p_value` and `class_p_values` too, and the metadata `rejection`:
    its score, level, `by_class` and number of images as JSON.

    A model for several classes per image, or for a regression, has the metadata `problem_type`, as its configuration:
    its probabilities are the sigmoid of the logits, or its values are the logits.

    A SentenceTransformer has the output `sentence_embedding`, as `encode` returns it, after all its modules. Its
    metadata has `embedding`, JSON of its modules with their settings, `dimension`, `max_seq_length`, `prompts` and the
    like; and `tokenizer`, for `tokenizers.Tokenizer.from_str`, or the `preprocessing` of images.

    The runtime needs float64, in which the spherization accumulates.

    Args:
        model: The model; its state and mode are not changed.
        path: The file; its folder is created if necessary, and an existing file is replaced.
        metadata: Texts to store in the file's metadata, for instance the preprocessing of images.
        int8: Whether onnxruntime converts token embeddings and the weights of matrix products to int8, a quarter of the
            size, except those after a spherization. It has no fast convolutions for it.

    Raises:
        ImportError: If onnx or onnxscript is missing, or onnxruntime for `int8`.
        RuntimeError: If onnxruntime computes other outputs.
        ValueError: If a SentenceTransformer has modules that a file cannot have, or a model has changed since its
            rejection or calibration was fitted.

    Example:
        >>> export_onnx(model, "digits.onnx")
        >>> session = onnxruntime.InferenceSession("digits.onnx")
        >>> logits, embeddings = session.run(["logits", "embeddings"], {"pixel_values": images.numpy()})
    """
    check_extra("onnx", "exporting to ONNX", "onnx", "onnxscript", *["onnxruntime"] * int8)
    path, about = Path(path), {}
    if hasattr(model, "head") and (kind := problem_type(model)) != SINGLE_LABEL:
        about["problem_type"] = kind
    if any(kind.__name__ == "SentenceTransformer" for kind in type(model).__mro__):
        described, model = model, _SentenceEmbeddings(model)
        about = _describe(described)
    for name, reason in model.find_outdated().items() if hasattr(model, "find_outdated") else ():
        raise ValueError(f"the {reason}; fit it again by `fit_{name}`, or remove it by `set_{name}(None)`.")
    if (rejection := getattr(model, "rejection", None)) is not None:
        kept = {name: rejection.settings[name] for name in ("score", "level", "by_class", "num_images")}
        about["rejection"] = json.dumps(kept)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in model.state_dict().values()):
        model = copy.deepcopy(model).float()
    inputs, others = _example_inputs(model, 2, 8), _example_inputs(model, 3, 11)
    with eval_mode(model), torch.no_grad():
        wrapped = _TupleOfTensors(model, inputs).eval()
        named: Any = {"input_names": [*inputs], "output_names": wrapped.output_names}
        axes: dict[int, Any] = {0: "batch"} if "pixel_values" in inputs else {0: "batch", 1: "length"}
        # The axes of the other inputs must have the same lengths as those of the first.
        shapes = ((axes, *[dict.fromkeys(axes, torch.export.Dim.DYNAMIC)] * (len(inputs) - 1)),)
        program: Any = torch.onnx.export(
            wrapped, tuple(inputs.values()), dynamo=True, verbose=False, dynamic_shapes=shapes, **named
        )
        expected = dict(zip(wrapped.output_names, wrapped(*others.values()), strict=True))
    program.model.metadata_props.update(about | dict(metadata or {}))
    with atomic_files(path.parent) as folder:
        program.save(folder / path.name)
        if importlib.util.find_spec("onnxruntime"):
            _check_file(folder / path.name, others, expected)
        if int8:
            _quantize(folder / path.name, names_kept_in_float32(wrapped))
            _check_file(folder / path.name, others, expected, 2e-2)


def load_saved(name: str | os.PathLike) -> Any:
    """Load a model by the class that it was saved as, and check that it is complete; see `load_model`."""
    config = load_pretrained(transformers.AutoConfig, name)
    saved = (config.architectures or ["AutoModel"])[0]
    kind = getattr(models, saved, None) or getattr(transformers, saved, transformers.AutoModel)
    return load_model(kind, name, complete=True)


def image_preprocessing(processor: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata with the options of an image processor, as JSON; none if its size is unknown."""
    used = {k: v for k, v in processor.items() if v is not None and (k in PREPROCESSING or k.startswith("do_"))}
    return {"preprocessing": json.dumps(used, default=dict)} if "size" in used else {}


def _describe(model: Any) -> dict[str, str]:
    """Return the metadata of a SentenceTransformer, with what its file needs for texts or images."""
    settings = {
        "modules": [{"type": type(module).__name__, **getattr(module, "get_config_dict", dict)()} for module in model],
        "dimension": model.get_embedding_dimension(),
        "max_seq_length": model.max_seq_length,
        "prompts": model.prompts,
        "default_prompt_name": model.default_prompt_name,
        "similarity": str(model.similarity_fn_name),
    }
    about = {"embedding": json.dumps(settings, default=str)}
    texts: Any = getattr(model, "tokenizer", None)
    if (backend := getattr(texts, "backend_tokenizer", None)) is None:
        return about | image_preprocessing(getattr(getattr(model[0], "processor", None), "to_dict", dict)())
    tokenizer = type(backend).from_str(backend.to_str())
    if model.max_seq_length is not None:
        tokenizer.enable_truncation(model.max_seq_length, direction=texts.truncation_side)
    padding = {"pad_id": texts.pad_token_id, "pad_token": texts.pad_token, "pad_type_id": texts.pad_token_type_id}
    tokenizer.enable_padding(direction=texts.padding_side, **padding)
    samples = ["text", "a longer text " * min(model.max_seq_length or 1, 512)]
    expected, encodings = model.preprocess(samples), tokenizer.encode_batch(samples)
    found = [[i for i, used in zip(each.ids, each.attention_mask, strict=True) if used] for each in encodings]
    used = zip(expected["input_ids"], expected["attention_mask"].bool(), strict=True)
    if found != [ids[mask].tolist() for ids, mask in used]:
        hint = "such as by its processing_kwargs, which the file cannot do; remove them"
        raise ValueError(f"module 0 ({type(model[0]).__name__}) changes what its tokenizer returns, {hint}.")
    return about | {"tokenizer": tokenizer.to_str()}


class _SentenceEmbeddings(nn.Module):
    """A SentenceTransformer with tensors as inputs, whose output are its embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.device = model, model.device
        self.config = getattr(model[0], "config", None)
        image = Image.new("L" if getattr(self.config, "num_channels", 3) == 1 else "RGB", (32, 32))
        sample = model.preprocess([image if "image" in model.modalities else "text"])
        self.inputs = {name: value for name, value in sample.items() if isinstance(value, Tensor)}
        self.constants = {name: value for name, value in sample.items() if name not in self.inputs}
        known, kinds = {*TEXT_INPUTS, "pixel_values"}, {*model.modalities} - {"message"}
        takes, has_prompts = ", ".join(self.inputs), any((model.prompts or {}).values())
        problems = [(0, f"takes {takes}", kinds not in ({"text"}, {"image"}) or not self.inputs.keys() <= known)]
        for name, module in enumerate(model):
            problems.append((name, "picks its modules by the input", hasattr(module, "sub_modules")))
            leaves_out = has_prompts and not getattr(module, "include_prompt", True)
            problems.append((name, "leaves out prompts, which the tensors do not mark", leaves_out))
        for name, problem, is_present in problems:
            if is_present:
                problem = f"module {name} ({type(model[name]).__name__}) {problem}"
                raise ValueError(f"{problem}; export_onnx needs tokens of text, or images.")

    def forward(self, return_dict: bool = True, **inputs: Tensor) -> dict[str, Tensor]:
        features = {**self.constants, **inputs}
        for module in self.model:
            features = module(features)
        return {"sentence_embedding": features["sentence_embedding"][:, : self.model.truncate_dim]}


def _quantize(file: Path, kept: set[str]) -> None:
    """Convert a file to int8, except the nodes of the `kept` modules."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(file, load_external_data=False)  # whose weights may be too large for one file
    del model.graph.value_info[:]  # older versions take shapes of transposed weights for others
    onnx.save(model, file)
    nodes = model.graph.node
    scopes = {node.name: " ".join(entry.value for entry in node.metadata_props) for node in nodes}
    quantize_dynamic(
        *(file, file),
        op_types_to_quantize=["MatMul", "Gemm", "Gather"],
        per_channel=True,
        reduce_range=True,  # products of 8-bit weights overflow on processors without VNNI
        nodes_to_exclude=[node for node, scope in scopes.items() if any(f"'{name}'" in scope for name in kept)],
    )
    file.with_name(f"{file.name}.data").unlink(missing_ok=True)


def _check_file(file: Path, inputs: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-3) -> None:
    """Raise an error unless onnxruntime computes the outputs of the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    outputs = session.run(list(expected), {name: value.numpy(force=True) for name, value in inputs.items()})
    for (name, values), output in zip(expected.items(), outputs, strict=True):
        if values.dtype == torch.bool:  # of a rejection, whose p-value is compared
            continue
        # On average, since rounding may move a single value across a threshold, for instance of the samples of `vmf`.
        difference, sizes = (torch.from_numpy(output) - values.cpu()).abs().mean().item(), values.abs()
        # The values of long unit embeddings are small.
        if not difference <= tolerance * min(max(1.0, sizes.max().item()), 20 * sizes.mean().item()) + 1e-6:
            hint = "Use other versions of torch and onnxscript." if tolerance < 1e-2 else "Leave out int8."
            raise RuntimeError(f"in onnxruntime the {name} differ from the model by {difference:.2g}. {hint}")


class _TupleOfTensors(nn.Module):
    """A model with positional inputs that returns the tensors of its output as a tuple."""

    def __init__(self, model: transformers.PreTrainedModel, inputs: dict[str, Tensor]) -> None:
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


def _example_inputs(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    """Return random inputs of the model, by name; no axis of variable length may be 0 or 1, which torch would fix."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if isinstance(model, _SentenceEmbeddings):
        names, shape = [*model.inputs], next(iter(model.inputs.values())).shape[1:]
    elif model.main_input_name == "pixel_values":
        sides = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        names, shape = ["pixel_values"], torch.Size((config.num_channels, *sides))
    else:
        has_types = "token_type_ids" in inspect.signature(model.forward).parameters
        names = TEXT_INPUTS[: 2 + (has_types and getattr(config, "type_vocab_size", 0) > 1)]
    if names == ["pixel_values"]:
        return {"pixel_values": torch.randn(batch, *shape, generator=generator).to(model.device)}
    inputs = {name: torch.ones(batch, length, dtype=torch.int64) for name in names}
    inputs["input_ids"].random_(getattr(config, "vocab_size", 2), generator=generator)
    inputs["attention_mask"][0, length // 2 :] = 0
    return {name: value.to(model.device) for name, value in inputs.items()}
