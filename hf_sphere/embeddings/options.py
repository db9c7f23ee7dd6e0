"""Options of the evaluation of embeddings. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Literal

from hf_sphere.utils.arguments import argument


@dataclass
class EvaluationOptions:
    """Options of the metrics."""

    distance: Literal["cosine", "euclidean", "hyperbolic"] | None = argument(
        None, "Distance for retrieval; if not set, that of the model, else cosine."
    )
    curvature: float | None = argument(
        None, "c > 0 for the curvature -c of the hyperbolic distance; if not set, that of the model."
    )
    ks: list[int] = field(default_factory=lambda: [1], metadata={"help": "Values of k for Recall@k."})
    num_samples: int = argument(10, "Samples of each uncertain embedding for sampled retrieval; 0 skips it.")
    num_bins: int = argument(15, "Bins of the reliability diagram; the calibration errors always have 15.")
    overlap_threshold: float | None = argument(
        None,
        "Count the images whose embedding is nearer than this to one of another class, and the errors among them. In "
        "degrees, or a distance for --overlap_distance euclidean. Skipped if not set.",
    )
    overlap_distance: Literal["angular", "euclidean"] | None = argument(
        None, "Distance of --overlap_threshold; angular if not set."
    )
    seed: int = argument(0, "Seed of the samples of embeddings and of --max_samples.")

    def __post_init__(self) -> None:
        if min(self.ks, default=0) < 1:
            raise ValueError(f"--ks must be integers of at least 1, for instance 1 5; got {self.ks}.")
        self.ks = list(dict.fromkeys(self.ks))
        for name, minimum in (("num_bins", 1), ("num_samples", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"--{name} must be at least {minimum}; got {getattr(self, name)}.")
        if self.curvature is not None and not 0 < self.curvature < math.inf:
            raise ValueError(
                f"--curvature must be finite and positive, c for the curvature -c; got {self.curvature:g}."
            )
        if self.curvature is not None and self.distance not in (None, "hyperbolic"):
            raise ValueError(
                f"--curvature is for --distance hyperbolic; got --distance {self.distance}. Leave one of them out."
            )
        if self.overlap_threshold is None:
            if self.overlap_distance is not None:
                raise ValueError(f"--overlap_distance {self.overlap_distance} needs --overlap_threshold; give both.")
            return
        self.overlap_distance = self.overlap_distance or "angular"
        in_degrees = self.overlap_distance == "angular"
        if not 0 < self.overlap_threshold < math.inf or (in_degrees and self.overlap_threshold > 180):
            allowed = "above 0 and up to 180 degrees" if in_degrees else "positive and finite"
            raise ValueError(f"--overlap_threshold must be {allowed}; got {self.overlap_threshold:g}.")
