"""Load the sources of stored embeddings: the class directions of the model, and the images.

`embeddings.json` contains the names of the model and the data set. If they cannot be loaded, a `ValueError` or an
`OSError` is raised.
"""

import os
from typing import Any

from torch import Tensor

from hf_sphere.data.images import load_thumbnails
from hf_sphere.embeddings.extract import class_names, load_embedding_model
from hf_sphere.embeddings.store import Embeddings


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
