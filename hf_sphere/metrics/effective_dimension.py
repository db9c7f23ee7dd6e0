"""In how many directions embeddings vary."""

from torch import Tensor

from hf_sphere.metrics.checks import check_embeddings


def effective_dimension(points: Tensor) -> float:
    """Participation ratio (sum l)^2 / sum l^2 of the eigenvalues l of the points' covariance.

    d if the points vary as much in all d directions, 1 if they lie on a line, and 0 if all of them are equal. The
    points are taken as they are: normalise them before, if only their directions are to count.

    Args:
        points: (N, d). A tensor, an array or lists.

    Returns:
        0, or from 1 to min(N - 1, d).

    Raises:
        TypeError: If the points are complex.
        ValueError: If the shape is wrong or a point is not finite.

    Reference:
        Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017.
    """
    points = check_embeddings(points)
    if (points == points[0]).all():
        return 0.0
    # Any scale gives the same ratio; at this one neither sums nor squares leave the range of float64.
    centred = points / points.abs().max()
    centred = centred - centred.mean(0)
    centred = centred / centred.abs().max()
    # The traces of the covariance and of its square; the products of the points have the same as those of coordinates.
    small = centred.T @ centred if points.shape[0] > points.shape[1] else centred @ centred.T
    return (small.trace().square() / small.square().sum()).item()
