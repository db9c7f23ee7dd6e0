"""Running statistics of the embeddings in training, independent of how batches are divided."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_sphere.geometry.coordinates import is_batched


class RunningStatistics:
    """Mixin of heads with running statistics, updated once per optimizer step from the sums of `measure`.

    In a loop that does not call `before_forward` and `after_step`, each process makes an update per batch. The mixin
    comes before `Head` among the base classes.
    """

    _sums: Tensor | None = None  # no buffer: those of the first process would be copied to the others

    def measure(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return three sums over the examples of transformed embeddings (B, d') without the label -100: (3,)."""
        raise NotImplementedError

    def update_statistics(self, sums: Tensor) -> None:
        """Update the statistics from the sums of `measure` over all examples of an optimizer step."""
        raise NotImplementedError

    @torch.no_grad()
    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Update the statistics, or only their sums if `after_step` will follow."""
        if not torch.compiler.is_compiling() and is_batched(embeddings):
            return
        measured = self.measure(embeddings.detach(), labels)
        if self._sums is None:
            self.update_statistics(measured)
        else:
            self._sums = self._sums + measured

    def before_forward(self, seed: int, places: Tensor) -> None:
        """Accumulate sums until `after_step`."""
        super().before_forward(seed, places)  # type: ignore[misc]  # that of `Head`
        if self._sums is None:
            self._sums = torch.zeros(3, device=places.device)

    @torch.no_grad()
    def after_step(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Update the statistics from all batches since the last optimizer step."""
        if self._sums is not None:
            self.update_statistics(reduce(self._sums))
            self._sums = None
