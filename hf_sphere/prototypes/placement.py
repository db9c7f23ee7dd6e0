"""Placement of class prototypes: `place_prototypes` and its result; class vectors from class names."""

import contextlib
import inspect
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits
from torch import Tensor

from hf_sphere.geometry.codes import separation, separation_bound
from hf_sphere.geometry.codes.bounds import nearest_others
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.prototypes.methods import METHODS, WITHOUT_CLASS_VECTORS, PlacementTask
from hf_sphere.prototypes.ordering import (
    OrderPreservation,
    TripletRanking,
    assign_to_classes,
    class_directions,
    measure_order,
)
from hf_sphere.utils.checks import check_choice, check_integer, check_names, check_seed, text_list
from hf_sphere.utils.files import atomic_file
from hf_sphere.utils.loading import load_model, load_pretrained
from hf_sphere.utils.modules import eval_mode
from hf_sphere.utils.pages import DataFrame, Table
from hf_sphere.utils.progress import progress_bar

OPTIMALITY_TOLERANCE = 1e-6  # maximum difference between separation and bound of an optimal placement


@dataclass(frozen=True, eq=False)  # comparing tensors does not return a single bool
class Placement(Table):
    """Class prototypes on the unit sphere, with their separation and a lower bound on it.

    Attributes:
        prototypes: Unit vectors, (K, d), float64.
        separation: Largest cosine between two prototypes; lower is better.
        bound: Lower bound on the separation of any K points in d dimensions.
        method: Description of how the prototypes were found.
        seconds: Duration of the search.
        order: How well the similarity order of the class vectors is preserved, if there are any.
        class_names: Class names, if known.
    """

    prototypes: Tensor = field(repr=False)
    separation: float
    bound: float
    method: str
    seconds: float
    order: OrderPreservation | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def optimal(self) -> bool:
        """Whether the separation is proved optimal, up to 1e-6."""
        return self.separation - self.bound <= OPTIMALITY_TOLERANCE

    def to_pandas(self) -> DataFrame:
        """Return a row per prototype: prototype (its class, if known), the nearest other one, and their cosine."""
        import pandas as pd

        names = self.class_names or range(len(self.prototypes))
        values, nearest = (column.tolist() for column in nearest_others(self.prototypes))
        return pd.DataFrame({"prototype": names, "nearest": [names[row] for row in nearest], "cosine": values})

    def __str__(self) -> str:
        count, dim = self.prototypes.shape
        proof = "proved optimal" if self.optimal else f"lower bound {self.bound:.6f}"
        lines = [
            f"{count} prototypes in {dim} dimensions",
            f"  largest cosine  {self.separation:.6f} ({proof})",
            f"  method          {self.method}, {self.seconds:.2f} s",
        ]
        if self.order is not None:
            lines.append(
                f"  order preserved {100 * self.order.triplet_accuracy:.1f} % of triplets (chance level 50), "
                f"rank correlation {self.order.rank_correlation:.3f}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Save the prototypes to a safetensors file, with the other attributes as JSON metadata."""
        names = ("separation", "bound", "optimal", "method", "seconds", "class_names")
        metadata = {name: getattr(self, name) for name in names} | {"order": self.order and vars(self.order)}
        with atomic_file(path) as unfinished:
            save_file({"prototypes": self.prototypes.contiguous()}, unfinished, {"placement": json.dumps(metadata)})

    @classmethod
    def load(cls, path: str | Path) -> "Placement":
        """Load a file written by `save`, or any safetensors file with a tensor `prototypes` (K, d).

        The prototypes are normalized, and separation and bound are recomputed.

        Raises:
            ValueError: If the prototypes are not finite and non-zero.
            SafetensorError: If the file is no safetensors file with such a tensor.
            FileNotFoundError: If the file does not exist.
        """
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("placement", "{}"))
            points = file.get_tensor("prototypes").double()
        if not (points.ndim == 2 and min(points.shape) > 1 and points.isfinite().all() and points.any(1).all()):
            raise ValueError(f"{path}: prototypes must be finite and non-zero, (K, d) with K and d at least 2.")
        if (torch.linalg.vector_norm(points, dim=1) - 1).abs().max() > 1e-12:  # saved prototypes are loaded unchanged
            points = project_to_sphere(points)
        names, order = metadata.get("class_names"), metadata.get("order")
        if names and len(names) != len(points):
            raise ValueError(f"{path}: there are {len(names)} class names for {len(points)} prototypes.")
        return cls(
            points,
            *_measure(points),
            method=metadata.get("method", "unknown"),
            seconds=metadata.get("seconds", 0.0),
            order=order and OrderPreservation(**order),
            class_names=names and tuple(names),
        )


def place_prototypes(
    num_classes: int,
    dim: int,
    *,
    method: str = "auto",
    class_vectors: Tensor | None = None,
    ordering: Literal["ranking", "assignment"] = "ranking",
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Placement:
    """Place class prototypes on the unit sphere, as far apart as possible.

    Args:
        num_classes: Number of prototypes K, at least 2.
        dim: Dimension d of the space, at least 2.
        method: `auto`, or one of `METHODS`.
        class_vectors: One vector per class, (K, any length), whose similarity order the prototypes should preserve, for
            instance from `embed_class_names`.
        ordering: How the order is preserved. `ranking` adds a ranking loss to the search, which may increase the
            largest cosine; `assignment` does not move the points and chooses which point belongs to which class.
        class_names: Class names to store with the prototypes.
        seed: Seed of all random numbers; results are reproducible on the same machine.
        progress: Whether to show a progress bar; None shows it after two seconds.
        **options: Options of the method: `restarts` for `auto`, `lbfgs` and `slsqp`; `max_iterations` for these and the
            SGD methods.

    Returns:
        The best placement found.

    Raises:
        ValueError: If an argument or an option of the method is invalid.

    Example:
        >>> print(place_prototypes(10, 3).separation)  # doctest: +SKIP
        0.40439...

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019.
    """
    num_classes, dim = check_integer("num_classes", num_classes, 2), check_integer("dim", dim, 2)
    seed, method = check_seed(seed), check_choice("method", method, METHODS)
    names = None if class_names is None else tuple(text_list("class_names", class_names))
    if names is not None and len(names) != num_classes:
        raise ValueError(f"there are {len(names)} class names for {num_classes} prototypes.")
    check_choice("ordering", ordering, ("ranking", "assignment"))
    if class_vectors is None and ordering != "ranking":
        raise ValueError("ordering requires class_vectors.")
    parameters = inspect.signature(METHODS[method]).parameters.values()
    check_names(f"method {method!r}", options, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY])
    check_integer("max_iterations", options.get("max_iterations", 1), 1)  # 0 would return random points
    if class_vectors is not None and ordering == "ranking" and method in WITHOUT_CLASS_VECTORS:
        raise ValueError(f"method {method!r} does not support a ranking loss; use ordering='assignment'.")
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(threadpool_limits(1, user_api="blas"))  # an idle pool of BLAS would slow down that of torch
        if torch.get_default_device().type != "cpu":  # the device context slows down each operation
            stack.enter_context(torch.device("cpu"))
        if num_classes**2 * dim < 10**7:  # a step takes milliseconds or less
            torch.set_num_threads(1)
        directions = None if class_vectors is None else class_directions(class_vectors, num_classes)
        ranking = TripletRanking(directions) if directions is not None and ordering == "ranking" else None
        task = PlacementTask(num_classes, dim, ranking, seed)
        started = time.perf_counter()
        goal = separation_bound(num_classes, dim) + 1e-10 if ranking is None else -math.inf  # the search stops there
        lowest, what = math.inf, "largest cosine" if ranking is None else "objective"
        delay, leave = (0, True) if progress else (2, False)
        bar_options: Any = {"disable": progress is False, "delay": delay, "desc": "placing", "leave": leave}
        with progress_bar(METHODS[method](task, **options), **bar_options) as bar:
            for candidate in bar:
                value = task.score(candidate.points)
                if value < lowest:
                    (points, origin), lowest = candidate, value
                    bar.set_postfix_str(f"{what} {lowest:.5f}", refresh=False)
                if lowest <= goal:
                    break
        order = None
        if directions is not None and ordering == "assignment":
            points = assign_to_classes(points, directions, task.generator)
            origin = f"{origin}, assigned"
        if class_vectors is not None:
            order = measure_order(points, class_vectors, seed=seed)
    return Placement(points, *_measure(points), origin, time.perf_counter() - started, order, names)


@torch.no_grad()  # unlike inference mode, it returns tensors that can be modified in place
def embed_class_names(
    class_names: Sequence[str],
    model: str | os.PathLike[str] | Any,
    *,
    tokenizer: Any = None,
    template: str = "{}",
) -> Tensor:
    """Embed class names by mean pooling of the last hidden states of a text model.

    Args:
        class_names: K names; underscores are replaced by spaces.
        model: Name or folder of an encoder or decoder that `AutoModel` loads, or a loaded model, on any device.
        tokenizer: Tokenizer; required for a loaded model. By default of the named model.
        template: Text with the placeholder `{}` for a name, for instance `a photo of a {}`.

    Returns:
        (K, hidden size), float32, on the CPU: `class_vectors` for `place_prototypes`.

    Raises:
        ValueError: If there are no names, one is empty, or the template has no placeholder.

    Example:
        >>> embed_class_names(["cat", "dog"], "sentence-transformers/all-MiniLM-L6-v2").shape  # doctest: +SKIP
    """
    from transformers import AutoModel, AutoTokenizer

    if "{}" not in template:
        raise ValueError(f"template must have '{{}}' where the class name goes; got {template!r}.")
    names = [name.replace("_", " ").strip() for name in text_list("class_names", class_names)]
    if not all(names):
        raise ValueError(f"class names must not be empty; got {names[:10]}.")
    if isinstance(model, str | os.PathLike):
        tokenizer = tokenizer or load_pretrained(AutoTokenizer, model)
        model = load_model(AutoModel, model)
    vectors = []
    with eval_mode(model):
        for name in names:  # one by one, since decoders often have no padding token
            tokens = tokenizer(template.replace("{}", name), truncation=True, return_tensors="pt").to(model.device)
            vectors.append(model(**tokens).last_hidden_state[0].float().mean(0).cpu())
    return torch.stack(vectors)


def _measure(points: Tensor) -> tuple[float, float]:
    """Separation and the lower bound on it, clamped because rounding could move it above the separation."""
    reached = separation(points).item()
    return reached, min(separation_bound(*points.shape), reached)
