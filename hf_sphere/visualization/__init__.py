"""Pictures of embeddings, training, analogies, confidences and what layers have learned (extra `plots`)."""

from hf_sphere.visualization.analogies import plot_analogy_accuracies
from hf_sphere.visualization.circle import plot_circle
from hf_sphere.visualization.class_angles import plot_class_angles
from hf_sphere.visualization.cosines import plot_cosines
from hf_sphere.visualization.curves import plot_training_curves
from hf_sphere.visualization.figures import check_matplotlib
from hf_sphere.visualization.film import save_film
from hf_sphere.visualization.gallery import Panel, plot_gallery
from hf_sphere.visualization.interactive import check_plotly, write_interactive_sphere
from hf_sphere.visualization.projection import project_to_sphere
from hf_sphere.visualization.projection_histograms import plot_projection_histograms
from hf_sphere.visualization.projection_masses import plot_projection_masses
from hf_sphere.visualization.projections_along_training import plot_projections_along_training
from hf_sphere.visualization.reinitialization import plot_reinitialization
from hf_sphere.visualization.reliability import plot_reliability, plot_risk_coverage
from hf_sphere.visualization.sphere import View, choose_view, plot_sphere

__all__ = [
    "Panel",
    "View",
    "check_matplotlib",
    "check_plotly",
    "choose_view",
    "plot_analogy_accuracies",
    "plot_circle",
    "plot_class_angles",
    "plot_cosines",
    "plot_gallery",
    "plot_projection_histograms",
    "plot_projection_masses",
    "plot_projections_along_training",
    "plot_reinitialization",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_sphere",
    "plot_training_curves",
    "project_to_sphere",
    "save_film",
    "write_interactive_sphere",
]
