from .angular import OPERATORS as OPERATORS, angular_response as angular_response
from .bessel import (
    concentration_from_mean_resultant_length as concentration_from_mean_resultant_length,
    log_vmf_normalizer as log_vmf_normalizer,
    mean_resultant_length as mean_resultant_length,
)
from .codes import separation as separation, separation_bound as separation_bound
from .coordinates import (
    angles_to_cartesian as angles_to_cartesian,
    cartesian_to_angles as cartesian_to_angles,
    spherize as spherize,
)
from .manifold import (
    exp_map as exp_map,
    frechet_mean as frechet_mean,
    geodesic_distance as geodesic_distance,
    log_map as log_map,
    parallel_transport as parallel_transport,
    project_to_sphere as project_to_sphere,
    project_to_tangent as project_to_tangent,
    random_rotation as random_rotation,
    slerp as slerp,
)
