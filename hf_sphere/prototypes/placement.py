"""Where class prototypes go: `place_prototypes` and what it returns."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits
from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.geometry.codes import separation, separation_bound
from hf_sphere.prototypes.checks import check_integer
from hf_sphere.prototypes.methods import METHODS, Candidate, Method, Task
from hf_sphere.prototypes.ordering import (
    Ordering,
    OrderPreservation,
    assign_to_classes,
    check_class_vectors,
    measure_order,
)
from hf_sphere.utils.files import atomic_file

logger = logging.getLogger(__name__)

PROOF_TOLERANCE = 1e-6
"""A placement counts as optimal when its separation is within this of the bound."""


@dataclass(frozen=True, eq=False, repr=False)  # tensors do not compare to one truth value
class Placement:
    """Class prototypes on the unit sphere, and how good they are.

    Attributes:
        prototypes: (K, d), unit vectors, float64.
        separation: Largest cosine between two prototypes; lower is better.
        bound: Lower bound: no placement of as many points in as many dimensions has a smaller separation.
        method: How they were found.
        seconds: Time it took.
        interrupted: Whether the search was stopped before its end.
        order: With class vectors, how well the order of their similarities is kept.
        class_names: Name of each class, where known.
    """

    prototypes: Tensor
    separation: float
    bound: float
    method: str
    seconds: float
    interrupted: bool = False
    order: OrderPreservation | None = None
    class_names: tuple[str, ...] | None = None

    @property
    def optimal(self) -> bool:
        """Whether the separation is proved to be the smallest possible, to 1e-6."""
        return self.separation - self.bound <= PROOF_TOLERANCE

    def __repr__(self) -> str:
        count, dim = self.prototypes.shape
        return (
            f"Placement({count} prototypes in {dim} dimensions, separation={self.separation:.6f}, "
            f"bound={self.bound:.6f}, optimal={self.optimal}, method={self.method!r})"
        )

    def __str__(self) -> str:
        count, dim = self.prototypes.shape
        proof = "proved optimal" if self.optimal else f"no placement is below {self.bound:.6f}"
        lines = [
            f"{count} prototypes in {dim} dimensions",
            f"  largest cosine  {self.separation:.6f} ({proof})",
            f"  method          {self.method}{', interrupted' if self.interrupted else ''}, {self.seconds:.2f} s",
        ]
        if self.order is not None:
            lines.append(
                f"  order kept      {100 * self.order.triplet_accuracy:.1f} % of triplets (chance 50), "
                f"rank correlation {self.order.rank_correlation:.3f}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write prototypes and facts to a safetensors file."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in _FACTS}
        facts["order"] = None if self.order is None else vars(self.order)
        with atomic_file(path) as unfinished:
            save_file({"prototypes": self.prototypes.contiguous()}, unfinished, {"placement": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> "Placement":
        """Read a file that `save` has written, or any safetensors file with a tensor `prototypes` (K, d).

        Raises:
            ValueError: If the file holds no finite, non-zero prototypes, or facts that do not belong to them.
            FileNotFoundError: If there is no such file.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"there is no prototypes file {path}. recipes/place_prototypes.py writes prototypes.safetensors into "
                "its --output_dir."
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = (file.metadata() or {}).get("placement", "{}")
                points = file.get_tensor("prototypes").double()
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no prototypes file (safetensors with a tensor `prototypes`): {error}"
            ) from error
        if points.ndim != 2 or len(points) < 2 or points.shape[1] < 2 or not points.isfinite().all():
            raise ValueError(f"{path}: prototypes must be a finite (K, d) matrix, K and d at least 2.")
        norms = torch.linalg.vector_norm(points, dim=1, keepdim=True)
        if not norms.all():
            raise ValueError(f"{path}: a prototype is zero and has no direction.")
        if (norms - 1).abs().max() > 1e-12:  # what `save` has written stays as it is, to the last bit
            points = points / norms
        try:
            facts = json.loads(metadata)
            order = None if facts.get("order") is None else OrderPreservation(**facts["order"])
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: the metadata `placement` are not those that `save` writes: {error}") from error
        names = facts.get("class_names")
        if names is not None and len(names) != len(points):
            raise ValueError(f"{path}: there are {len(names)} class names for {len(points)} prototypes.")
        # Measured anew: a file may come from anywhere.
        reached, bound = _measure(points)
        return cls(
            points,
            separation=reached,
            bound=bound,
            method=facts.get("method", "unknown"),
            seconds=facts.get("seconds", 0.0),
            interrupted=facts.get("interrupted", False),
            order=order,
            class_names=None if names is None else tuple(names),
        )


_FACTS = ("separation", "bound", "optimal", "method", "seconds", "interrupted", "class_names")


def place_prototypes(
    num_classes: int,
    dim: int,
    *,
    method: str = "auto",
    class_vectors: Tensor | None = None,
    ordering: Literal["ranking", "assignment"] = "ranking",
    ordering_weight: float = 1.0,
    num_neighbors: int | None = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
    **options: Any,
) -> Placement:
    """Place class prototypes on the unit sphere, far apart from each other.

    Args:
        num_classes: Number of prototypes K, at least 2.
        dim: Dimension d of the space, at least 2.
        method: `auto`, or one of `METHODS`.
        class_vectors: (K, any length), a vector a class whose similarities the prototypes are to keep in order, for
            instance from `embed_class_names`.
        ordering: How: `ranking` adds the ranking loss to the search and trades separation for order; `assignment`
            leaves the points where they are and chooses which belongs to which class.
        ordering_weight: Weight of the ranking loss. Much above 1 it draws similar classes together, far beyond the
            separation that is possible.
        num_neighbors: Nearest classes of each that the ranking loss draws near; a tenth of the classes if None.
        class_names: Names to keep with the prototypes.
        seed: Seed of all random numbers; the same seed places the same points on the same machine.
        device: Where the search computes.
        progress: Whether to show a progress bar; None shows it once the search has taken two seconds.
        **options: Options of the method: `restarts` for `auto`, `lbfgs` and `slsqp`; `max_iterations`;
            `learning_rate` and `momentum` for `sgd`.

    Returns:
        The best placement found. A search stopped by Ctrl-C returns the best so far, with a warning.

    Raises:
        ValueError: If a number, the class vectors, the method or an option is not possible.

    Example:
        >>> print(place_prototypes(10, 3).separation)  # doctest: +SKIP
        0.40439...

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019.
    """
    num_classes, dim = check_integer("num_classes", num_classes, 2), check_integer("dim", dim, 2)
    seed = check_integer("seed", seed, 0)
    with _quiet_surroundings(num_classes, dim):
        order_loss = _choose_ordering(num_classes, class_vectors, ordering, ordering_weight, num_neighbors)
        if isinstance(class_names, str):
            raise ValueError(f"class_names must be a list of names; got the text {class_names!r}.")
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f"there are {len(class_names)} class names for {num_classes} prototypes.")
        task = Task(num_classes, dim, order_loss, seed, device)
        search = _build_method(method, task, options)
        started = time.perf_counter()
        best, interrupted = _best_candidate(search, task, progress)
        points, origin = best.points.cpu(), best.origin
        order = None
        try:
            if class_vectors is not None and ordering == "assignment":
                points = assign_to_classes(points, class_vectors, generator=task.generator)
                origin = f"{origin}, assigned"
            if class_vectors is not None:
                order = measure_order(points, class_vectors, seed=seed)
        except KeyboardInterrupt:
            interrupted = True
    reached, bound = _measure(points)
    if interrupted:
        logger.warning("The search was interrupted; its best placement so far has a largest cosine of %.5f.", reached)
    return Placement(
        points,
        separation=reached,
        bound=bound,
        method=origin,
        seconds=time.perf_counter() - started,
        interrupted=interrupted,
        order=order,
        class_names=None if class_names is None else tuple(map(str, class_names)),
    )


def _best_candidate(search: Method, task: Task, progress: bool | None) -> tuple[Candidate, bool]:
    """Run a method to its end, to the bound or to Ctrl-C, and return its best candidate and whether it was Ctrl-C."""
    goal = separation_bound(task.num_classes, task.dim) + 1e-10 if task.ordering is None else -float("inf")
    best, lowest = None, float("inf")
    bar = tqdm(search, disable=progress is False, delay=0 if progress else 2, desc="placing", leave=bool(progress))
    try:
        for candidate in bar:
            value = task.score(candidate.points)
            if value < lowest:
                best, lowest = candidate, value
                name = "largest cosine" if task.ordering is None else "objective"
                bar.set_postfix_str(f"{name} {lowest:.5f}", refresh=False)
            if lowest <= goal:
                break
    except KeyboardInterrupt:
        if best is None:
            raise
        if task.latest is not None:
            points = torch.nn.functional.normalize(task.latest.points, dim=1)
            best = best if task.score(points) >= lowest else Candidate(points, task.latest.origin)
        return best, True
    finally:
        bar.close()
    if best is None:
        raise RuntimeError(f"method {search.name!r} placed nothing; please report this.")
    return best, False


@contextlib.contextmanager
def _quiet_surroundings(num_classes: int, dim: int) -> Iterator[None]:
    """Take out what would disturb a search: another default device, and threads that wait for each other.

    The threads of torch and those of scipy's BLAS take turns thousands of times a second; while one kind works, the
    other spins on the same cores. So BLAS gets one thread, and so does torch where a step takes less than milliseconds.
    """
    threads = torch.get_num_threads()
    # `device` says where to compute; the context is left out where it can be, for it slows down each operation.
    elsewhere = torch.get_default_device().type != "cpu"
    with threadpool_limits(1, user_api="blas"), torch.device("cpu") if elsewhere else contextlib.nullcontext():
        try:
            if num_classes**2 * dim < 10**7:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)


def _measure(points: Tensor) -> tuple[float, float]:
    """Separation and its bound; rounding must not put the bound above what is reached."""
    reached = separation(points).item()
    return reached, min(separation_bound(*points.shape), reached)


def _choose_ordering(
    num_classes: int,
    class_vectors: Tensor | None,
    ordering: str,
    weight: float,
    num_neighbors: int | None,
) -> Ordering | None:
    if ordering not in ("ranking", "assignment"):
        raise ValueError(f"ordering must be 'ranking' or 'assignment'; got {ordering!r}.")
    if class_vectors is None:
        if num_neighbors is not None or weight != 1.0 or ordering != "ranking":
            raise ValueError("ordering, ordering_weight and num_neighbors need class_vectors.")
        return None
    check_class_vectors(class_vectors, num_classes)
    if num_classes < 3:
        raise ValueError("class vectors order nothing with fewer than 3 classes; leave class_vectors out.")
    if ordering == "ranking":
        return Ordering(class_vectors, weight=weight, num_neighbors=num_neighbors)
    if num_neighbors is not None or weight != 1.0:
        raise ValueError("ordering_weight and num_neighbors belong to ordering 'ranking', not to 'assignment'.")
    return None


def _build_method(name: str, task: Task, options: dict[str, Any]) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(METHODS)}.")
    kind = METHODS[name]
    unknown = sorted(set(options) - set(kind.options()))
    if unknown:
        valid = ", ".join(kind.options()) or "none"
        raise ValueError(f"method {name!r} has no option {', '.join(unknown)}; its options are: {valid}.")
    if task.ordering is not None and not kind.knows_ordering:
        able = ", ".join(other for other, each in METHODS.items() if each.knows_ordering)
        raise ValueError(
            f"method {name!r} cannot rank class vectors; use ordering='assignment', or one of the methods {able}."
        )
    return kind(task, **options)
