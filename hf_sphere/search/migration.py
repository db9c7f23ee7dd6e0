"""Vectors of one model as those of another one, by a linear map that is fitted to anchors."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_rows, shorten
from hf_sphere.search.drift import check_model
from hf_sphere.search.matching import mean_interval
from hf_sphere.search.neighbor_search import NeighborSearch
from hf_sphere.search.vectors import repeated_rows, unit_vectors
from hf_sphere.utils.checks import check_number, check_seed

NEIGHBORS, FOLDS, FEWEST = 10, 5, 100
"""Neighbors whose recall is measured, folds of the anchors, and fewest anchors."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Regularization of the maps, as multiples of the mean square of the old vectors along an axis."""


class Migration(NamedTuple):
    """How the vectors of a space were mapped; `str` returns it in words."""

    kind: str
    recall: float  # recall@10 of held-out anchors, against embedding again
    low: float  # of its 95 % interval over anchors
    high: float
    num_anchors: int

    def __str__(self) -> str:
        recall, low, high = (100 * value for value in self[1:4])
        text = f"finds {recall:.1f} ({low:.1f} to {high:.1f}) % of what embedding again would"
        return f"the {self.kind} map {text}, by recall@10 among {self.num_anchors:,} anchors"


def migrate(space: Any, old: Any, new: Any, max_recall_loss: float | None, model: str | None, seed: int) -> Any:
    """Return a space of mapped vectors; see `EmbeddingSpace.migrate`."""
    if max_recall_loss is not None:
        check_number("max_recall_loss", max_recall_loss, "[0, 1)")
    if space.metric["distance"] != "cosine" or space._queries is not None:
        raise ValueError("only cosines that rows calibrate are migrated: calibrate the space without queries first.")
    old, new = space._check("old", old), unit_vectors("new", new)
    count, dim = old.shape
    if len(new) != count:
        raise ValueError(f"old and new must be of the same anchors, in the same order; got {count:,} and {len(new):,}.")
    if count < (needed := max(FEWEST, dim)):
        raise ValueError(f"{needed:,} anchors are needed, one per dimension at least; got {count:,}. Embed more texts.")
    for name, anchors in (("old", old), ("new", new)):
        if repeated := repeated_rows(anchors):
            raise ValueError(f"anchors must differ; of {name}, {len(repeated):,} repeat: rows {shorten(repeated)}.")
    if (check := check_model(space, old, None)).is_foreign:
        raise ValueError(f"old are no vectors of the space: {check}")
    kinds: dict[str, Tensor] = {}
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(check_seed(seed))) % FOLDS
    for number in range(FOLDS):
        for kind, weights in _maps(old[fold != number].double(), new[fold != number].double()):
            mapped = kinds.setdefault(kind, torch.empty(new.shape))
            mapped[fold == number] = F.normalize(old[fold == number].double() @ weights).float()
    recalls = {kind: _recalls(mapped, new) for kind, mapped in kinds.items()}
    best = max(recalls, key=lambda kind: float(recalls[kind].mean()))
    low, mean, high = mean_interval(recalls[best])
    migration = Migration(best, mean, low, high, count)
    if migration.high < 3 * NEIGHBORS / count:
        raise ValueError(f"{migration}, no more than by chance. Are old and new of the same anchors, in one order?")
    if max_recall_loss is not None and 1 - migration.low > max_recall_loss:
        raise ValueError(f"{migration}, so the loss may exceed max_recall_loss={max_recall_loss}. Embed again.")
    weights = dict(_maps(old.double(), new.double()))[best]
    vectors = torch.cat([F.normalize(block.double() @ weights).float() for block in space.vectors.split(1 << 15)])
    check_rows(vectors.any(1), "a mapped vector has no direction", "are zero", space.ids)
    numbers = {"numbers": space._numbers, "ids": space._ids, "kind": space.kind}
    moved = type(space)(vectors, space.groups, **numbers, **space._options)
    moved._next, moved.model, moved.migration = space._next, model, migration
    if space.is_calibrated:
        moved.calibrate(score=space.score, rule=space.rule)
    return moved


def _maps(old: Tensor, new: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the matrix (d, e) of each map, fitted to anchors (n, d) and (n, e)."""
    left, _, right = torch.linalg.svd(old.T @ new, full_matrices=False)
    yield "orthogonal", left @ right
    square, products = old.T @ old, old.T @ new
    for ridge in RIDGES:
        penalty = ridge * square.trace() / len(square)
        yield f"ridge {ridge:g}", torch.linalg.solve(square + penalty * torch.eye(len(square)).double(), products)


def _recalls(mapped: Tensor, new: Tensor) -> Tensor:
    """Return the recall@10 of each new anchor among the mapped others, (n,), against the new others."""
    rows = torch.arange(len(new))
    truth, found = (NeighborSearch(x, kind="torch").search_others(new, NEIGHBORS, rows, rows)[1] for x in (new, mapped))
    return (found[:, :, None] == truth[:, None]).any(1).double().mean(1)
