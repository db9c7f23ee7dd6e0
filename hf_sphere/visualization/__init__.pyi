from .analogies import plot_analogy_accuracies as plot_analogy_accuracies
from .circle import plot_circle as plot_circle
from .class_angles import plot_class_angles as plot_class_angles
from .cosines import plot_cosines as plot_cosines
from .curves import plot_training_curves as plot_training_curves
from .embedding_pictures import EmbeddingPictures as EmbeddingPictures
from .figures import check_matplotlib as check_matplotlib
from .film import save_film as save_film
from .gallery import plot_gallery as plot_gallery
from .interactive import check_plotly as check_plotly, write_interactive_sphere as write_interactive_sphere
from .projection import project_to_sphere as project_to_sphere
from .projection_histograms import plot_projection_histograms as plot_projection_histograms
from .projection_masses import plot_projection_masses as plot_projection_masses
from .projections_along_training import plot_projections_along_training as plot_projections_along_training
from .reinitialization import plot_reinitialization as plot_reinitialization
from .reliability import plot_reliability as plot_reliability, plot_risk_coverage as plot_risk_coverage
from .scene import Panel as Panel
from .sphere import View as View, choose_view as choose_view, plot_sphere as plot_sphere
