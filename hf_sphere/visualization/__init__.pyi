from .embedding_pictures import EmbeddingPictures as EmbeddingPictures
from .figures import check_matplotlib as check_matplotlib
from .interactive import check_plotly as check_plotly, write_interactive_sphere as write_interactive_sphere
from .layers import (
    plot_projection_histograms as plot_projection_histograms,
    plot_projection_masses as plot_projection_masses,
    plot_projections_along_training as plot_projections_along_training,
    plot_reinitialization as plot_reinitialization,
)
from .results import (
    plot_analogy_accuracies as plot_analogy_accuracies,
    plot_class_angles as plot_class_angles,
    plot_comparison as plot_comparison,
    plot_reliability as plot_reliability,
    plot_report as plot_report,
    plot_risk_coverage as plot_risk_coverage,
)
from .scene import Panel as Panel
from .sphere import (
    View as View,
    plot_circle as plot_circle,
    plot_gallery as plot_gallery,
    plot_sphere as plot_sphere,
)
