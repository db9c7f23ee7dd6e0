"""Evaluate stored embeddings: accuracy, calibration, retrieval, class overlap and out-of-distribution detection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_sphere import metrics
from hf_sphere.evaluation.options import EvaluationOptions
from hf_sphere.ood import SCORES, OODDetector, Outputs, compare_scores
from hf_sphere.search.store import Embeddings, read_embeddings
from hf_sphere.utils.problem_types import why_no_accuracy


@dataclass
class Evaluation:
    """Results of `evaluate_embeddings`.

    Attributes:
        distance: Distance of retrieval.
        results: Value of each metric by name; rates are floats in [0, 1], counts are integers.
        notes: Reasons why metrics were skipped or exclude images.
        reliability: Bins of the reliability diagram, if there are predictions of the labels' classes.
        risk_coverage: Coverage and risk, (N,) each, by certainty measure, under the same condition.
    """

    distance: str
    results: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reliability: metrics.ReliabilityBins | None = None
    risk_coverage: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, prefix: str, values: Mapping[str, float]) -> None:
        """Add results whose names begin with a prefix."""
        self.results |= {f"{prefix}_{name}": value for name, value in values.items()}


def evaluate_embeddings(
    data: Embeddings,
    options: EvaluationOptions | None = None,
    *,
    ood: Mapping[str, Embeddings] | None = None,
    train: Embeddings | None = None,
) -> Evaluation:
    """Compute all metrics for which the required data is stored; others are skipped with a note.

    Args:
        data: Embeddings with labels.
        options: Options of the metrics; the defaults if None.
        ood: Embeddings of out-of-distribution (OOD) images by name, with the certainty measures of `data`.
        train: Embeddings of the training images, for the scores of `hf_sphere.ood` that are fitted to them.

    Returns:
        The metrics: `eval_accuracy`, `eval_recall_at_1`, `ood_<name>_auroc_confidence` and so on. The suffix is
        `confidence` or a score of `hf_sphere.ood`, without `max_softmax`, which is equivalent to `confidence`.

    Raises:
        ValueError: If the embeddings have no labels, a curvature is missing or set for another distance, or training
            embeddings are also among those that are tested.

    Example:
        >>> evaluate_embeddings(read_embeddings("outputs/embeddings")).results["eval_recall_at_1"]  # doctest: +SKIP
    """
    if data.labels is None:
        raise ValueError(f"{data.name} has no labels, which the metrics need.")
    options = options or EvaluationOptions()
    distance = options.distance or data.about.get("distance", "cosine")
    curvature = options.curvature or (data.about.get("curvature") if distance == "hyperbolic" else None)
    if (curvature is None) != (distance != "hyperbolic"):
        raise ValueError(f"the hyperbolic distance needs --curvature, and no other has one; this one is {distance}.")
    retrieval = {"distance": distance, "ks": options.ks} | ({} if curvature is None else {"curvature": curvature})
    evaluation = Evaluation(distance)
    is_known = _evaluate_predictions(evaluation, data)
    _evaluate_retrieval(evaluation, data, options, retrieval)
    if options.overlap_threshold is not None:
        _evaluate_overlap(evaluation, data, is_known, options)
    if ood:
        _evaluate_ood(evaluation, data, ood, train)
    return evaluation


def _evaluate_ood(
    evaluation: Evaluation, data: Embeddings, ood: Mapping[str, Embeddings], train: Embeddings | None
) -> None:
    """Add the metrics of OOD detection by the stored confidence and the scores of `hf_sphere.ood`."""
    for other in (*ood.values(), train or data):
        # Paths of one folder may differ, for instance be relative or absolute.
        models = {Path(about["model"]).resolve() for about in (data.about, other.about) if "model" in about}
        if len(models) == 2:
            evaluation.notes.append(f"{other.name} was embedded by another model, so its scores are not comparable.")

    def outputs(each: Embeddings) -> Outputs:
        logits = None if why_no_accuracy(each.problem_type) else each.logits
        return Outputs(each.embeddings, logits, each.labels, each.certainties.get("concentration"), each.row_ids)

    omitted = "max_softmax" if "confidence" in data.certainties else None  # equivalent to the confidence
    detectors = {name: OODDetector(name) for name in SCORES if name != omitted}
    fitted, others = None if train is None else outputs(train), {name: outputs(each) for name, each in ood.items()}
    comparison = compare_scores(fitted, outputs(data), others, detectors)
    if (confidences := data.certainties.get("confidence")) is not None:
        comparison.results["confidence"] = {
            name: metrics.detection_scores(confidences, other.certainties["confidence"]) for name, other in ood.items()
        }
    for score, sets in comparison.results.items():
        for name, values in sets.items():
            evaluation.add(f"ood_{name}", {f"{metric}_{score}": value for metric, value in values.items()})
    evaluation.notes += [f"OOD score {name} is skipped: {reason}" for name, reason in comparison.skipped.items()]
    if train is None:
        evaluation.notes.append("OOD scores are fitted to the training images with --train_embeddings.")
    evaluation.notes.append(f"the OOD score with the highest mean AUROC is {comparison.best}.")


def read_ood_embeddings(paths: Sequence[str], data: Embeddings, **options: Any) -> dict[str, Embeddings]:
    """Read embeddings of out-of-distribution images, by folder name, with the certainty measures of `data`."""
    names = [Path(path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"results are named by folder, and two folders have the same name: {', '.join(names)}.")
    options |= {"needed": list(data.certainties), "only_split": True}
    return {name: read_embeddings(path, **options) for name, path in zip(names, paths, strict=True)}


def _evaluate_predictions(evaluation: Evaluation, data: Embeddings) -> Tensor | None:
    """Add accuracy, calibration and risk; return a mask (N,) of the labels that are classes of the model."""
    skipped, note = "accuracy, calibration and risk are skipped", evaluation.notes.append
    if reason := why_no_accuracy(data.problem_type) or ("there is no column prediction" * (data.predictions is None)):
        note(f"{skipped}: {reason}.")
        return None
    is_known, correct = data.match_predictions()
    evaluation.results["eval_num_unknown_labels"] = unknown = int((~is_known).sum())
    if unknown == len(is_known):
        note(f"{skipped}: no label is one of the model's classes (an open set).")
        return None
    if unknown:
        what = f"{unknown:,} of {len(is_known):,} labels are not among the model's classes"
        note(f"{what}; accuracy, calibration and risk exclude them.")
    if trained := data.about.get("num_training_images"):
        note(f"the model was trained on {trained:,} of these images, so these are not the results for new images.")
    correct = correct[is_known]
    certainties = {name: values[is_known] for name, values in data.certainties.items()}
    evaluation.results["eval_accuracy"] = correct.double().mean().item()
    if fitted := data.about.get("num_calibration_images"):
        note(f"calibration is skipped: the model was calibrated on {fitted:,} of these images; evaluate other ones.")
    else:
        evaluation.add("eval", metrics.calibration_errors(certainties["confidence"], correct))
        evaluation.reliability = metrics.reliability_bins(certainties["confidence"], correct)
    for name, values in certainties.items():
        evaluation.risk_coverage[name] = metrics.risk_coverage(values, correct)
        suffix = "" if name == "confidence" else f"_{name}"
        evaluation.results[f"eval_area_under_risk_coverage{suffix}"] = metrics.area_under_risk_coverage(values, correct)
    return is_known


def _evaluate_retrieval(evaluation: Evaluation, data: Any, options: EvaluationOptions, retrieval: Any) -> None:
    counts, note = data.labels.unique(return_counts=True)[1], evaluation.notes.append
    if len(counts) < 2 or counts.max() < 2:
        why = "all images are of one class" if len(counts) < 2 else "no class has two images"
        note(f"retrieval is skipped: {why}.")
        return
    if data.row_ids is not None and (repeated := len(data.row_ids) - len(data.row_ids.unique())):
        note(f"retrieval is skipped: {repeated:,} row(s) repeat an image, which would be its own neighbor.")
        return
    scores = metrics.retrieval_scores(data.embeddings, data.labels, **retrieval)
    evaluation.add("eval", scores)
    if excluded := scores["num_excluded"]:
        note(f"{excluded:,} image(s) are not retrieval queries, since each is alone in its class.")
    concentrations = data.certainties.get("concentration")
    if concentrations is None or options.num_samples == 0 or evaluation.distance == "hyperbolic":
        return
    if zero := int((~data.embeddings.any(-1)).sum()):
        note(f"sampled retrieval is skipped: {zero:,} embedding(s) are zero vectors (no direction).")
        return
    retrieval |= {"num_samples": options.num_samples, "seed": options.seed}
    sampled = metrics.sampled_retrieval_scores(data.embeddings, concentrations, data.labels, **retrieval)
    for name, score in sampled.items():
        ends = {f"{name}_low": score["low"], f"{name}_high": score["high"]}
        evaluation.add("eval_sampled", {name: score["mean"], **ends})


def _evaluate_overlap(evaluation: Evaluation, data: Any, is_known: Tensor | None, options: EvaluationOptions) -> None:
    if is_known is None:
        why = why_no_accuracy(data.problem_type) or "no label is one of the model's classes"
        evaluation.notes.append(f"class overlap is skipped: {why}.")
        return
    points, correct = data.embeddings[is_known], data.match_predictions()[1][is_known]
    if options.overlap_distance == "angular" and (zero := int((~points.any(-1)).sum())):
        what = f"class overlap is skipped: {zero:,} embedding(s) are zero vectors, which have no direction"
        evaluation.notes.append(f"{what}; use --overlap_distance euclidean.")
        return
    threshold: dict[str, Any] = {"threshold": options.overlap_threshold, "distance": options.overlap_distance}
    evaluation.add("eval_overlap", metrics.class_overlap(points, data.labels[is_known], correct, **threshold))
