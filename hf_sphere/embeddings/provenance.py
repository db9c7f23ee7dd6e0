"""Load the sources of stored embeddings: the model's class directions, the images and the snapshots of the run.

`embeddings.json` contains the names of the model and the data set. If they cannot be loaded, a `ValueError` or an
`OSError` is raised.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_model
from torch import Tensor

from hf_sphere.data import ImageSourceOptions
from hf_sphere.data.images import load_thumbnails
from hf_sphere.embeddings.extract import class_names, embed_split, load_embedding_model, load_source_images
from hf_sphere.embeddings.store import Embeddings
from hf_sphere.utils.snapshots import Snapshot, list_snapshots


@dataclass(frozen=True)
class EpochEmbeddings:
    """Embeddings (N, d) and class indices (N,) after an epoch of training, and directions of the classes (K, d)."""

    epoch: int
    points: Tensor
    labels: Tensor
    directions: Tensor | None


def find_directions(data: Embeddings) -> Tensor | None:
    """Load the directions or prototypes (K, d) of the classes from the model; None for an encoder without a head.

    Raises:
        OSError: If the model does not exist.
        ValueError: If the head has no class directions, or the embeddings have another dimension or other classes.
    """
    if data.about.get("model") is None or data.about.get("head") is None:
        return None
    return _class_directions(load_embedding_model(data.about["model"]), data)


def find_thumbnails(data: Embeddings, *, cache_dir: str | os.PathLike | None = None, progress: bool = True) -> Tensor:
    """Load thumbnails of the embedded images: uint8 (N, channels, height, width).

    Raises:
        OSError: If the data set does not exist.
        ValueError: If the embeddings do not identify their images.
    """
    if "dataset" not in data.about or data.indices is None:
        raise ValueError(f"{data.name} does not store which images were embedded.")
    return load_thumbnails(
        data.about["dataset"],
        data.about["split"].split("+"),
        data.indices,
        config_name=data.about.get("dataset_config_name"),
        image_column=data.about.get("image_column_name"),
        cache_dir=cache_dir,
        progress=progress,
    )


def find_snapshots_of(data: Embeddings) -> list[Snapshot]:
    """List the snapshots of the training run of the model that computed the embeddings, by epoch.

    Raises:
        ValueError: If there are fewer than two, or the embeddings do not identify their model or their images.
    """
    run = data.about.get("model")
    if run is None or "dataset" not in data.about or data.indices is None:
        raise ValueError(f"a film needs model and images of the embeddings; {data.name} does not store them.")
    if not Path(run).is_dir():
        raise ValueError(f"a film needs the snapshots of a run, but {run} is not a folder. Was it moved?")
    snapshots = list_snapshots(run)
    if len(snapshots) < 2:
        raise ValueError(f"{run} has {len(snapshots)} snapshots, but a film needs two; train with --snapshot_epochs 1.")
    return snapshots


def embed_snapshots(
    data: Embeddings,
    snapshots: Sequence[Snapshot],
    *,
    max_samples: int,
    seed: int = 0,
    cache_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Iterator[EpochEmbeddings]:
    """Embed some of the images with the weights of each snapshot of `find_snapshots_of`.

    The images are the same for all snapshots: `max_samples` of the data set, without those that have no stored
    embedding.
    """
    about, accelerator = data.about, Accelerator()
    model = load_embedding_model(about["model"]).to(accelerator.device).eval()
    names = ("dataset_config_name", "image_column_name", "image_mean", "image_std")
    stored: dict[str, Any] = {name: about.get(name) for name in names}
    options = ImageSourceOptions(
        about["dataset"],
        train_split=about.get("train_split") or "train",
        skip_corrupt_images=True,
        cache_dir=None if cache_dir is None else str(cache_dir),
        **stored,
    )
    split = load_source_images(
        about["model"],
        model.config,
        options,
        about["split"].split("+")[-1],
        train_classes=about.get("train_classes"),
        max_samples=max_samples,
        device=accelerator.device,
        seed=seed,
        progress=progress,
    )
    for snapshot in snapshots:
        load_model(model, snapshot.path, device=str(accelerator.device))
        columns = list(embed_split(model, split.batches, accelerator, labeled=False))
        points, rows = (torch.cat([part[name] for part in columns]) for name in ("embedding", "index"))
        points, labels = _select_stored(points, rows, data)
        try:
            directions = _class_directions(model, data)
        except ValueError:
            directions = None
        yield EpochEmbeddings(snapshot.epoch, points, labels, directions)


def _select_stored(points: Tensor, rows: Tensor, data: Embeddings) -> tuple[Tensor, Tensor]:
    """Select the points (N, d) whose rows (N,) have stored embeddings; return them and their stored labels."""
    stored = data.indices
    assert stored is not None  # find_snapshots_of requires them
    index_of_row = torch.full((int(max(stored.max(), rows.max())) + 1,), -1)
    index_of_row[stored] = torch.arange(len(stored))
    index = index_of_row[rows]
    labels = torch.zeros(len(stored), dtype=torch.long) if data.labels is None else data.labels
    return points[index >= 0], labels[index[index >= 0]]


def _class_directions(model: Any, data: Embeddings) -> Tensor | None:
    if not hasattr(model, "head"):
        return None
    directions, dim = model.head.directions(), data.embeddings.shape[1]
    if directions is None:
        raise ValueError(f"the classes of a {model.config.head} head have no directions.")
    if directions.shape[1] != dim:
        raise ValueError(f"the directions have {directions.shape[1]} dimensions and the embeddings {dim}.")
    if data.labels is None or class_names(model) != data.class_names:
        raise ValueError("the classes of the data differ from those of the model.")
    return directions.float().cpu()
