"""Options of the evaluation of embeddings. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from hf_sphere.utils.arguments import SEED, Arguments, argument


@dataclass
class EvaluationOptions(Arguments):
    """Options of the metrics."""

    distance: Literal["cosine", "euclidean", "hyperbolic"] | None = argument(
        None, "Distance for retrieval; if not set, that of the model, else cosine."
    )
    curvature: float | None = argument(
        None, "c > 0 for the curvature -c of the hyperbolic distance; if not set, that of the model.", gt=0
    )
    ks: list[int] = argument((1,), "Values of k for Recall@k.", ge=1)
    num_samples: int = argument(10, "Samples of each uncertain embedding for sampled retrieval; 0 skips it.", ge=0)
    num_bins: int = argument(15, "Bins of the reliability diagram; the calibration errors always have 15.", ge=1)
    overlap_threshold: float | None = argument(
        None,
        "Count the images whose embedding is nearer than this to one of another class, and the errors among them. In "
        "degrees, or a distance for --overlap_distance euclidean. Skipped if not set.",
        gt=0,
    )
    overlap_distance: Literal["angular", "euclidean"] | None = argument(
        None, "Distance of --overlap_threshold; angular if not set."
    )
    seed: int = argument(0, "Seed of the samples of embeddings and of --max_samples.", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ks = list(dict.fromkeys(self.ks))
        if self.overlap_threshold is None and self.overlap_distance is not None:
            raise ValueError(f"--overlap_distance {self.overlap_distance} needs --overlap_threshold; give both.")
        self.overlap_distance = self.overlap_distance or "angular"
        if self.overlap_distance == "angular" and (self.overlap_threshold or 0.0) > 180:
            raise ValueError(f"overlap_threshold must be at most 180 degrees; got {self.overlap_threshold:g}.")
