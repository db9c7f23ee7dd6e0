"""Differences over seeds crossed with test images, over redrawn splits, and outcomes per image of any measure."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hf_sphere.comparison.significance import Test, TestResult, difference_test
from hf_sphere.utils.checks import check_not_text

Outcomes = Mapping[Any, float]  # by the id of the test image, an int or str

Variation = Literal["seeds", "seeds and test images", "resampled splits", "test images"]
"""What an interval of a difference accounts for; only that of test images if a run has a single seed."""


def widest_test(
    ours: Sequence[float], theirs: Sequence[float], test: Test, values: Sequence[Any], test_fraction: float | None
) -> tuple[TestResult | None, Variation | None]:
    """Return the test with the widest interval of those that are possible, and its variation.

    `values` are what `ours` and `theirs` are the means of, if they are outcomes; the rest is that of `compare_runs`.
    """
    results: list[TestResult | None] = [difference_test(ours, theirs, test), None, None, None]
    rows = [row for group in values for row in group]
    if isinstance(rows[0], Mapping) and min(map(len, values)) > 1:
        results[1] = difference_test(ours, theirs, test, image_variance(values[0], values[1], test))
    elif isinstance(rows[0], Mapping) and all(row.keys() == rows[0].keys() for row in rows):
        means = ([np.mean([row[image] for row in group]) for image in rows[0]] for group in values)
        results[3] = difference_test(next(means), next(means), "paired")
    if test_fraction is not None:
        results[2] = difference_test(ours, theirs, test, overlap=test_fraction / (1 - test_fraction))
    pairs = [(result, name) for result, name in zip(results, get_args(Variation), strict=True) if result]
    return max(pairs, key=lambda pair: pair[0].interval[1] - pair[0].interval[0], default=(None, None))


def image_variance(ours: Sequence[Outcomes], theirs: Sequence[Outcomes], test: Test) -> tuple[float, int]:
    """Return the variance of a difference by the choice of test images that several seeds share, and its freedom.

    Each group has at least two seeds of at least two images; the seeds of a paired test have the same images.
    """
    # Two-way random effects: outcome z_si = mean + seed_s + image_i + noise_si of n_s images, a set T_s, with mean v_s.
    # The variance of the mean of S seeds exceeds the expectation of s^2 / S, which a test of the v_s estimates, by the
    # mean covariance of v_s and v_t over s != t: Var(image) |T_s & T_t| / (n_s n_t). Var(image) is estimated by the
    # products (z_si - v_s)(z_ti - v_t) of an image in different seeds, whose noise is independent. With one test set of
    # n images this is 1 / n times the variance over images of the mean over seeds, minus the mean square of the
    # interaction / S. Between independent groups (Welch), the covariances of both are subtracted.
    if test == "paired":
        ours, theirs = [{image: a[image] - b[image] for image in a} for a, b in zip(ours, theirs, strict=True)], []
    rows = [*ours, *theirs]
    ids = [*dict.fromkeys(image for row in rows for image in row)]
    table = np.array([[row.get(image, math.nan) for image in ids] for row in rows], dtype=np.float64)
    tested = np.isfinite(table)
    sizes = tested.sum(1, keepdims=True)
    residuals = np.where(tested, table - np.nanmean(table, 1, keepdims=True), 0.0) / sizes
    common = tested.astype(np.float64) @ tested.T
    # The means v_s are estimated from the same images, so that a product has this fraction of Var(image).
    kept = 1 - 1 / sizes - 1 / sizes.T + common / (sizes * sizes.T)
    covariances = residuals @ residuals.T / np.where(common > 0, kept, 1.0)
    counts = np.repeat([len(ours), len(theirs)], [len(ours), len(theirs)])
    signs = np.where(np.arange(len(rows)) < len(ours), 1, -1)
    weights = np.where(np.equal.outer(signs, signs), 1 / (counts - 1), -1 / counts) / counts[:, None]
    np.fill_diagonal(weights, 0.0)
    freedom = int((tested.sum(0) > 1).sum()) - 1  # of a variance over the images that several rows have
    return max(0.0, float((weights * covariances).sum())), max(1, freedom)


def pseudo_values(measure: Callable[[Tensor], float], ids: Sequence[int] | Sequence[str]) -> dict[Any, float]:
    """Return outcomes per image of a measure that is no mean over images, such as AUROC, for `compare_runs`.

    They are the jackknife's pseudo-values n theta - (n - 1) theta_(-i), where theta_(-i) is the measure without image
    i, shifted so that their mean is theta, the measure of all images. For a mean they are the values of the images. The
    measure is computed n + 1 times, and must be smooth: the jackknife fails for a median.

    Args:
        measure: Computes the measure from the indices of the rows it uses.
        ids: An id per image, in the order of the rows. Images with the same id are a block: they are left out together
            and have one outcome, which takes less time for many images. Blocks should have nearly equal sizes.

    Raises:
        ValueError: If there are fewer than two ids, or the measure is not finite.

    Reference:
        Tukey, "Bias and confidence in not quite large samples", Annals of Mathematical Statistics 29, 1958.

    Example:
        >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> pseudo_values(lambda rows: correct[rows].mean().item(), ["a", "b"])
        {'a': 1.0, 'b': 0.0}
    """
    check_not_text("ids", ids)
    blocks: dict[Any, list[int]] = {}
    for row, image in enumerate(ids):
        blocks.setdefault(image, []).append(row)
    if len(blocks) < 2:
        raise ValueError(f"ids must be at least 2 different ones; got {len(blocks)}.")
    rows = torch.arange(len(ids))
    theta = float(measure(rows))
    without = [float(measure(rows[torch.isin(rows, torch.tensor(block), invert=True)])) for block in blocks.values()]
    infinite = [image for image, value in zip(blocks, without, strict=True) if not math.isfinite(value)]
    if infinite or not math.isfinite(theta):
        raise ValueError(f"the measure must be finite; got {theta}, and not without the images {infinite[:5]}.")
    mean = math.fsum(without) / len(blocks)
    return {image: theta + (len(blocks) - 1) * (mean - value) for image, value in zip(blocks, without, strict=True)}
