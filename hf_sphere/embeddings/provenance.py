"""From embeddings back to what they were made of: the model's class directions, the images, the run's snapshots.

`recipes/extract_embeddings.py` notes model and data set beside the embeddings; what cannot be found is a `ValueError`
or an `OSError` that says why.
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

from hf_sphere.data import ImageDataOptions, load_image_split
from hf_sphere.data.thumbnails import load_thumbnails
from hf_sphere.embeddings.extract import class_names_of, embed, find_preparation, in_order, load_embedder
from hf_sphere.embeddings.store import Embeddings
from hf_sphere.utils.snapshots import Snapshot, list_snapshots


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
        image_column=data.about.get("image_column_name"),
        cache_dir=cache_dir,
        progress=progress,
    )


def find_snapshots_of(data: Embeddings) -> list[Snapshot]:
    """The snapshots of the run that embedded, by epoch.

    Raises:
        ValueError: If there are fewer than two, or model or data set are not known.
    """
    run, dataset = data.about.get("model"), data.about.get("dataset")
    if run is None or dataset is None or data.indices is None:
        raise ValueError(
            f"{data.name} does not say which model embedded which images of which data set, so there is no film of it; "
            "recipes/extract_embeddings.py notes that."
        )
    if not Path(run).is_dir():
        raise ValueError(f"a film needs the snapshots of a run, and {run} is no folder; was it moved?")
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
    """Embed some of the images again with the weights of each snapshot, the same ones for all.

    Args:
        data: The embeddings whose run and data set these are.
        snapshots: Of that run.
        max_samples: Images of the data set to take; those that are among the embeddings are shown.
        seed: Seed of their choice.
        cache_dir: Folder for decoded images; below the Hugging Face home if None.
        progress: Whether to show a progress bar while images are decoded.
    """
    about, accelerator = data.about, Accelerator()
    model = load_embedder(about["model"]).to(accelerator.device).eval()
    options = ImageDataOptions(
        about["dataset"],
        about.get("dataset_config_name"),
        train_split=about.get("train_split") or "train",
        image_column_name=about.get("image_column_name"),
        **find_preparation(about["model"], model.config, about.get("image_mean"), about.get("image_std")),
        skip_corrupt_images=True,
        cache_dir=None if cache_dir is None else str(cache_dir),
    )
    split = load_image_split(
        options,
        about["split"].split("+")[-1],
        train_classes=about.get("train_classes"),
        max_samples=max_samples,
        seed=seed,
        device=accelerator.device,
        progress=progress,
    )
    for snapshot in snapshots:
        load_model(model, snapshot.path, device=str(accelerator.device))
        columns = list(in_order(embed(model, split.batches, accelerator, labelled=False), split.batches))
        points, rows = (torch.cat([part[name] for part in columns]) for name in ("embedding", "index"))
        points, labels = _labelled(points, rows, data)
        try:
            directions = _directions_of(model, data)
        except ValueError:
            directions = None
        yield Moment(snapshot.epoch, points, labels, directions)


def _labelled(points: Tensor, rows: Tensor, data: Embeddings) -> tuple[Tensor, Tensor]:
    """Keep the points (N, d) whose rows (N,) are among the embeddings, and give them the labels that these have."""
    known = data.indices
    assert known is not None  # there are no snapshots of embeddings without
    places = torch.full((int(max(known.max(), rows.max())) + 1,), -1)
    places[known] = torch.arange(len(known))
    places = places[rows]
    labels = torch.zeros(len(known), dtype=torch.long) if data.labels is None else data.labels
    return points[places >= 0], labels[places[places >= 0]]


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
