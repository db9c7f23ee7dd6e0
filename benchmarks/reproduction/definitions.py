"""What the metrics of the results files mean."""

import re

_SPLITS = {"eval": "the evaluation split", "validation": "the validation images", "train": "the training images"}

_METRICS = {
    "accuracy": "accuracy on {split}",
    "accuracy_of_episodes": "mean accuracy over episodes of {split}",
    "accuracy_with_flips": "accuracy on {split} with logits averaged over each image and its mirror image",
    "accuracy_interval": "half-width of the 95 % interval of the mean accuracy over the episodes of one model",
    "loss": "mean loss on {split}",
    "nll": "mean negative log-likelihood of the classes of {split}",
    "brier": "mean squared distance of probabilities and one-hot labels on {split}",
    "mean_absolute_error": "mean absolute error on {split}, in the unit of the values",
    "recall_at_1": "fraction of {split} whose nearest other image has the same class",
    "map_at_r": "mean average precision at R on {split}, where R is the number of other images of the class",
    "perplexity": "exponential of the mean loss per masked token of {split}",
    "calibration_error_equal_mass_l2": "expected calibration error on {split}: 15 bins of equal mass, root mean square",
    "calibration_error_equal_width_l1": "expected calibration error on {split}: 15 bins of equal width, mean",
}

_OTHERS = {
    r"best_epoch": "epoch with the best selection metric, counted from 1",
    r"best_\w+": "value of the selection metric in the best epoch",
    r"epoch": "epochs trained",
    r"eval_accuracy_last_quarter": "mean accuracy on the evaluation split over the last quarter of the epochs",
    r"steps": "optimizer steps",
    r"train_runtime": "seconds of training, without evaluation",
    r"ood_\w+_auroc_\w+": "AUROC of the detection of out-of-distribution images by this score",
    r"ood_\w+_aupr_\w+": "area under the precision-recall curve of this detection, in-distribution images as positives",
    r"ood_\w+_fpr_at_95_tpr_\w+": "false positive rate of this detection at a true positive rate of 95 %",
    r"mass": "fraction of the filters of the network whose projection on (1, ..., 1) is not positive",
    r"mean": "mean over the filters of the projection of their direction on (1, ..., 1) / sqrt(N)",
    r"num_layers_biased": "layers with a corrected p-value of the sign test below 0.05",
    r"num_layers_unlike_isotropic": "layers with a corrected p-value of the sign or Kolmogorov-Smirnov test below 0.05",
    r"rank_correlation": "rank correlation over layers of |mass - 1/2| and the relative loss of accuracy by a reset",
    r"drop_biased": "mean relative loss of accuracy by the reset of one of the biased layers",
    r"drop_unbiased": "mean relative loss of accuracy by the reset of one of the other layers",
    r"num_critical_layers": "layers whose reset to the initialization of the run reduces the accuracy by more than 5 %",
}

_HIGHER_IS_BETTER = ("accuracy", "recall", "map_at_r", "auroc", "aupr")
_LOWER_IS_BETTER = ("calibration", "fpr")


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction, which is shown in percent."""
    return any(name in metric for name in (*_HIGHER_IS_BETTER, *_LOWER_IS_BETTER))


def scale(metric: str) -> float:
    """Return the factor between the values of the results files and those shown."""
    return 100.0 if is_share(metric) else 1.0


def is_higher_better(metric: str) -> bool:
    """Return whether a larger value of a fraction is better."""
    return any(name in metric for name in _HIGHER_IS_BETTER)


def error_rate(metric: str, value: float) -> float | None:
    """Return the error rate in percent that a shown value of a metric means; None if the metric is not a fraction."""
    if not is_share(metric):
        return None
    return 100.0 - value if is_higher_better(metric) else value


def define(name: str, *, in_episodes: bool = False) -> str:
    """Return the definition of a metric, or an empty string if it is not reported.

    Args:
        name: The name, after the folder of the recipe that measured it, if that is not the training.
        in_episodes: Whether the accuracy is over episodes.
    """
    metric = name.rpartition("/")[2]
    split, _, kind = metric.partition("_")
    kind, plain = kind.removeprefix("uncalibrated_"), kind.startswith("uncalibrated_")
    kind = "accuracy_of_episodes" if in_episodes and kind == "accuracy" else kind
    if split in _SPLITS and kind in _METRICS:
        chosen = "after training" if split != "train" else "in the last epoch, with augmentation"
        calibrated = ", without calibration" if plain else ", calibrated" if kind in ("nll", "brier") else ""
        return f"{_METRICS[kind].format(split=_SPLITS[split])}{calibrated}, {chosen}"
    return next((text for pattern, text in _OTHERS.items() if re.fullmatch(pattern, metric)), "")
