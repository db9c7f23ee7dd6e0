"""How closely export, compilation, ONNX, half precision and int8 reproduce each head and each encoder.

pip install torchao
python benchmarks/runtimes.py

The models are small and, apart from the fit of a spherized layer, not trained. Writes `results/runtimes.json`;
`report.py` writes the table of `docs/runtimes.md` from it.
"""

import copy
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from common import report, row
from torch import Tensor, nn

import hf_sphere
from hf_sphere.nn.heads.base import heads_of

LARGEST_DIFFERENCE, SMALLEST_COSINE = 1e-4, 0.995
SETTINGS = {"published": (5.0, 1e-6), "gentle": (0.5, 0.5)}  # scaling and delta
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "initializer_range": 0.1}
TIMM_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
DYNAMIC = "Int8DynamicActivationInt8WeightConfig"
WEIGHT_ONLY = "Int8WeightOnlyConfig"

Batch = dict[str, Tensor]
Case = tuple[str, Any, Callable[[int], Batch]]


def images(channels: int, size: int) -> Callable[[int], Batch]:
    """Return a function that draws a batch of images of a given length."""
    return lambda count: {"pixel_values": torch.randn(count, channels, size, size)}


def texts(count: int) -> Batch:
    """Draw a batch of token ids, with a mask that leaves out the end of the first text."""
    mask = torch.ones(count, 12, dtype=torch.int64)
    mask[0, 8:] = 0
    return {"input_ids": torch.randint(5, 50, (count, 12)), "attention_mask": mask}


def cases() -> Iterator[Case]:
    """Build the models, each with its name and a function that draws a batch."""
    from hf_sphere.models.sphere_encoder import ENCODERS
    from hf_sphere.nn.heads import HEADS

    digits = {"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 10}
    for head in HEADS:
        yield f"head {head}", image_model(head=head, **digits), images(1, 28)
    colors = {"num_channels": 3, "image_size": 32, "embedding_dim": 16, "num_labels": 10}
    for name, options in {"resnet10t": {}, "vit_tiny_patch16_224": TIMM_VIT}.items():
        yield f"timm {name}", image_model(backbone=name, backbone_kwargs=options, **colors), images(3, 32)
    for encoder in ENCODERS:
        for name in SETTINGS:
            yield f"{encoder}, {name}", *encoder_model(encoder, *SETTINGS[name])


def image_model(**options: Any) -> Any:
    """Build an image classifier and initialize its head from data."""
    from hf_sphere.training import initialize_from_data

    config = hf_sphere.SphereVisionConfig(**options)
    model = hf_sphere.SphereVisionForImageClassification(config).eval()
    initialize_from_data(model, [images(config.num_channels, config.input_size[0])(16)])
    return model


def encoder_model(encoder: str, scaling: float, delta: float) -> tuple[Any, Callable[[int], Batch]]:
    """Build a plain encoder and a spherized one fitted to it."""
    from hf_sphere.models.sphere_encoder import ENCODERS

    if encoder == "vit":
        sizes, draw = {"image_size": 16, "patch_size": 4, "num_channels": 1}, images(1, 16)
    else:
        sizes, draw = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}, texts
    # without dropout, so that the training steps can be compared; BERT's and DistilBERT's names
    sizes |= SIZES | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    if encoder == "distilbert":
        sizes |= {"hidden_dim": 128, "dropout": 0.0, "attention_dropout": 0.0}
    else:
        sizes["intermediate_size"] = 128
    plain = getattr(transformers, f"{ENCODERS[encoder]}Model")
    spherized = getattr(hf_sphere, f"Sphere{ENCODERS[encoder]}Model")
    reference = plain(plain.config_class(**sizes)).eval()
    config = spherized.config_class(**sizes, spherization_scaling=scaling, spherization_delta=delta)
    model = spherized(config).eval()
    model.load_state_dict(reference.state_dict(), strict=False)
    hf_sphere.fit_spherization(model, reference, [draw(8) for _ in range(40)])
    return model, draw


def tensors(output: Any) -> Batch:
    """Return the tensors of an output by name."""
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


@torch.no_grad()
def outputs(run: Callable[..., Any], batch: Batch) -> Batch:
    """Call a model, a compiled model or an exported program."""
    return tensors(run(**batch))


def difference(found: Batch, expected: Batch) -> float:
    """Return the largest absolute difference."""
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def cosine(model: Any, batch: Batch, expected: Batch) -> float:
    """Return the mean cosine between the first output and the expected one."""
    name, values = next(iter(expected.items()))
    return F.cosine_similarity(outputs(model, batch)[name].float(), values, dim=-1).mean().item()


def exported(model: Any, draw: Callable[[int], Batch]) -> float:
    """Compare the exported program."""
    batch = draw(3)
    return difference(outputs(torch.export.export(model, (), batch).module(), batch), outputs(model, batch))


def onnx(model: Any, draw: Callable[[int], Batch]) -> float:
    """Compare onnxruntime with batches of 1 and 7."""
    import onnxruntime

    from hf_sphere.export import export_onnx

    model = copy.deepcopy(model)
    if hasattr(getattr(model, "head", None), "prediction"):
        model.head.prediction = "mean"
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(Path(folder) / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    worst = 0.0
    for count in (1, 7):
        batch = draw(count)
        # the example with token types of zero, which the models assume if they are not given
        zeros = {given.name: torch.zeros(count, 12, dtype=torch.int64) for given in session.get_inputs()}
        inputs = {name: tensor.numpy() for name, tensor in (zeros | batch).items()}
        found = dict(zip(names, map(torch.from_numpy, session.run(names, inputs)), strict=True))
        worst = max(worst, difference(found, outputs(model, batch)))
    return worst


def compiled(model: Any, draw: Callable[[int], Batch]) -> float:
    """Compare the compiled model."""
    batch = draw(3)
    return difference(outputs(torch.compile(model), batch), outputs(model, batch))


def step(model: Any, draw: Callable[[int], Batch]) -> float:
    """Compare the gradients of a compiled training step."""
    batch = draw(4)
    if hasattr(model, "head"):
        batch["labels"] = torch.arange(4)
    gradients = []
    for run in (lambda model: model, torch.compile):
        trained = copy.deepcopy(model).train()
        for head in heads_of(trained):
            head.before_forward(0, torch.arange(4))  # the same random numbers
        result = run(trained)(**batch)
        loss = result.loss if "labels" in batch else sum(x.square().mean() for x in tensors(result).values())
        loss.backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.grad is not None})
    eager, other = gradients
    if eager.keys() != other.keys():
        raise ValueError("the compiled step gave gradients to other parameters")
    return difference(other, eager) / max(gradient.abs().max().item() for gradient in eager.values())


def half(dtype: torch.dtype) -> Callable[..., float]:
    """Compare a model converted to another dtype."""

    def measure(model: Any, draw: Callable[[int], Batch]) -> float:
        batch = draw(16)
        converted = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return cosine(copy.deepcopy(model).to(dtype), converted, outputs(model, batch))

    return measure


def int8(config: str, every_map: bool = False) -> Callable[..., float]:
    """Compare a model quantized by torchao, with or without the maps after a spherization."""

    def measure(model: Any, draw: Callable[[int], Batch]) -> float:
        from torchao import quantization

        from hf_sphere.nn.layers import names_kept_in_float32

        batch = draw(16)
        kept = () if every_map else tuple(names_kept_in_float32(model))
        quantized = copy.deepcopy(model)
        quantization.quantize_(  # a subclass, such as `AngularLinear`, does not compute dot products
            quantized,
            getattr(quantization, config)(),
            lambda m, name: type(m) is nn.Linear and not name.startswith(kept),
        )
        return cosine(quantized, batch, outputs(model, batch))

    return measure


COLUMNS: dict[str, tuple[Callable[..., float], dict[str, float]]] = {
    "export": (exported, {"at_most": LARGEST_DIFFERENCE}),
    "ONNX": (onnx, {"at_most": LARGEST_DIFFERENCE}),
    "compiled": (compiled, {"at_most": LARGEST_DIFFERENCE}),
    "step": (step, {"at_most": LARGEST_DIFFERENCE}),
    "fp16": (half(torch.float16), {}),
    "bf16": (half(torch.bfloat16), {}),
    "int8": (int8(WEIGHT_ONLY), {"at_least": SMALLEST_COSINE}),
    "int8 dynamic": (int8(DYNAMIC), {"at_least": SMALLEST_COSINE}),
    "int8, all": (int8(WEIGHT_ONLY, every_map=True), {}),
}
PRECISIONS = ("fp16", "bf16", "int8", "int8 dynamic", "int8, all")  # the others do not depend on the setting


def measure(function: Callable[..., float], model: Any, draw: Callable[[int], Batch]) -> float:
    """Measure one cell; NaN, which holds no bound, if it fails."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        return function(model, draw)
    except Exception:
        traceback.print_exc()
        return float("nan")


def main() -> None:
    """Measure all cells and write the results."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # a deprecation in torchao's import
    import onnxruntime
    import torchao

    torch.manual_seed(0)
    rows = []
    for name, model, draw in cases():
        values = {
            column: measure(function, model, draw)
            for column, (function, _) in COLUMNS.items()
            if not name.endswith("gentle") or column in PRECISIONS
        }
        rows += [row(f"{name}: {column}", value, **COLUMNS[column][1]) for column, value in values.items()]
        print(name, *(f"{column} {value:.4g}" for column, value in values.items()), sep="  ", flush=True)
    report("runtimes", rows, torchao=torchao.__version__, onnxruntime=onnxruntime.__version__)


if __name__ == "__main__":
    main()
