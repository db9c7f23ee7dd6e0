"""The default: whatever places best of closed form, catalogue and search."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import SphericalCode, find_code, separation_bound
from hf_sphere.prototypes.methods.base import Candidate, Method, Task
from hf_sphere.prototypes.methods.catalogue import Catalogue
from hf_sphere.prototypes.methods.closed_form import ClosedForm, has_closed_form
from hf_sphere.prototypes.methods.lbfgs import LBFGS
from hf_sphere.prototypes.methods.slsqp import SLSQP

FEW_COORDINATES = 110
"""Up to so many coordinates K d the exact method takes fractions of a second."""


class Auto(Method):
    """The closed form where there is one; else the best of the catalogue and of searches.

    Where the catalogue has a code, the long search is made only if it is likely to find better, or takes no time. With
    class vectors that are to be ranked there is only that search, for the others know nothing of classes.

    Args:
        task: What is to be placed.
        restarts: Random starts of each search; see `LBFGS` and `SLSQP` for how many there are by default.
        max_iterations: See `LBFGS`.
    """

    name = "auto"

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 60) -> None:
        super().__init__(task)
        search = LBFGS(task, restarts=restarts, max_iterations=max_iterations)
        self.parts: list[Method]
        if task.ordering is not None:
            self.parts = [search]
        elif has_closed_form(task):
            self.parts = [ClosedForm(task)]
        else:
            code = find_code(task.num_classes, task.dim)
            self.parts = [] if code is None else [Catalogue(task)]
            if task.num_classes * task.dim <= FEW_COORDINATES:
                self.parts.append(SLSQP(task, restarts=restarts))
            if code is None or restarts is not None or search.seconds() < (10.0 if _is_coarse(code, task) else 0.3):
                self.parts.append(search)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Candidate]:
        for part in self.parts:
            yield from part


def _is_coarse(code: SphericalCode, task: Task) -> bool:
    """Whether a search is likely to better the code: it comes within about a tenth of the bound in 1 - cosine."""
    return 1.0 - code.cosine < 0.93 * (1.0 - separation_bound(task.num_classes, task.dim))
