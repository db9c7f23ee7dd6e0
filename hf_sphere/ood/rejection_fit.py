"""The fit of a rejection: which score, and which values of it known inputs have."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.nn.rejection import SCORES, Rejection, images_needed, rejected_ranks
from hf_sphere.ood.detector import FITTED, OODDetector, compare_scores
from hf_sphere.ood.outputs import Outputs, model_outputs
from hf_sphere.utils.checks import check_choice, check_number, check_seed
from hf_sphere.utils.modules import digest_weights, unwrap
from hf_sphere.utils.problem_types import SINGLE_LABEL, problem_type

MOST_LEFT_OUT = 10
"""Number of classes that are left out in turn to compare scores without unknown inputs."""


def fit_rejection(
    model: nn.Module,
    batches: Iterable[Any],
    level: float = 0.05,
    score: str = "auto",
    *,
    by_class: bool = False,
    unknown: Iterable[Any] | None = None,
    seed: int = 0,
) -> Rejection:
    """Fit a rejection of unknown inputs to inputs of the model's classes that it has not seen.

    They must be neither trained on, nor used to choose the epoch, nor those that the model is tested on. At most the
    level of further inputs of these classes is then called unknown; see `Rejection`.

    A `SphereVisionForImageClassification` gets the rejection as `model.rejection`: its output in eval mode then has
    `known` and `p_value`, also after saving, loading and export. For another model, call what is returned with the
    embeddings and logits of `model_outputs`.

    To fit or choose a score takes one half of the inputs; the other half calibrates the level. `auto` chooses the score
    with the highest AUROC of known against unknown inputs: with `unknown` among all scores; else among the scores of
    logits, with the inputs of some classes in turn as unknown, computed without the logit of the class. That is a
    proxy, since the network has learned these classes.

    Args:
        model: A classifier; see `model_outputs`.
        batches: Inputs, labeled for `auto`, `by_class` and the p-values of classes.
        level: Share of known inputs that may be called unknown.
        score: `auto`, or one of `hf_sphere.ood.SCORES`.
        by_class: Compare each class with its own inputs, so that the level holds in each class. It needs 1 / level
            inputs of each class.
        unknown: Inputs of other classes, to measure the rejected fraction, in `settings["unknown"]`; for `auto`, one
            half chooses the score and the other measures.
        seed: Of the halves.

    Returns:
        The rejection; `settings` has what was chosen and why.

    Raises:
        ValueError: If the level is not between 0 and 1, there are too few inputs for it, labels are missing or are no
            class indices, or the score cannot be computed.
        TypeError: If an output is no dense tensor.
        OSError: If a model or dataset is named that cannot be loaded.

    Example:
        >>> rejection = fit_rejection(model, held_out, level=0.05)  # doctest: +SKIP
        >>> model(pixel_values).known  # doctest: +SKIP
        tensor([ True, False])
    """
    from scipy.stats import binomtest  # slow to import

    check_number("level", level, "(0, 1)")
    seed = check_seed(seed)
    check_choice("score", score, ("auto", *SCORES))
    model = unwrap(model)
    config: Any = getattr(model, "config", None)
    if problem_type(model) != SINGLE_LABEL:
        raise ValueError(f"a rejection needs a model of one class per input; this one is for {problem_type(model)}.")
    known = _outputs(model, batches).checked()
    known.require(SCORES[score].needs if score != "auto" else (), score)
    others = None if unknown is None else _outputs(model, unknown)._replace(labels=None).checked()
    total, classes = known.logits.shape
    if known.labels is not None and (wrong := int(((known.labels < 0) | (known.labels >= classes)).sum())):
        what = f"{wrong:,} of {total:,} labels are none of the model's classes, 0 to {classes - 1}"
        raise ValueError(f"{what}; pass inputs of other classes as `unknown`.")
    needs_labels = by_class or (score == "auto" and others is None) or "labels" in FITTED.get(score, ((),))[0]
    known.require(("labels",) * needs_labels, f"{score}{' by class' * by_class}")
    # Numbered, so that images with equal outputs are not taken for the same one.
    known = known._replace(ids=torch.arange(total))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    is_split = score == "auto" or score in FITTED
    if by_class and is_split:  # halves of each class
        half = torch.zeros_like(order).index_fill_(0, order[known.labels[order].argsort(stable=True)][::2], 1)
        order = order[half[order].argsort(stable=True)]
    first, second = (_select(known, rows) for rows in order.tensor_split([total // 2 if is_split else 0]))
    fewest, label = len(second.logits), None
    if by_class:
        counts = torch.bincount(known.labels, minlength=classes) // (1 + is_split)
        fewest, label = int(counts.min()), int(counts.argmin())
    check_count(fewest, level, is_split=is_split, label=label)
    settings: dict[str, Any] = {"score": score, "level": level, "by_class": by_class, "num_images": len(second.logits)}
    chosen_by = measured = None
    if others is not None:
        at = torch.randperm(count := len(others.logits), generator=torch.Generator().manual_seed(seed))
        others = others._replace(ids=total + torch.arange(count))
        chosen_by, measured = (_select(others, rows) for rows in at.tensor_split([-(-count // 2) * (score == "auto")]))
    if score == "auto":
        ranking = _rank(first, chosen_by, by_class=by_class)
        settings |= {"score": max(ranking, key=lambda name: ranking[name]), "ranking": ranking}
        settings["ranked_by"] = "left-out classes" if others is None else "unknown inputs"
    rejection = _calibrate(settings, first, second)
    if config is not None:
        names = getattr(config, "id2label", {})
        settings["class_names"] = [names.get(index) for index in range(classes)]
    settings["weights"] = digest_weights(model, is_widened=True)
    if measured is not None:
        count = len(measured.logits)
        rejected = int((~rejection(*measured[:2], measured.concentrations).known).sum())
        low, high = map(float, binomtest(rejected, count).proportion_ci(method="wilson"))
        settings["unknown"] = {"rejected": rejected / count, "low": low, "high": high, "num_images": count}
    if (attach := getattr(model, "set_rejection", None)) is not None:
        attach(rejection)
    return rejection


def _outputs(model: nn.Module, batches: Any) -> Any:
    """Return outputs of a model without its calibration, which can change without the rejection."""
    config: Any = getattr(model, "config", None)
    if isinstance(batches, Outputs) or getattr(config, "calibration", None) is None:
        return batches if isinstance(batches, Outputs) else model_outputs(model, batches)
    calibration, config.calibration = config.calibration, None
    try:
        return model_outputs(model, batches)
    finally:
        config.calibration = calibration


def _select(outputs: Outputs, rows: Tensor) -> Any:
    return Outputs(*(None if values is None else values[rows] for values in outputs))


def check_count(count: int, level: float, *, is_split: bool, label: int | None = None) -> None:
    """Raise an error if there are too few inputs for a level, of all classes or of that with the fewest."""
    if count < (needed := images_needed(level)):
        half = f", and as many to choose or fit the score, so {2 * needed:,}" if is_split else ""
        each, there = ("", "there are") if label is None else (" of each class", f"class {label} has")
        raise ValueError(
            f"level {level:g} needs {needed:,} images{half}{each}; {there} {count:,} for the level. Hold out more, or "
            "choose a higher level."
        )


def _calibrate(settings: dict[str, Any], fitted_to: Any, known: Any) -> Rejection:
    """Return the rejection by a score that is fitted to one part of the inputs, with the scores of the other part."""
    name, by_class, count = settings["score"], settings["by_class"], len(known.logits)
    state: dict[str, Any] = FITTED[name][1](fitted_to, **_options(name, fitted_to)) if name in FITTED else {}
    tensors = {key: value.float() for key, value in state.items() if isinstance(value, Tensor)}
    settings["options"] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    shapes = {} if by_class else {"calibration": [count]}
    if known.labels is not None:
        size = [known.logits.shape[1], int(torch.bincount(known.labels).max())]
        shapes["class_calibration"] = size if by_class else [1, count]
    settings["shapes"] = shapes | {key: list(value.shape) for key, value in tensors.items()}
    rejection = Rejection(settings)
    rejection.load_state_dict(tensors, strict=False)
    values, classes = rejection.score(known)
    if values is not None:
        if not values.isfinite().all():
            raise ValueError(f"the score {name} is not finite for some of the inputs; name another.")
        rejection.calibration.copy_(values.sort().values)
    if classes is not None and known.labels is not None:
        own = classes.gather(1, known.labels[:, None])[:, 0]
        if values is not None:  # what is called unknown has an empty set, which misses the class
            ranks = torch.searchsorted(rejection.calibration, values, right=True)
            is_known = ranks > rejected_ranks(torch.tensor(len(values)), settings["level"])
            own = own.where(is_known, torch.finfo(own.dtype).min)
        groups = [known.labels == label for label in range(classes.shape[1])] if by_class else [...]
        ordered = [own[group].sort().values for group in groups]
        rows = torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=math.inf)
        rejection.class_calibration.copy_(rows)  # type: ignore[union-attr]  # its shape was set above
    return rejection.eval()


def _options(name: str, fitted_to: Any) -> dict[str, int]:
    """Return the options of a score: k of `knn` is a tenth of the size of a class, but from 1 to 50."""
    if name != "knn":
        return {}
    labels = torch.zeros(len(fitted_to.logits)) if fitted_to.labels is None else fitted_to.labels
    return {"k": min(50, max(1, int(labels.unique(return_counts=True)[1].median()) // 10))}


def _rank(known: Any, unknown: Any, *, by_class: bool) -> dict[str, float]:
    """Return the AUROC of scores: with unknown inputs, or the mean over left-out classes."""
    names = [name for name, score in SCORES.items() if score.of_classes or not by_class]
    if unknown is not None:
        fit, inside = (_select(known, rows) for rows in torch.arange(len(known.logits)).chunk(2))
        sets = [(fit, inside, {"unknown": unknown})]
    else:
        # Only scores of logits: the network has learned the left-out class, whose embeddings are then a cluster of
        # their own. Distances find it, but not what is unknown to the network (benchmarks/rejection.py).
        names, sets = [name for name in names if SCORES[name].needs == ("logits",)], []
        for left_out in torch.randperm(known.logits.shape[1], generator=torch.Generator().manual_seed(0)).tolist():
            logits = torch.cat([known.logits[:, :left_out], known.logits[:, left_out + 1 :]], 1)
            is_out = known.labels == left_out
            if 0 < int(is_out.sum()) < len(is_out) and len(sets) < MOST_LEFT_OUT:
                sets.append((None, Outputs(logits=logits[~is_out]), {"unknown": Outputs(logits=logits[is_out])}))
    if not sets:
        raise ValueError("score='auto' needs labeled inputs of at least two classes; name a score, or give unknown.")
    detectors = {name: OODDetector(name, **_options(name, sets[0][0])) for name in names}
    results = [compare_scores(*each, detectors) for each in sets]
    return {name: sum(each.mean(name) for each in results) / len(results) for name in results[0].results}
