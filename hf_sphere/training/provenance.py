"""From embeddings back to what they were made of: the model's class directions, the images, the run's snapshots.

`recipes/extract_embeddings.py` notes model and data set beside the embeddings; what cannot be found is a `ValueError`
or an `OSError` that says why.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_model
from torch import Tensor

from hf_sphere.data import load_image_split
from hf_sphere.data.thumbnails import load_thumbnails
from hf_sphere.embedding_files import Embeddings
from hf_sphere.snapshot_files import Snapshot, list_snapshots
from hf_sphere.training.embedding import class_names_of, embed, find_preparation, in_order, load_embedder


@dataclass(frozen=True)
class Moment:
    """Embeddings after some epoch of a training.

    Attributes:
        epoch: Epochs trained.
        points: (N, d).
        labels: (N,) class indices.
        directions: (K, d), directions of the classes, if the model has them.
    """

    epoch: int
    points: Tensor
    labels: Tensor
    directions: Tensor | None


def find_directions(data: Embeddings) -> Tensor | None:
    """Directions or prototypes (K, d) of the classes, by the model that embedded; None of an encoder without a head.

    Raises:
        OSError: If the model is not there.
        ValueError: If its classes have no direction, or not in the space or not of the classes of the embeddings.
    """
    if data.about.get("model") is None or data.about.get("head") is None:
        return None
    return _directions_of(load_embedder(data.about["model"]), data)


def find_thumbnails(data: Embeddings, *, cache_dir: str | os.PathLike | None = None, progress: bool = True) -> Tensor:
    """The images that were embedded, small: uint8 (N, channels, height, width).

    Raises:
        OSError: If the data set is not there.
        ValueError: If it is not known which images these are.
    """
    if "dataset" not in data.about or data.indices is None:
        raise ValueError(f"{data.name} does not say which images were embedded.")
    return load_thumbnails(
        data.about["dataset"],
        data.about["split"].split("+"),
        data.indices,
        config_name=data.about.get("dataset_config_name"),
        cache_dir=cache_dir,
        progress=progress,
    )


def find_snapshots_of(data: Embeddings) -> list[Snapshot]:
    """The snapshots of the run that embedded, by epoch.

    Raises:
        ValueError: If there are fewer than two, or model or data set are not known.
    """
    run, dataset = data.about.get("model"), data.about.get("dataset")
    if run is None or dataset is None:
        raise ValueError(
            f"{data.name} does not say which model embedded which data set, so there is no film of it; "
            "recipes/extract_embeddings.py notes that."
        )
    snapshots = list_snapshots(run)
    if len(snapshots) < 2:
        raise ValueError(
            f"a film needs the snapshots of a run, two at least, and {run} has {len(snapshots)}; train with "
            "--snapshot_epochs 1."
        )
    return snapshots


def embed_snapshots(
    data: Embeddings,
    snapshots: Sequence[Snapshot],
    *,
    max_samples: int,
    seed: int = 0,
    cache_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Iterator[Moment]:
    """Embed some images of the data set with the weights of each snapshot, the same images for all.

    Args:
        data: The embeddings whose run and data set these are.
        snapshots: Of that run.
        max_samples: Images to embed.
        seed: Seed of their choice.
        cache_dir: Folder for decoded images; below the Hugging Face home if None.
        progress: Whether to show a progress bar while images are decoded.
    """
    about, accelerator = data.about, Accelerator()
    model = load_embedder(about["model"]).to(accelerator.device).eval()
    split = load_image_split(
        about["dataset"],
        about["split"].split("+")[-1],
        **find_preparation(about["model"], model.config),
        config_name=about.get("dataset_config_name"),
        train_classes=about.get("train_classes"),
        max_samples=max_samples,
        seed=seed,
        cache_dir=cache_dir,
        device=accelerator.device,
        progress=progress,
    )
    for snapshot in snapshots:
        load_model(model, snapshot.path, device=str(accelerator.device))
        columns = list(in_order(embed(model, split.batches, accelerator), split.batches))
        points, labels = (torch.cat([part[name] for part in columns]) for name in ("embedding", "label"))
        try:
            directions = _directions_of(model, data)
        except ValueError:
            directions = None
        yield Moment(snapshot.epoch, points, labels, directions)


def _directions_of(model: Any, data: Embeddings) -> Tensor | None:
    if not hasattr(model, "head"):
        return None
    directions, width = model.head.directions(), data.embeddings.shape[1]
    if directions is None:
        raise ValueError(f"those of a {model.config.head} head have none.")
    if directions.shape[1] != width:
        raise ValueError(f"they have {directions.shape[1]} coordinates, and the embeddings {width}.")
    if data.labels is None or class_names_of(model) != data.class_names:
        raise ValueError("the classes of the data are not those of the model.")
    return directions.float().cpu()
