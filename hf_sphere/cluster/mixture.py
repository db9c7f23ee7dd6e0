"""Mixtures of von Mises-Fisher distributions, fitted by expectation-maximization."""

import math
import numbers
import warnings
from typing import Any, NamedTuple, Self

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, DensityMixin, TransformerMixin, _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from hf_sphere.cluster.rows import DirectionRows, all_sums_by_label
from hf_sphere.cluster.spherical_k_means import POSITIVE_INTEGER, SphericalKMeans
from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import bessel
from hf_sphere.geometry.manifold import mean_direction
from hf_sphere.utils.checks import check_integer

LARGEST_CONCENTRATION = 1e8
"""Bound of the concentrations, without which the likelihood of a component with a single point has no maximum."""


class Parameters(NamedTuple):
    """Mean directions (k, d), concentrations (k,) and weights (k,) of the components."""

    means: Tensor
    concentrations: Tensor
    weights: Tensor


class VonMisesFisherMixture(DensityMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A mixture of von Mises-Fisher distributions, the analogue of Gaussian mixtures for directions.

    Fitted by expectation-maximization with exact concentrations, up to 1e8, from the clusters of `SphericalKMeans`. No
    iteration decreases the likelihood. In the end the concentrations are corrected for the bias of maximum likelihood,
    which is large for few rows in many dimensions: the squared length of a mean is replaced by the mean cosine of pairs
    of different rows. Components that overlap are fitted to the noise, too: if they are hardly more than noise, their
    squared lengths are reduced to what the eigenvalues of the second moment show, down to concentrations of 0, and a
    warning says if uniform rows could have them. Rows are used by their directions only. Rows of zeros have no
    direction: they do not influence the fit, `score` and `bic`, and get the uniform density, equal probabilities
    and the label 0, with a warning.
    X may be a tensor, whose device is used; results are tensors if X is one. Computed in float64 (on devices that
    support it), block by block.

    Args:
        n_components: Number of components.
        concentration_type: `own` concentration of each component, or `shared`.
        n_init: Number of starts; the one with the largest likelihood is kept.
        max_iter: Maximum number of iterations.
        tol: Iterations end if the mean log-likelihood increases by less than this.
        random_state: Seed or `RandomState`, as in scikit-learn.

    Attributes:
        means_: Mean directions, unit vectors, (k, d).
        concentrations_: Concentrations, (k,).
        weights_: Shares of the components, (k,).
        labels_: Most probable component of each row, (n,).
        lower_bound_: Mean log-likelihood of the rows that are not zero, in nats.
        converged_: Whether `tol` was reached.
        n_iter_: Number of iterations.
        n_features_in_: Number of columns d.

    Example:
        >>> mixture = VonMisesFisherMixture(n_components=3, random_state=0).fit(embeddings)
        >>> mixture.predict_proba(embeddings).shape
        torch.Size([60, 3])

    Reference:
        Banerjee, Dhillon, Ghosh and Sra, "Clustering on the unit hypersphere using von Mises-Fisher distributions",
        JMLR 2005.
    """

    _parameter_constraints: dict = {
        "n_components": [POSITIVE_INTEGER],
        "concentration_type": [StrOptions({"own", "shared"})],
        "n_init": [POSITIVE_INTEGER],
        "max_iter": [POSITIVE_INTEGER],
        "tol": [Interval(numbers.Real, 0, None, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        n_components: int = 1,
        *,
        concentration_type: str = "own",
        n_init: int = 1,
        max_iter: int = 100,
        tol: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.concentration_type = concentration_type
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the mixture to the rows of X (n, d), which count as often as their weights (n,) say; y is ignored."""
        rows = DirectionRows(self, X, reset=True, for_density=True, sample_weight=sample_weight)
        rows.warn_of_shares()
        if len(rows) < self.n_components:
            raise ValueError(f"n_samples={len(rows)} must be at least n_components={self.n_components}.")
        random = check_random_state(self.random_state)
        runs = (self._run(rows, random) for _ in range(self.n_init))
        parameters, self.lower_bound_, self.converged_, self.n_iter_, labels = max(runs, key=lambda run: run[1])
        if is_noise(rows, parameters):
            text = f"{len(rows)} uniform rows in {rows.dim} dimensions could have these {self.n_components} components"
            warnings.warn(f"{text}; their concentrations are unreliable. Use fewer, or more rows.", stacklevel=3)
        if not self.converged_:
            text = f"the likelihood still increased after {self.n_iter_} iterations; increase max_iter or tol."
            warnings.warn(text, ConvergenceWarning, stacklevel=3)
        self.means_, self.concentrations_, self.weights_ = (rows.output(values) for values in parameters)
        self.labels_ = rows.output(labels)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit the mixture and return the most probable component of each row of X: (n,)."""
        return self.fit(X, sample_weight=sample_weight).labels_

    def predict(self, X: Any) -> Any:
        """Return the most probable component of each row of X: (n,)."""
        rows, log_joint = self._log_joint(X)
        return rows.output(log_joint.argmax(1))

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of the components given each row of X: (n, k)."""
        rows, log_joint = self._log_joint(X)
        return rows.output(log_joint.softmax(1))

    def transform(self, X: Any) -> Any:
        """Return what `predict_proba` does: (n, k)."""
        return self.predict_proba(X)

    def score_samples(self, X: Any) -> Any:
        """Return the log-density of each row of X with respect to the surface measure, in nats: (n,)."""
        rows, log_joint = self._log_joint(X)
        return rows.output(log_joint.logsumexp(1))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the weighted mean log-density of the rows of X that are not zero, in nats; y is ignored."""
        log_densities, weights = self._log_densities(X, sample_weight)
        return float((log_densities * weights).sum() / weights.sum())

    def bic(self, X: Any) -> float:
        """Return the Bayesian information criterion on X; lower is better."""
        log_densities, _ = self._log_densities(X)
        count, dim = self.means_.shape
        parameters = count * (dim - 1) + (1 if self.concentration_type == "shared" else count) + count - 1
        return float(-2 * log_densities.sum()) + parameters * math.log(len(log_densities))

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Draw unit vectors (n, d) from the mixture; return them and their components (n,), in order of components."""
        means, concentrations, weights = self._fitted()
        random = check_random_state(self.random_state)
        generator = torch.Generator(means.device).manual_seed(int(random.randint(2**31)))
        probabilities = weights.cpu().double().numpy()
        count = check_integer("n_samples", n_samples, 1)
        labels = torch.as_tensor(random.multinomial(count, probabilities / probabilities.sum())).to(means.device)
        labels = torch.arange(len(means), device=means.device).repeat_interleave(labels)
        points = VonMisesFisher(means[labels], concentrations[labels], validate_args=False).rsample((), generator)
        return (points, labels) if isinstance(self.means_, Tensor) else (points.numpy(), labels.numpy())

    @property
    def _n_features_out(self) -> int:
        return len(self.weights_)

    def _fitted(self) -> Parameters:
        check_is_fitted(self)
        return Parameters(*map(torch.as_tensor, (self.means_, self.concentrations_, self.weights_)))

    def _log_joint(self, X: Any, sample_weight: Any = None) -> tuple[DirectionRows, Tensor]:
        fitted = self._fitted()
        rows = DirectionRows(self, X, reset=False, for_density=True, sample_weight=sample_weight)
        parameters = Parameters(*(values.to(rows.device, rows.dtype) for values in fitted))
        blocks = rows.parts(rows.dim + len(parameters.weights))
        return rows, torch.cat([log_joint(*rows[block], parameters) for block in blocks])

    def _log_densities(self, X: Any, sample_weight: Any = None) -> tuple[Tensor, Tensor]:
        """Return the log-densities of the rows that are not zero, and their weights."""
        rows, log_joint = self._log_joint(X, sample_weight)
        if rows.is_zero.all():
            raise ValueError("all rows of X are zero and have no direction; pass at least one other row.")
        return log_joint[~rows.is_zero].logsumexp(1), rows.weights[~rows.is_zero]

    def _run(self, rows: DirectionRows, random: Any) -> tuple[Parameters, float, bool, int, Tensor]:
        """Return parameters, likelihood, whether it converged, iterations and labels, from clusters of k-means."""
        k_means, seed = SphericalKMeans(self.n_components, max_iter=20), random.randint(2**31)
        labels, *_ = k_means._best_run(rows, None, check_random_state(seed))
        sums, counts = all_sums_by_label(rows, labels, self.n_components)
        likelihood, iteration, converged, shared = -math.inf, -1, False, self.concentration_type == "shared"
        while not converged and iteration < self.max_iter:
            previous = likelihood
            likelihood, labels, sums, counts, squares = expect(rows, maximize(sums, counts, shared=shared))
            iteration, converged = iteration + 1, likelihood - previous < self.tol
        parameters = shrink(rows, maximize(sums, counts, squares, shared=shared))
        likelihood, labels, *_ = expect(rows, parameters)
        return parameters, likelihood, converged, iteration, labels


def maximize(sums: Tensor, counts: Tensor, squares: Tensor | None = None, *, shared: bool = False) -> Parameters:
    """Return the most likely parameters by sums of rows (k, d), weights and, to correct the bias, squared weights."""
    norms = torch.linalg.vector_norm(sums, dim=1)
    lengths = (norms / torch.where(counts > 0, counts, 1.0)).clamp(max=1)
    if squares is not None:
        # sum_{i != j} w_i w_j <x_i, x_j> = |sum_i w_i x_i|^2 - sum_i w_i^2, since |x_i| = 1; likewise for the weights.
        pairs = counts.square() - squares
        cosines = (norms.square() - squares) / torch.where(pairs > 0, pairs, 1.0)
        lengths = torch.where(pairs > 1e-9 * counts.square(), cosines.clamp(0, 1).sqrt(), lengths)
    total = counts.sum()
    if shared:
        lengths = ((lengths * counts).sum() / total.clamp_min(1)).expand(len(counts))
    # A component without rows has the uniform distribution and the weight 0; its direction is arbitrary.
    concentrations = bessel.concentration_from_mean_resultant_length(lengths, sums.shape[1])
    weights = torch.where(total > 0, counts / total, 1 / len(counts))
    return Parameters(mean_direction(sums), concentrations.clamp(max=LARGEST_CONCENTRATION), weights)


def spread(parameters: Parameters) -> float:
    """Return d times the mean squared length of the means of the components, divided by their number."""
    count, dim = parameters.means.shape
    squares = bessel.mean_resultant_length(parameters.concentrations, dim).square()
    return float(dim * (parameters.weights * squares).sum() / count)


def is_noise(rows: DirectionRows, parameters: Parameters) -> bool:
    """Whether uniform rows could have several components like these, whose concentrations were shrunk."""
    ratio = rows.dim / max(float(rows.used_weights.sum()), 1.0)
    limit = math.sqrt(ratio) if ratio < 1 else 2 * math.sqrt(ratio) + ratio
    return 1 < len(parameters.weights) < rows.dim / 2 and spread(parameters) < limit


def shrink(rows: DirectionRows, parameters: Parameters) -> Parameters:
    """Reduce concentrations of components that are hardly more than noise to what the second moment of the rows shows.

    The means of k components add k spikes s to the eigenvalues b of the noise of d E[x x^T], whose sum is d times the
    mean squared length. With g = d / n, a spike above sqrt(g) appears as the eigenvalue b (1 + s) (1 + g / s), and
    one below it is hidden in the noise (Baik and Silverstein, 2006), whose eigenvalues exceed 1 by at most
    2 sqrt(g) + g (Marchenko and Pastur). Without n > d rows and k < d / 2, nothing changes.
    """
    count, dim, total = len(parameters.weights), rows.dim, float(rows.used_weights.sum())
    ratio, found = dim / max(total, 1.0), spread(parameters)
    if not 1 < count < dim / 2 or ratio >= 1 or found > 2 * (2 * math.sqrt(ratio) + ratio):
        return parameters
    moment = torch.zeros(dim, dim, dtype=rows.dtype, device=rows.device)
    for index in rows.parts(dim):
        block, scales = rows[index]
        moment += (block * (scales.square() * rows.weights[index])[:, None]).T @ block
    values = torch.linalg.eigvalsh(moment * ratio)
    spikes, noise = 0, values.mean()
    for _ in range(count):  # the spikes that are found make the noise smaller
        larger = int((values[-count:] > noise * (1 + math.sqrt(ratio)) ** 2).sum())
        if larger == spikes:
            break
        spikes, noise = larger, values[: dim - larger].mean()
    excess = values[dim - spikes :] / noise - 1 - ratio
    shown = float(noise * (excess + (excess.square() - 4 * ratio).clamp_min(0).sqrt()).sum()) / 2 / count
    lengths = bessel.mean_resultant_length(parameters.concentrations, dim) * min(1.0, shown / found) ** 0.5
    return parameters._replace(concentrations=bessel.concentration_from_mean_resultant_length(lengths, dim))


def expect(rows: DirectionRows, parameters: Parameters) -> tuple[float, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean log-likelihood, labels (n,), and sums (k, d), weights (k,) and squared weights (k,) of rows."""
    labels, likelihood, sums = [], parameters.weights.new_zeros(()), torch.zeros_like(parameters.means)
    counts, squares = torch.zeros(2, len(parameters.weights), dtype=sums.dtype, device=sums.device)
    for index in rows.parts(rows.dim + len(counts)):
        (block, scales), weights = rows[index], rows.used_weights[index]
        joint = log_joint(block, scales, parameters)
        likelihood += (joint.logsumexp(1) * weights).sum()
        labels.append(joint.argmax(1))
        responsibilities = joint.softmax(1)
        weighted = responsibilities * weights[:, None]
        sums += (weighted * scales[:, None]).T @ block
        counts += weighted.sum(0)
        squares += (weighted * responsibilities).sum(0)  # a row of weight w is w rows
    used = rows.used_weights.sum()  # 0 if all rows are zero
    return float(likelihood / torch.where(used > 0, used, 1.0)), torch.cat(labels), sums, counts, squares


def log_joint(block: Tensor, scales: Tensor, parameters: Parameters) -> Tensor:
    """Return the log-densities of rows (b, d) in each component, plus the logarithms of its weight: (b, k)."""
    means, concentrations, weights = parameters
    uniform = bessel.log_uniform_density(block.shape[1])
    peaks = uniform + bessel.log_vmf_peak(concentrations, block.shape[1]) + weights.log()
    joint = peaks + concentrations * ((block @ means.T) * scales[:, None] - 1)
    return torch.where((scales > 0)[:, None], joint, uniform - math.log(len(weights)))
