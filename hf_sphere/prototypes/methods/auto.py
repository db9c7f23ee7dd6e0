"""The default method: the best of closed form, catalogue and search."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import SphericalCode, find_code, separation_bound
from hf_sphere.prototypes.methods.base import Candidate, Method, Task
from hf_sphere.prototypes.methods.catalogue import Catalogue
from hf_sphere.prototypes.methods.closed_form import ClosedForm, has_closed_form
from hf_sphere.prototypes.methods.lbfgs import LBFGS
from hf_sphere.prototypes.methods.slsqp import SLSQP

MAX_EXACT_COORDINATES = 110  # maximum number K d of coordinates for which SLSQP takes a fraction of a second


class Auto(Method):
    """The closed form if there is one, otherwise the best of the catalogue and the searches.

    If the catalogue has a code, L-BFGS runs only if it is likely to find a better placement or is fast. With a ranking
    loss only L-BFGS runs, since the other methods do not use class vectors.

    Args:
        restarts: Number of random starts of each search; see `LBFGS` and `SLSQP` for the defaults.
        max_iterations: See `LBFGS`.
    """

    name = "auto"

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 60) -> None:
        super().__init__(task)
        search = LBFGS(task, restarts=restarts, max_iterations=max_iterations)
        self.parts: list[Method]
        if task.ranking is not None:
            self.parts = [search]
        elif has_closed_form(task):
            self.parts = [ClosedForm(task)]
        else:
            code = find_code(task.num_classes, task.dim)
            self.parts = [] if code is None else [Catalogue(task)]
            if task.num_classes * task.dim <= MAX_EXACT_COORDINATES:
                self.parts.append(SLSQP(task, restarts=restarts))
            if code is None or restarts is not None or search.seconds() < (10.0 if _is_coarse(code, task) else 0.3):
                self.parts.append(search)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Candidate]:
        for part in self.parts:
            yield from part


def _is_coarse(code: SphericalCode, task: Task) -> bool:
    """Whether a search is likely to improve on the code; it typically reaches 93 % of the bound in 1 - cosine."""
    return 1.0 - code.cosine < 0.93 * (1.0 - separation_bound(task.num_classes, task.dim))
