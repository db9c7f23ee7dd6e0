"""Predictions and embeddings by a saved model: shared by processes, resumable after a kill, with progress."""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification
from transformers.image_utils import PILImageResampling
from transformers.modeling_outputs import ModelOutput

from hf_sphere import models
from hf_sphere.data import ImagesFromDisk, ImageSplit
from hf_sphere.data.decoding import cache_file
from hf_sphere.models.pretrained_backbones import pretrained_preprocessing
from hf_sphere.search.store import embeddings_writer
from hf_sphere.utils.checks import check_choice
from hf_sphere.utils.files import UNFINISHED, read_tensors
from hf_sphere.utils.loading import load_model, load_pretrained, split_weights
from hf_sphere.utils.modules import digest_weights
from hf_sphere.utils.problem_types import SINGLE_LABEL, class_probabilities, problem_type
from hf_sphere.utils.progress import progress_bar

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]
"""Columns of a batch by name, each (B, ...), and the `row` of each; without rows there are no other columns."""

MODELS = {
    "SphereVisionForImageClassification": models.SphereVisionForImageClassification,
    "SphereVisionModel": models.SphereVisionModel,
    "SphereVisionForFewShotClassification": models.SphereVisionModel,  # only the encoder
}
"""Class to load, by saved class."""

DECISIONS = ("known", "p_value", "class_p_values")
"""Outputs of a model with a rejection."""


def load_embedding_model(name: str) -> Any:
    """Load a model that embeds images, in float32 whatever the dtype of its file.

    Args:
        name: Folder or Hub id of a classifier, encoder or few-shot model (whose encoder is used) of type sphere_vision,
            of a model such as CLIP with `get_image_features` and `get_text_features`, or of another image encoder of
            transformers; see `TransformersBackbone`. Or `NAME=WEIGHTS`, a backbone of timm and a file or pip package
            of weights.

    Raises:
        ValueError: If the model is another one.

    Example:
        >>> model = load_embedding_model("outputs/my-model")  # doctest: +SKIP
    """
    backbone, weights = split_weights(name)
    if weights:
        options = pretrained_preprocessing(backbone)
        sizes = {key: options[key] for key in ("num_channels", "image_size")}
        config = models.SphereVisionConfig(backbone=backbone, head=None, **sizes)
        return models.SphereVisionModel(config, pretrained=weights)
    config = load_pretrained(AutoConfig, name)
    if hasattr(MODEL_MAPPING.get(type(config), None), "get_text_features"):
        return load_model(AutoModel, name, complete=True)
    if not isinstance(config, models.SphereVisionConfig):
        if getattr(config, "head", None) is not None:  # a spherized image encoder
            return load_model(AutoModelForImageClassification, name, complete=True)
        plain = models.SphereVisionConfig(backbone=name, head=None, num_channels=getattr(config, "num_channels", 3))
        return models.SphereVisionModel(plain, pretrained=name)
    saved = check_choice("the class of the model", (config.architectures or [None])[0], MODELS)
    return load_model(MODELS[saved], name, complete=True)


def load_image_processor(name: str) -> Any:
    """Load the image processor of a model that `load_embedding_model` loads."""
    backbone, weights = split_weights(name)
    if not weights:  # not AutoProcessor, which loads other models that a processor names, and offers to run code
        return load_pretrained(AutoImageProcessor, name)
    options = pretrained_preprocessing(backbone)
    (height, width), resample = options.pop("image_size"), PILImageResampling[options.pop("interpolation").upper()]
    return models.SphereVisionImageProcessor(size={"height": height, "width": width}, resample=resample, **options)


@torch.inference_mode()
def embed(model: Any, names: Sequence[str], **inputs: Tensor) -> dict[str, Tensor]:
    """Return the columns of the output of a model from `load_embedding_model`, float32 on the CPU, all finite.

    They are `embedding`, and those of the model's head. The error of a value that is not finite has one of the `names`
    of the images or texts.
    """
    if hasattr(model, "get_text_features"):
        features = model.get_image_features if "pixel_values" in inputs else model.get_text_features
        output = ModelOutput(embeddings=features(**inputs).pooler_output)
    else:
        output = model(**inputs)
    columns = {"embedding": output.embeddings.float().cpu()}
    if "logits" in output:
        logits = output.logits.float().cpu()
        probabilities = class_probabilities(logits, problem_type(model))
        if probabilities is None:
            columns["values"] = logits
        else:
            confidence, prediction = probabilities.max(-1)
            columns |= {"prediction": prediction, "confidence": confidence, "logits": logits}
    if output.get("concentration") is not None:
        columns["concentration"] = output.concentration.float().cpu()
    columns |= {name: output[name].cpu() for name in DECISIONS if output.get(name) is not None}
    check_finite(columns, names)
    return columns


def check_finite(columns: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise an error that has the name of the first row with a value that is not finite."""
    for column, values in columns.items():
        finite = values.isfinite().reshape(len(names), -1).all(-1)
        if not finite.all():
            name, hint = names[int((~finite).nonzero()[0])], "With --fp16 values may overflow: try --bf16"
            raise ValueError(f"{column} of {name} is not finite. Is the model trained? {hint}, or neither.")


def digest_decisions(model: Any) -> str:
    """Return a digest of calibration, rejection and problem type, if they are not the usual ones."""
    calibration, rejection = getattr(model.config, "calibration", None), getattr(model, "rejection", None)
    kind = [kind for kind in [problem_type(model)] if kind != SINGLE_LABEL]
    if calibration is None and rejection is None and not kind:
        return ""
    return digest_weights(rejection or torch.nn.Module(), [calibration, getattr(rejection, "settings", None), *kind])


def embedding_metric(model: Any) -> dict[str, Any]:
    """Return the distance of a model's embeddings, as options of `NeighborSearch`."""
    return model.head.metric() if hasattr(model, "head") else {"distance": "cosine"}


def backbone_name(model: Any) -> str:
    """Return the name of a model's backbone, or for a model without one its type."""
    return getattr(model.config, "backbone", model.config.model_type)


def class_names(model: Any) -> list[str]:
    """Return the names of the classes that a model predicts, by index; empty for a model without a head."""
    labels = model.config.id2label
    return [labels[index] for index in range(len(labels))] if hasattr(model, "head") else []


def finished_batches(output: str | PathLike) -> Path:
    """Return the folder, beside an output, that keeps finished batches; remove it when the output is written."""
    target = Path(output).resolve()
    return target.with_name(f".{target.name}.batches{UNFINISHED}")


def embed_batches(
    embed: Callable[[list[Sequence[int]]], Iterator[Batch]],
    rows: Sequence[int],
    *,
    batch_size: int,
    identity: Any = None,
    folder: Path | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
    unit: str = "image",
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the rows and the columns of batches in the order of the rows, the same on every process.

    `embed` yields a batch for each list of rows, with those that can be read, on the CPU; each process of the
    `accelerator` embeds every n-th batch. Finished ones are kept in the `folder`, see `finished_batches`, and only what
    is missing is embedded; the `identity` is that of the model, its settings and the source, and what another one left
    is not used. The `unit` is what a row is.
    """
    index, count = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    gather: Callable[[list[Any]], list[Any]] = gather_object if count > 1 else list
    kept = folder / Hasher.hash(identity) if folder is not None and index == 0 else None
    done = 0
    style: dict[str, Any] = {"desc": "Embedding", "unit": unit, "disable": not progress or index > 0, "leave": False}
    with progress_bar(total=len(rows), **style) as bar:
        while True:
            path = kept and kept / f"{done}.safetensors"
            batch = gather([read_tensors(path) if path and path.exists() else None])[0]
            if batch is None:
                break
            done = int(batch.pop("done"))
            bar.update(done - bar.n)
            if len(batch["row"]):
                yield batch.pop("row"), batch
        if done and index == 0:
            logger.warning("Continuing after %s of %s %ss, which an interrupted run embedded.", done, len(rows), unit)
        batches = [rows[at : at + batch_size] for at in range(done, len(rows), batch_size)]
        local = embed(batches[index::count])
        for at in range(0, len(batches), count):
            start, done = done, done + sum(map(len, batches[at : at + count]))
            parts = [part for part in gather([next(local, None)]) if part is not None]
            full = [part for part in parts if len(part["row"])] or parts[:1]
            batch = {name: torch.cat([part[name] for part in full]) for name in full[0]}
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                save_file(batch | {"done": torch.tensor(done)}, kept / "unfinished")
                (kept / "unfinished").replace(kept / f"{start}.safetensors")
            bar.update(done - start)
            if len(batch["row"]):
                yield batch.pop("row"), batch


def extract_embeddings(
    model: Any,
    images: ImageSplit,
    folder: str | PathLike,
    accelerator: Accelerator,
    *,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> list[str]:
    """Write the predictions and embeddings of a split to a folder; the main process writes.

    Args:
        model: A model from `load_embedding_model`, in eval mode and on its device.
        images: The split, from `load_image_split`.
        folder: Folder to write; replaced if it exists.
        accelerator: Defines the precision of the model and the processes.
        about: Sources of model and images, for `embeddings.json`; backbone, head and distance are added.
        progress: Whether to show a progress bar.

    Returns:
        The names of the columns.

    Example:
        >>> extract_embeddings(model, data, "outputs/embeddings", Accelerator())  # doctest: +SKIP
    """
    about = {**(about or {}), "backbone": backbone_name(model), "split": images.name}
    about |= {"head": model.config.head if hasattr(model, "head") else None, **embedding_metric(model)}
    if (kind := problem_type(model)) != SINGLE_LABEL:
        about["problem_type"] = kind
    if images.recorded:
        about["num_training_images"] = images.recorded["train"]
        if getattr(model.config, "calibration", None) is not None:
            about["num_calibration_images"] = images.recorded.get("validation", 0)
    names = {"class_names": images.class_names, "predicted_names": class_names(model)}
    split = "all_splits" if images.name == "all" else re.sub(r"\W+", "_", images.name).strip("_")  # for `datasets`
    is_main = accelerator.is_main_process
    writer = embeddings_writer(folder, split, about, **names) if is_main else nullcontext(lambda columns: None)
    kept, columns = finished_batches(folder), dict[str, Tensor]()
    batches: Any = images.batches
    if isinstance(batches, ImagesFromDisk):
        pixels = cache_file(batches.encoded).name, batches.encoded.transform
    else:
        pixels = hashlib.sha256(batches.images.cpu().flatten().numpy()).hexdigest(), None
    settings = [digest_weights(model), accelerator.mixed_precision, pixels, batches._scale, batches._shift]

    def embed_split(several: list[Sequence[int]]) -> Iterator[Batch]:
        indices = [torch.tensor(batch) for batch in several]
        taken = batches.take(torch.cat(indices), batches.batch_size) if indices else ()
        for rows, pixels in zip(indices, taken, strict=True):
            dataset_rows = batches.rows[rows]
            with accelerator.autocast():
                columns = embed(model, [f"image {row}" for row in dataset_rows.tolist()], pixel_values=pixels)
            labels = {"label": batches.labels.cpu()[rows]} if images.class_names else {}
            yield {"row": rows, "embedding": columns.pop("embedding"), **labels, **columns, "index": dataset_rows}

    with writer as write:
        for _, batch in embed_batches(
            embed_split,
            range(images.num_images),
            batch_size=batches.batch_size,
            identity=[*settings, digest_decisions(model), images.ids, images.class_names, batches.rows, batches.labels],
            folder=kept,
            accelerator=accelerator,
            progress=progress,
        ):
            columns = {**batch, "row_id": images.ids[batch["index"]]}
            write(columns)
    if is_main:
        shutil.rmtree(kept, ignore_errors=True)
    return list(columns)
