"""All figures and metrics of a stored embedding dataset; class directions and images come from its provenance."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.data.images import load_thumbnails
from hf_sphere.metrics import alignment, class_angles, effective_dimension, uniformity
from hf_sphere.search.extract import class_names, load_embedding_model
from hf_sphere.search.store import Embeddings
from hf_sphere.visualization.figures import plain_text
from hf_sphere.visualization.interactive import write_interactive_sphere
from hf_sphere.visualization.results import plot_class_angles
from hf_sphere.visualization.scene import Panel, Scene, plot_scenes
from hf_sphere.visualization.sphere import make_scene


class EmbeddingPictures:
    """Figures and metrics of embeddings that `hf_sphere.search.store.read_embeddings` returns.

    Args:
        data: The embeddings; without labels they are drawn as a single class.
        dim: 2 for the circle, 3 for the sphere; the circle for embeddings of two coordinates if None.
        title: Title of the figures; model and dataset if None.

    Attributes:
        notes: Messages about what could not be found, measured or drawn, and why.

    Raises:
        ValueError: If `dim` does not fit the embeddings, or one of them has no direction.

    Example:
        >>> EmbeddingPictures(read_embeddings("outputs/embeddings")).plot("sphere.png")  # doctest: +SKIP
    """

    def __init__(self, data: Embeddings, *, dim: Literal[2, 3] | None = None, title: str | None = None) -> None:
        self.data = data
        self.dim = dim or (2 if data.embeddings.shape[1] <= 2 else 3)
        self.labels = torch.zeros(len(data.embeddings), dtype=torch.long) if data.labels is None else data.labels
        self.class_names = ["embeddings"] if data.labels is None else data.class_names
        names = [Path(data.about[name]).name for name in ("model", "dataset") if name in data.about]
        self.name = ", ".join(names) or Path(data.name).name
        self.title = self.name if title is None else title
        self.notes: list[str] = []
        self.directions = self._find("directions of the classes", find_directions, data)
        panel = Panel(data.embeddings, self.labels, self.directions)
        self.scene: Scene = make_scene(f"embeddings of {data.name}", panel, self.class_names, self.dim)

    def measure(self) -> dict[str, float]:
        """Compute metrics of the directions of the embeddings; undefined metrics are noted and omitted."""
        points, labels = F.normalize(self.data.embeddings.double(), dim=-1), self.labels
        measures: dict[str, Callable[[], float]] = {
            "uniformity": lambda: uniformity(points),
            "effective_dimension": lambda: effective_dimension(points),
            "alignment": lambda: alignment(points, labels),
            "mean_angle_within": lambda: class_angles(points, labels)[0].mean().item(),
            "mean_angle_between": lambda: class_angles(points, labels)[1].mean().item(),
        }
        if self.data.labels is None:
            self.notes.append("there are no classes without a column label: no colors, alignment and angles.")
            measures = {name: measures[name] for name in ("uniformity", "effective_dimension")}
        found = {name: self._find(name.replace("_", " "), measure) for name, measure in measures.items()}
        sizes = {"num_embeddings": len(points), "embedding_dim": points.shape[1]}
        return sizes | {name: value for name, value in found.items() if value is not None}

    @plain_text()
    def plot(self, path: str | Path, others: Sequence["EmbeddingPictures"] = (), *, title: str | None = None) -> None:
        """Draw the embeddings on the circle or on the sphere, beside others if there are any; see `check_gallery`."""
        every = (self, *others)
        is_unique = len({each.name for each in every}) == len(every)
        scenes = {(each.name if is_unique else each.data.name) * bool(others): each.scene for each in every}
        plot_scenes(scenes, self.title if title is None else title, path, 2 if self.dim == 3 else 3)

    def plot_angles(self, path: str | Path) -> None:
        """Draw the angles within and between classes, or note why they cannot be drawn."""
        if self.data.labels is not None:  # a single class, or single points, have no such angles
            options = {"title": self.title, "path": path}
            self._find("figure of angles", plot_class_angles, self.data.embeddings, self.labels, **options)

    def write_page(self, path: str | Path, *, thumbnails: bool = True, **options: Any) -> None:
        """Write the interactive sphere; for `options`, see `load_thumbnails`."""
        data, texts = self.data, [""] * len(self.labels)
        images = self._find("thumbnails", find_thumbnails, data, **options) if thumbnails else None
        if data.indices is not None:
            texts = [f"row {index}" for index in data.indices.tolist()]
        if data.predictions is not None:
            predicted = zip(texts, data.predictions.tolist(), data.certainties["confidence"].tolist(), strict=True)
            texts = [f"{text}\npredicted {data.predicted_names[k]} ({100 * p:.1f} %)" for text, k, p in predicted]
        both = zip(texts, data.texts or [""] * len(texts), strict=True)
        options = {"texts": ["\n".join(pair).strip("\n") for pair in both], "images": images}
        options |= {"directions": self.directions, "title": self.title}
        write_interactive_sphere(path, data.embeddings, self.labels, self.class_names, **options)

    def check_gallery(self, others: Sequence["EmbeddingPictures"]) -> None:
        """Raise a ValueError if the classes of others differ, so that they cannot share a gallery with these."""
        if different := [other.data.name for other in others if other.class_names != self.class_names]:
            raise ValueError(f"{different[0]} and {self.data.name} have different classes, but one legend.")

    def _find(self, what: str, find: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Find or draw something that belongs to the embeddings, or note why this is impossible."""
        try:
            return find(*args, **options)
        except (OSError, ValueError) as error:
            self.notes.append(f"no {what}: {str(error).splitlines()[0]}")
            return None


def find_directions(data: Embeddings) -> Tensor | None:
    """Load the directions or prototypes (K, d) of the classes from the model; None for an encoder without a head."""
    if data.about.get("model") is None or data.about.get("head") is None:
        return None
    model: Any = load_embedding_model(data.about["model"])
    if not hasattr(model, "head"):
        return None
    directions, dim = model.head.directions(), data.embeddings.shape[1]
    if directions is None or directions.shape[1] != dim:
        raise ValueError(f"the classes of this {model.config.head} head have no directions in {dim} dimensions.")
    if data.labels is None or class_names(model) != data.class_names:
        raise ValueError("the data and the model have different classes.")
    return directions.float().cpu()


def find_thumbnails(data: Embeddings, **options: Any) -> Tensor:
    """Load thumbnails of the embedded images: uint8 (N, channels, height, width)."""
    about = data.about
    if "dataset" not in about or data.indices is None:
        raise ValueError(f"{data.name} does not store which images were embedded.")
    columns: Any = {"config_name": about.get("dataset_config_name"), "image_column": about.get("image_column_name")}
    return load_thumbnails(about["dataset"], about["split"].split("+"), data.indices, **columns, **options)
