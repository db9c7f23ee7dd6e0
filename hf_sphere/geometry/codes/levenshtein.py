"""Levenshtein's universal bound on the size of a spherical code, inverted to a bound on its largest cosine."""

import math


def levenshtein_cosine(num_points: int, dim: int) -> float:
    """Lower bound on the largest cosine of K points in R^d by Levenshtein's bound.

    The bound L_m(d, s) on the size of a code with largest cosine s increases with s from D(d, m) to D(d, m + 1) on the
    m-th interval of s, where D is the Delsarte-Goethals-Seidel bound. K determines the interval, and a bracketing root
    finder determines s.

    Args:
        num_points: Number K >= 2 of points.
        dim: Dimension d >= 3.

    Returns:
        The cosine s with L(d, s) = K, accurate to about 1e-13.

    Reference:
        Levenshtein, "Universal bounds for codes and designs", Handbook of Coding Theory, 1998, equations 5.48 and 5.49.
    """
    from scipy.optimize import brentq

    degree = 1  # of the polynomial that proves the bound: D(d, m) < K <= D(d, m + 1)
    while design_size(degree + 1, dim) < num_points:
        degree += 1
    low, high = _interval_end(degree - 1, dim), _interval_end(degree, dim)
    log_size = math.log(num_points)

    def excess(cosine: float) -> float:
        return math.log(_size(cosine, degree, dim)) - log_size

    # Rounding may move K outside the interval of the computed sizes.
    if excess(low) >= 0:
        return low
    return high if excess(high) <= 0 else brentq(excess, low, high, xtol=1e-15, rtol=1e-15)


def design_size(strength: int, dim: int) -> int:
    """Lower bound D(d, t) on the size of a spherical t-design, t = `strength` (Delsarte, Goethals and Seidel, 1977)."""
    half, odd = divmod(strength, 2)
    if odd:
        return 2 * math.comb(dim + half - 1, half)
    return math.comb(dim + half - 1, half) + math.comb(dim + half - 2, half - 1)


def _size(cosine: float, degree: int, dim: int) -> float:
    """L_m(d, s)."""
    half, odd = divmod(degree, 2)
    if odd:
        half += 1  # m = 2k - 1
        previous, current = _gegenbauer_pair(cosine, half, dim)
        quotient = (previous - current) / ((1 - cosine) * current)
        return math.comb(half + dim - 3, half - 1) * ((2 * half + dim - 3) / (dim - 1) - quotient)
    current, following = _gegenbauer_pair(cosine, half + 1, dim)
    quotient = (1 + cosine) * (current - following) / ((1 - cosine) * (current + following))
    return math.comb(half + dim - 2, half) * ((2 * half + dim - 1) / (dim - 1) - quotient)


def _gegenbauer_pair(cosine: float, degree: int, dim: int) -> tuple[float, float]:
    """Gegenbauer polynomials P_{k-1} and P_k of R^d at s, with P(1) = 1, up to a common positive factor."""
    previous, current = 1.0, cosine
    for k in range(1, degree):
        previous, current = current, ((2 * k + dim - 2) * cosine * current - k * previous) / (k + dim - 2)
        # Rescaled, since they decay quickly in high dimensions and only their ratio is needed.
        scale = max(abs(previous), abs(current))
        previous, current = previous / scale, current / scale
    return previous, current


def _interval_end(degree: int, dim: int) -> float:
    """Upper end of the interval of s for L_m: the largest zero of an adjacent Jacobi polynomial."""
    import numpy as np
    from scipy.linalg import eigh_tridiagonal

    half, odd = divmod(degree, 2)
    if degree == 0:
        return -1.0
    count = half + odd
    alpha, beta = (dim - 3) / 2 + 1, (dim - 3) / 2 + (0 if odd else 1)
    total = alpha + beta
    k = np.arange(count)
    # The zeros are the eigenvalues of the Jacobi matrix of the three-term recurrence (Golub and Welsch, 1969).
    diagonal = (beta**2 - alpha**2) / np.maximum((2 * k + total) * (2 * k + total + 2), 1e-300)
    k = k[1:]
    squares = 4 * k * (k + alpha) * (k + beta) * (k + total) / ((2 * k + total) ** 2 * ((2 * k + total) ** 2 - 1))
    return float(eigh_tridiagonal(diagonal, np.sqrt(squares), eigvals_only=True)[-1])
