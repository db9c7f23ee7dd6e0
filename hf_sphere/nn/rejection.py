"""The decision whether an input belongs to the classes of a model, at a level, and the scores that it rests on."""

import json
import math
import os
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.checks import check_number
from hf_sphere.utils.modules import is_exporting, widest_dtype

State = Mapping[str, Any]
"""What a score was fitted to: tensors, and options such as `k`; see `hf_sphere.ood.detector`."""

Values = Callable[[State, Any], Tensor]
"""Computes scores (B,), or scores of each class (B, K), higher for known inputs, from a state and the outputs of a
model: `embeddings` (B, d), `logits` (B, K) and `concentrations` (B,)."""


class Score(NamedTuple):
    """A score: the outputs of a model that it needs, its values, and those of each class if it has some."""

    needs: tuple[str, ...]
    values: Values
    of_classes: Values | None = None


class Decision(NamedTuple):
    """Decisions on B inputs."""

    known: Tensor  # (B,), whether the input belongs to the classes
    p_value: Tensor  # (B,), of that; `known` are those above the level
    class_p_values: Tensor | None = None  # (B, K), of each class, or None if the calibration had no labels


class Rejection(nn.Module):
    r"""Rejection of unknown inputs, fitted by `hf_sphere.ood.fit_rejection`.

    Let $s$ be the score of an input, and $S_1, ..., S_n$ the scores of known inputs that the model has not seen. Then
    $p = (1 + \#\{S_i \leq s\}) / (n + 1)$, and the input is known if $p$ is above the level. For known inputs that are
    exchangeable with the n, at most the level is called unknown, whatever the model. Nothing is promised for unknown
    inputs (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005).

    The p-value of class y compares the score of the class with the scores of the n_y inputs of class y for it. The
    classes whose p-value is above a level are the prediction set: it has the true one in at least 1 - level of the
    cases, separately for each class. With `by_class`, an input is known if its set is not empty, and p is the largest
    p-value. Otherwise the p-values of classes compare log-probabilities with the true class of all n inputs; rejected
    inputs count as lowest. Then the set of a known input has the true class as often.

    Args:
        settings: `score`, `level`, `by_class`, and `shapes` of the buffers by name; `fit_rejection` adds what it knows.

    Attributes:
        settings: The settings, also from the configuration of the model.

    Example:
        >>> rejection = Rejection.load("rejection.safetensors")  # doctest: +SKIP
        >>> rejection(outputs.embeddings, outputs.logits).known  # doctest: +SKIP
    """

    calibration: Tensor
    class_calibration: Tensor | None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        level, score, by_class = settings["level"], settings["score"], settings["by_class"]
        check_number("level", level, "(0, 1)")
        if by_class and SCORES[score].of_classes is None:
            names = ", ".join(name for name, each in SCORES.items() if each.of_classes)
            raise ValueError(f"the score {score} is not one of each class; by_class needs one of {names}.")
        count = settings["shapes"]["class_calibration" if by_class else "calibration"][-1]
        if count < (needed := images_needed(level)):
            raise ValueError(f"level {level:g} needs {needed:,} images; there are {count:,}. Fit it again.")
        self.settings = settings
        for name, shape in {"class_calibration": None, **settings["shapes"]}.items():
            self.register_buffer(name, None if shape is None else torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Mark the buffers as not fitted."""
        for buffer in self.buffers():
            buffer.fill_(math.nan)

    @property
    def is_fitted(self) -> bool:
        """Whether all buffers were set."""
        return not any(bool(buffer.isnan().any()) for buffer in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Scores in half precision would have ties where those that were fitted had none.
        return super()._apply(lambda t: fn(t).to(t.dtype) if t.is_meta else t.to(fn(t).device), recurse)

    def score(self, outputs: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the scores (B,), None `by_class`, and the class scores (B, K), None without `class_calibration`.

        `outputs` has the attributes `embeddings`, `logits` and `concentrations` that the score needs.
        """
        state: dict[str, Any] = {name: buffer.to(widest_dtype(buffer)) for name, buffer in self.named_buffers()}
        state |= self.settings.get("options", {})
        score = SCORES[self.settings["score"]]
        if self.settings["by_class"]:
            assert score.of_classes is not None
            return None, score.of_classes(state, outputs).float()
        values = score.values(state, outputs).float()
        classes = self.settings["shapes"].get("class_calibration")
        return values, None if classes is None else outputs.logits.log_softmax(-1).float()

    def forward(
        self, embeddings: Tensor | None, logits: Tensor | None, concentrations: Tensor | None = None
    ) -> Decision:
        """Decide on inputs from the outputs of the model; see `hf_sphere.ood.Outputs`.

        Args:
            embeddings: (B, d), or None if the score needs none.
            logits: (B, K), before any temperature.
            concentrations: (B,), or None if the score needs none.
        """
        given, of_classes = (embeddings, logits, concentrations), None
        wide = [value if value is None else value.detach().to(widest_dtype(value)) for value in given]
        values, classes = self.score(_Outputs(*wide))
        if classes is not None and self.class_calibration is not None:
            ranks, sizes = _ranks(self.class_calibration, classes)
            of_classes = ranks / (sizes + 1)
        if values is not None:
            ranks, sizes = _ranks(self.calibration[None], values[:, None])
        known = ranks > rejected_ranks(sizes, self.settings["level"])
        return Decision(known.any(1), (ranks / (sizes + 1)).amax(1), of_classes)

    def check_coverage(self, coverage: float) -> None:
        """Raise a ValueError unless there are prediction sets of a coverage."""
        if self.class_calibration is None:
            raise ValueError("the rejection has no p-values of classes; fit it again, to images with labels.")
        check_number("coverage", coverage, "(0, 1)")
        level = self.settings["level"]
        if coverage > (1 - level) * (1 + 1e-9):
            most = f"coverage must be at most {1 - level:g}, since up to {level:g} of known images are called unknown"
            raise ValueError(f"{most}; got {coverage:g}. Fit the rejection again with a level of {1 - coverage:.3g}.")

    def prediction_set(self, known: Tensor, class_p_values: Tensor, prediction: Tensor, coverage: float) -> Tensor:
        """Return the classes that are needed, (B, K): for known inputs the ones with a p-value above 1 - coverage.

        The set has the true class of at least the fraction `coverage` of images of the classes, and is empty for images
        that are called unknown. Without `by_class`, the `prediction` (B,) of a known input is always in it.
        """
        self.check_coverage(coverage)
        chosen = class_p_values > (1 - coverage) * (1 + 1e-6)  # p-values are rounded
        if not self.settings["by_class"]:
            chosen = chosen.scatter(1, prediction[:, None], True)
        return chosen & known[:, None]

    def describe(self) -> str:
        """Return the score, the level and the number of images."""
        whose = " of each class" * self.settings["by_class"]
        level, count = f"{100 * self.settings['level']:g} %{whose}", self.settings["num_images"]
        return f"score {self.settings['score']} at level {level}, {count:,} images"

    def save(self, path: str | os.PathLike) -> None:
        """Write the rejection to a safetensors file; models of this library save theirs."""
        from safetensors.torch import save_file

        from hf_sphere.utils.files import atomic_file

        with atomic_file(Path(path)) as unfinished:
            save_file(self.state_dict(), unfinished, {"rejection": json.dumps(self.settings)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a rejection that `save` has written.

        Raises:
            OSError: If there is no such file.
        """
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            rejection = cls(json.loads(file.metadata()["rejection"]))
            rejection.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return rejection


_Outputs = namedtuple("_Outputs", ("embeddings", "logits", "concentrations"))


def images_needed(level: float) -> int:
    """Return the number of known inputs that a level needs."""
    return math.ceil((1 - 1e-12) / level) - 1


def _ranks(calibration: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of values (B, C), from 1, among calibration scores (C, n) or (1, n), and their numbers.

    The scores are sorted and filled up with infinity, which does not count. Without scores, the rank is 0.
    """
    sizes = calibration.isfinite().sum(1)
    values = values.where(values.isfinite(), -math.inf)  # what is not finite is unknown
    if is_exporting():  # ONNX has no binary search
        counts = _count_by_steps(calibration, values)
    else:
        columns = values.T.contiguous().view(len(calibration), -1)
        counts = torch.searchsorted(calibration, columns, right=True).view_as(values.T).T
    return (sizes > 0) + torch.minimum(counts, sizes), sizes


def _count_by_steps(ordered: Tensor, values: Tensor) -> Tensor:
    """Return the number of the sorted scores (C, n) or (1, n) that are at most each value (B, C)."""
    length, rows = ordered.shape[1], torch.arange(len(ordered), device=ordered.device)
    counts = torch.zeros_like(values, dtype=torch.int64)
    for step in (1 << power for power in reversed(range(length.bit_length()))):
        probe = counts + step
        fits = (probe <= length) & (ordered[rows, (probe - 1).clamp_max(length - 1)] <= values)
        counts = torch.where(fits, probe, counts)
    return counts


def rejected_ranks(sizes: Tensor, level: float) -> Tensor:
    """Return the largest rank whose p-value is at most the level, up to rounding."""
    return (level * (sizes + 1).to(widest_dtype(sizes)) * (1 + 1e-12)).floor()


def _log_max_softmax(state: State, data: Any) -> Tensor:
    logits = data.logits
    largest, index = logits.max(1, keepdim=True)
    # Does not round to 0 when the probability rounds to 1.
    return -(logits - largest).exp().scatter(1, index, 0.0).sum(1).log1p()


def _neighbors(state: State, data: Any) -> Tensor:
    cosines = project_to_sphere(data.embeddings) @ state["references"].T
    return -(2 - 2 * cosines.topk(state["k"]).values[:, -1]).clamp_min(0).sqrt()


def _mahalanobis(state: State, data: Any) -> Tensor:
    points, means = (data.embeddings - state["center"]) @ state["whitening"], state["means"]
    squares = points.square().sum(1, keepdim=True) - 2 * points @ means.T + means.square().sum(1)
    return -squares.clamp_min(0) / 2


def _virtual_logit(state: State, data: Any) -> Tensor:
    lengths = torch.linalg.vector_norm((data.embeddings - state["origin"]) @ state["basis"], dim=1)
    return data.logits.logsumexp(1) - state["scale"] * lengths


def _likelihoods(state: State, data: Any) -> Tensor:
    joint = project_to_sphere(data.embeddings) @ state["directions"].T + state["peaks"]
    return joint.where(data.embeddings.any(1, keepdim=True), state["uniform"])  # zeros have no direction


# Hendrycks and Gimpel, ICLR 2017 (maximum softmax); Hendrycks et al., ICML 2022 (maximum logit); Liu et al., NeurIPS
# 2020 (energy); Scott, Gallagher and Mozer, ICCV 2021 (concentration); the others are in `hf_sphere.ood.detector`.
SCORES = {
    "max_softmax": Score(("logits",), _log_max_softmax, lambda state, data: data.logits.log_softmax(1)),
    "max_logit": Score(("logits",), lambda state, data: data.logits.amax(1), lambda state, data: data.logits),
    "energy": Score(("logits",), lambda state, data: data.logits.logsumexp(1)),
    "norm": Score(("embeddings",), lambda state, data: torch.linalg.vector_norm(data.embeddings, dim=1)),
    "concentration": Score(("concentrations",), lambda state, data: data.concentrations),
    "knn": Score(("embeddings",), _neighbors),
    "mahalanobis": Score(("embeddings",), lambda state, data: _mahalanobis(state, data).amax(1), _mahalanobis),
    "vim": Score(("embeddings", "logits"), _virtual_logit),
    "vmf": Score(("embeddings",), lambda state, data: _likelihoods(state, data).logsumexp(1), _likelihoods),
}
