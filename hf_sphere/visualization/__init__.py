"""Pictures of embeddings, of training, of analogies and of how far confidences can be trusted (extra `plots`)."""

from hf_sphere.visualization.analogies import plot_analogy_accuracies
from hf_sphere.visualization.cosines import plot_cosines
from hf_sphere.visualization.curves import plot_training_curves
from hf_sphere.visualization.reliability import plot_reliability, plot_risk_coverage
from hf_sphere.visualization.sphere import plot_sphere, project_to_sphere

__all__ = [
    "plot_analogy_accuracies",
    "plot_cosines",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_sphere",
    "plot_training_curves",
    "project_to_sphere",
]
