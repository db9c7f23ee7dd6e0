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
    curvature: float | None = argument(None, "c of the hyperbolic curvature -c; if not set, that of the model.", gt=0)
    ks: list[int] = argument((1,), "Values of k for Recall@k.", ge=1)
    num_samples: int = argument(10, "Samples of each uncertain embedding for sampled retrieval; 0 skips it.", ge=0)
    overlap_threshold: float | None = argument(
        None,
        "Count the images whose embedding is nearer than this to one of another class, and the errors among them. In "
        "degrees, or a distance for --overlap_distance euclidean. Skipped if not set.",
        gt=0,
    )
    overlap_distance: Literal["angular", "euclidean"] = argument(
        "angular", "Distance of --overlap_threshold.", only_with=["overlap_threshold"]
    )
    seed: int = argument(0, "Seed of the samples of embeddings and of --max_samples.", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap_distance == "angular" and (self.overlap_threshold or 0.0) > 180:
            raise ValueError(f"overlap_threshold must be at most 180 degrees; got {self.overlap_threshold:g}.")
