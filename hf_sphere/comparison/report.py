"""The results of a comparison as text, figure and JSON."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sphere.comparison.arms import Arm, apply_setting
from hf_sphere.comparison.measures import MEASURES
from hf_sphere.comparison.runs import RunComparison
from hf_sphere.comparison.study import Study
from hf_sphere.comparison.tuning import describe_setting
from hf_sphere.utils.files import write_json, write_text

MARGIN_HEADS = ("arcface", "subcenter_arcface", "adaface", "cosface")


def rank(study: Study, arms: Sequence[Arm], results: Mapping[Any, Any]) -> list[tuple[Arm, Mapping[str, float]]]:
    """Return the arms with a value of all seeds, and their settings, best mean first."""
    means = {arm.name: _mean(study, arm, results, study.metric) for arm in arms}
    sign = -1 if MEASURES[study.metric].higher_is_better else 1
    finished = [arm for arm in arms if means[arm.name] is not None]
    finished.sort(key=lambda arm: sign * (means[arm.name] or 0.0))
    return [(arm, results["tuned", arm.name]["setting"]) for arm in finished]


def write(
    folder: Path,
    study: Study,
    arms: Sequence[Arm],
    results: Mapping[Any, Any],
    backbones: Mapping[str, Any],
    num_classes: int,
) -> tuple[RunComparison | None, list[tuple[Arm, Mapping[str, float]]]]:
    """Write `comparison.md` and `comparison.json`, print the verdict, and return the comparison and the ranked arms.

    `backbones` are scores of the features of each backbone.
    """
    comparison = study.compare(arms, results, arms[0].name)
    ranked = rank(study, arms, results)
    lines = [conclude(study, arms, ranked, comparison, results)]
    if comparison is not None:
        lines += ["", comparison.to_markdown(), "", explain(comparison)]
    lines += ["", margin] if (margin := judge_margins(study, arms, results)) is not None else []
    best_and_reference = [pair for pair in ranked if pair[0] in (ranked[0][0], arms[0])]
    lines += ["", describe_losses(study, best_and_reference, num_classes)] if ranked else []
    print("\n".join(["", *lines]))
    settings = []
    for arm in arms:
        tuned = results["tuned", arm.name] or {"setting": {}, "at_end": (), "count": ""}
        shown = describe_setting(tuned["setting"])
        ends = ", ".join(name.rpartition(".")[2] for name in tuned["at_end"])
        shown += f" (at the end of the grid: {ends})" if ends else ""
        settings.append([arm.name, shown or "all settings diverged", tuned["count"]])
    lines += ["", "## Settings", "", *_table(["arm", "selected", "tried"], settings)]
    means = {arm.name: [_mean(study, arm, results, name) for name in MEASURES] for arm in arms}
    used = [{*column} != {None} for column in zip(*means.values(), strict=True)]
    rows = [[name, *itertools.compress(values, used)] for name, values in means.items()]
    lines += ["", "## Other measures", "", "Means over seeds in percent, without a test.", ""]
    lines += _table(["arm", *itertools.compress(MEASURES, used)], rows)
    if backbones:
        lines += ["", "## Backbones", "", "Scores of the features themselves, means over seeds in percent.", ""]
        rows = [[name, *scores.values()] for name, scores in backbones.items()]
        lines += _table(["backbone", *next(iter(backbones.values()))], rows)
    lines += ["", "## How measured", "", describe(study, comparison)]
    write_text(folder / "comparison.md", "\n".join(["# Comparison", "", *lines, ""]))
    values = {}
    for arm in arms:
        runs = {s: (results.get(("run", arm.name, s)) or {}).get("values") for s in range(study.seeds)}
        values[arm.name] = {"tuned": results["tuned", arm.name], "runs": runs}
    frame = None if comparison is None else comparison.to_frame().reset_index(names="arm").astype(object)
    table = None if frame is None else frame.where(frame.notna(), None).to_dict("records")  # JSON has no NaN
    content = {"metric": study.metric, "comparison": table, "arms": values, "backbones": backbones}
    write_json(folder / "comparison.json", content)
    return comparison, ranked


def conclude(
    study: Study,
    arms: Sequence[Arm],
    ranked: Sequence[tuple[Arm, Any]],
    comparison: RunComparison | None,
    results: Mapping[Any, Any],
) -> str:
    """Say in a few sentences which arm to use."""
    diverged = [arm.name for arm in arms if arm.name not in {each.name for each, _ in ranked}]
    text = f"Diverged or without a value: {', '.join(diverged)}. " if diverged else ""
    if comparison is None:
        return text + "There are not two arms with all seeds, the reference among them, so nothing is tested."
    best, reference = ranked[0][0].name, comparison.reference
    mean = _mean(study, ranked[0][0], results, study.metric)
    text += f"{best} has the best mean {study.metric}, {mean:.2f} %. "
    better = [name for name, each in comparison.items() if each.verdict == "better"]
    if not better:
        return text + f"No arm is shown to be better than {reference}: keep it."
    text += f"Better than {reference}: {', '.join(better)}. "
    return text + "Differences among these are not tested." * (len(better) > 1)


def explain(comparison: RunComparison) -> str:
    """Say for how many comparisons the columns of the table are, and for which difference."""
    corrected = "Each interval is for one comparison; p-values and verdicts are corrected for all. "
    of = "" if comparison.minimum is None else f"The power is that for {comparison.minimum:g} points."
    return (corrected * (len(comparison) > 1) + of).strip()


def judge_margins(study: Study, arms: Sequence[Arm], results: Mapping[Any, Any]) -> str | None:
    """Say whether a margin helps, by tests of heads with one against `cosine` on the same backbone, a family."""
    texts = []
    for arm in arms:
        if arm.options.get("head") != "cosine":
            continue
        same_backbone = [other for other in arms if other.backbone == arm.backbone]
        margins = [other for other in same_backbone if other.options.get("head") in MARGIN_HEADS]
        if margins and (comparison := study.compare([arm, *margins], results, arm.name)) is not None:
            parts = [f"{name} {each.difference:+.2f} ({each.verdict})" for name, each in comparison.items()]
            texts.append(f"Against {arm.name}, the head without a margin, in points: {', '.join(parts)}.")
    return " ".join(texts) or None


def describe_losses(study: Study, arms: Sequence[tuple[Arm, Mapping[str, float]]], num_classes: int) -> str:
    """Return the losses of arms with their settings, as code for one's own loop, and what they are applied to."""
    lines = [f"- {arm.name}: {_describe_loss(arm, setting, num_classes)}" for arm, setting in arms]
    text = f"In your own loop (see the page Losses), {study.epochs} epochs{study.runs.training}:"
    return "\n".join([text, "", *lines])


def _describe_loss(arm: Arm, setting: Mapping[str, float], num_classes: int) -> str:
    options = apply_setting(arm.options, setting)
    given = [f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value!r}"
             for name, value in options["head_kwargs"].items()]  # fmt: skip
    words = [str(options.get("embedding_dim") or "d"), str(num_classes), f'head="{options["head"]}"', *given]
    rates = ", ".join(f"{name} {options[name]:.3g}" for name in ("learning_rate", "weight_decay") if name in options)
    return f"`loss = HeadLoss({', '.join(words)})`, {rates}"


def describe(study: Study, comparison: RunComparison | None) -> str:
    """Describe the parts of the data, the tuning and the test."""
    division, percent = study.division, f"{100 * study.division.test_fraction:g} %"
    how = f"with the groups of {division.group} undivided" if division.group else "stratified by class"
    if division.test is None:
        images, tested = "images", f"Each seed divides the others again, {percent} of them to test on."
    else:
        images, tested = "training images", f"All runs are tested on the split {division.test}."
    drawn = f"{percent} of the {images}, {how}, are for tuning only. {tested}"
    if division.left_out:
        drawn += f" For each seed, {100 * division.left_out:g} % of the classes are left out of training."
    variations = sorted({each.variation for each in comparison.values() if each.variation} if comparison else set())
    wider = f"The intervals account for {' or '.join(variations)}, the widest that is possible. " if variations else ""
    return (
        f"{drawn} Each arm was tuned by {study.tuned_by} on the images for tuning: {study.count} settings by "
        "successive halving, and then at most as many by steps to better neighbors. The planned runs took "
        f"{study.epochs} epochs and {study.seeds} seeds. {wider}That settings were selected by noisy scores is in no "
        "interval."
    )


def _table(title: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table in Markdown; numbers that are None are left empty."""
    sides = ("---|" if isinstance(cell, str) else "---:|" for cell in rows[0])
    lines = [f"| {' | '.join(title)} |", f"|{''.join(sides)}"]
    for row in rows:
        cells = ("" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return lines


def _mean(study: Study, arm: Arm, results: Mapping[Any, Any], name: str) -> float | None:
    """Return the mean of a measure over the seeds; None if a run diverged or lacks it."""
    runs = [results.get(("run", arm.name, seed)) for seed in range(study.seeds)]
    values = [None if run is None else run["values"].get(name) for run in runs]
    return None if None in values else statistics.fmean(values)  # type: ignore[arg-type]
