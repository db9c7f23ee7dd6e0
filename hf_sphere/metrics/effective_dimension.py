"""Effective dimension of embeddings."""

from torch import Tensor

from hf_sphere.metrics.checks import check_embeddings


def effective_dimension(embeddings: Tensor) -> float:
    """Compute the participation ratio (sum l)^2 / sum l^2 of the eigenvalues l of the embeddings' covariance.

    It is d if the variance is the same in all d directions, 1 if all embeddings lie on a line, and 0 if they are equal.
    Embeddings are not normalized; normalize them first if only directions matter.

    Args:
        embeddings: (N, d). A tensor, an array or lists.

    Returns:
        0, or from 1 to min(N - 1, d).

    Raises:
        TypeError: If the embeddings are complex.
        ValueError: If the shape is wrong or an embedding is not finite.

    Reference:
        Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017.
    """
    embeddings = check_embeddings(embeddings).cpu().double()
    if (embeddings == embeddings[0]).all():
        return 0.0
    # The ratio does not depend on the scale; this scale avoids overflow and underflow in float64.
    centered = embeddings / embeddings.abs().max()
    centered = centered - centered.mean(0)
    centered = centered / centered.abs().max()
    # The covariance and the smaller Gram matrix have the same trace, and so have their squares.
    gram = centered.T @ centered if embeddings.shape[0] > embeddings.shape[1] else centered @ centered.T
    return (gram.trace().square() / gram.square().sum()).item()
