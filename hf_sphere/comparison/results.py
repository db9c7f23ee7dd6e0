"""The results of a comparison as text, figure and JSON."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hf_sphere.comparison.arms import Arm, apply_setting, describe_setting
from hf_sphere.comparison.measures import MEASURES
from hf_sphere.comparison.runs import RunComparison, compare_runs
from hf_sphere.comparison.study import Study
from hf_sphere.utils.files import write_json, write_text
from hf_sphere.utils.pages import markdown_rows

MARGIN_HEADS = ("arcface", "subcenter_arcface", "adaface", "cosface")


class Results:
    """What the arms of a finished study have achieved; the first arm is the reference.

    `comparison` is None if the reference or all others lack seeds. `ranked` are the arms with a value of all seeds, and
    their settings, best mean first.
    """

    def __init__(self, study: Study) -> None:
        self.study, self.trials, self.lines = study, study.read_trials(), list[str]()
        self.runs = {
            arm.name: {seed: self.trials.get(("run", arm.name, seed)) for seed in range(study.plan.seeds)}
            for arm in study.arms
        }
        self.comparison = self.compare(study.arms)
        means: Any = {arm.name: self.mean(arm, study.plan.metric) for arm in study.arms}
        ranked: list[Any] = [arm for arm in study.arms if means[arm.name] is not None]
        ranked.sort(key=lambda arm: means[arm.name], reverse=MEASURES[study.plan.metric].higher_is_better)
        self.ranked = [(arm, self.trials["tuned", arm.name]["setting"]) for arm in ranked]

    def mean(self, arm: Arm, name: str) -> float | None:
        """Return the mean of a measure over the seeds; None if a run diverged or lacks it."""
        values: Any = [run and run["values"].get(name) for run in self.runs[arm.name].values()]
        return None if None in values else statistics.fmean(values)

    def compare(self, arms: Sequence[Arm]) -> RunComparison | None:
        """Compare arms with the first one; runs with the same seed are paired if images are drawn for each seed."""
        plan, division, values = self.study.plan, self.study.division, dict[str, Any]()
        for arm in arms:
            found = {seed: run for seed, run in self.runs[arm.name].items() if run is not None}
            if found:
                outcomes = {s: dict(zip(run["ids"], run["outcomes"], strict=True)) for s, run in found.items()}
                values[arm.name] = outcomes
        if len(values.get(arms[0].name, ())) < plan.seeds or len(values) < 2:
            return None
        return compare_runs(
            values,
            reference=arms[0].name,
            higher_is_better=MEASURES[plan.metric].higher_is_better,
            perfect=100.0 if MEASURES[plan.metric].higher_is_better else 0.0,
            seeds=plan.seeds,
            test="paired" if division.is_redrawn else "welch",
            test_fraction=division.test_fraction if division.test is None else None,
        )

    def write(self, num_classes: int, backbones: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the verdict, and write `comparison.md` and `comparison.json`; `backbones` are scores of features."""
        study, comparison, table = self.study, self.comparison, None
        lines = [self.conclude()]
        if comparison is not None:
            chance = f"Power is the probability of finding a difference of {comparison.minimum or 0:.3g} points"
            explained = f"Deviations are those of seeds. {chance}, if there is one."
            notes = ["Each interval is for one comparison; p-values and verdicts are corrected for all."]
            notes = notes * (len(comparison) > 1) + [explained]
            lines += ["", comparison.to_markdown(), "", " ".join(notes)]
            frame = comparison.to_pandas().reset_index(names="arm").astype(object)
            table = frame.where(frame.notna(), None).to_dict("records")  # JSON has no NaN
        lines += ["", margin] if (margin := self.judge_margins()) else []
        lines += ["", *self.describe_losses(num_classes)] if self.ranked else []
        print("\n".join(["", *lines]))
        tuned = {arm.name: self.trials["tuned", arm.name] for arm in study.arms}
        measures = {arm.name: {name: self.mean(arm, name) for name in MEASURES} for arm in study.arms}
        lines += _section("Settings", "compared", {name: _describe_tuned(best) for name, best in tuned.items()})
        lines += _section("Other measures (means over seeds in percent, without a test)", "compared", measures)
        lines += _section("Backbones (scores of the features, means over seeds in percent)", "backbone", backbones)
        self.lines = [*lines, "", "## How measured", "", self.describe()]
        write_text(study.folder / "comparison.md", "\n".join(["# Comparison", "", *self.lines, ""]))
        values = {name: {seed: run and run["values"] for seed, run in runs.items()} for name, runs in self.runs.items()}
        arms = {name: {"tuned": tuned[name], "runs": runs} for name, runs in values.items()}
        content = {"metric": study.plan.metric, "comparison": table, "arms": arms, "backbones": backbones}
        write_json(study.folder / "comparison.json", content)

    def conclude(self) -> str:
        """Say in a few sentences which arm to use."""
        metric, ranked = self.study.plan.metric, [arm for arm, _ in self.ranked]
        diverged = [arm.name for arm in self.study.arms if arm not in ranked]
        text = f"Diverged or without a value: {', '.join(diverged)}. " if diverged else ""
        if self.comparison is None:
            return text + "There are not two with all seeds, the reference among them, so nothing is tested."
        reference = self.comparison.reference
        text += f"{ranked[0].name} has the best mean {metric}, {self.mean(ranked[0], metric):.2f} %. "
        if better := [name for name, each in self.comparison.items() if each.verdict == "better"]:
            return f"{text}Better than {reference}: {', '.join(better)}. Differences among several are not tested."
        return text + f"None is shown to be better than {reference}: keep it."

    def judge_margins(self) -> str:
        """Say whether a margin helps, by tests of heads with one against `cosine` on the same backbone, a family."""
        texts = []
        for arm in self.study.arms:
            same = [other for other in self.study.arms if other.backbone == arm.backbone]
            margins = [other for other in same if other.options.get("head") in MARGIN_HEADS]
            if arm.options.get("head") == "cosine" and margins and (found := self.compare([arm, *margins])) is not None:
                parts = [f"{name} {each.difference:+.2f} ({each.verdict})" for name, each in found.items()]
                texts.append(f"Against {arm.name}, the head without a margin, in points: {', '.join(parts)}.")
        return " ".join(texts)

    def describe_losses(self, num_classes: int) -> list[str]:
        """Return the losses of the best arm and of the reference, as code, and what they are applied to."""
        study = self.study
        lines = [f"In your own loop (see the page Losses), {study.epochs} epochs{study.runs.training}:", ""]
        for arm, setting in self.ranked:
            if arm in (self.ranked[0][0], study.arms[0]):
                options = apply_setting(arm.options, setting)
                words = [str(options.get("embedding_dim") or "d"), str(num_classes), f'head="{options["head"]}"']
                for name, value in options["head_kwargs"].items():
                    words.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value!r}")
                rates = [f"{name} {options[name]:.3g}" for name in ("learning_rate", "weight_decay") if name in options]
                lines.append(f"- {arm.name}: `loss = HeadLoss({', '.join(words)})`, {', '.join(rates)}")
        return lines

    def describe(self) -> str:
        """Describe the parts of the data, the tuning and the test."""
        study, division = self.study, self.study.division
        percent = f"{100 * division.test_fraction:g} %"
        how = f"with the groups of {division.group} undivided" if division.group else "stratified by class"
        images, tested = "images", f"Each seed divides the others again, {percent} of them to test on."
        if division.test is not None:
            images, tested = "training images", f"All runs are tested on the split {division.test}."
        drawn = f"{percent} of the {images}, {how}, are for tuning only. {tested}"
        if division.left_out:
            drawn += f" For each seed, {100 * division.left_out:g} % of the classes are left out of training."
        found = self.comparison.values() if self.comparison else ()
        kinds = " or ".join(sorted({each.variation for each in found if each.variation}))
        wider = f"The intervals account for {kinds}, the widest that is possible. " if kinds else ""
        return (
            f"{drawn} Each was tuned by {study.tuned_by} on the images for tuning: {study.plan.num_settings} "
            "settings by successive halving, and then at most as many by steps to better neighbors. The planned runs "
            f"took {study.epochs} epochs and {study.plan.seeds} seeds. {wider}That settings were selected by noisy "
            "scores is in no interval."
        )


def _describe_tuned(best: Mapping[str, Any] | None) -> dict[str, Any]:
    if best is None:
        return {"selected": "all settings diverged", "tried": None}
    ends = ", ".join(name.rpartition(".")[2] for name in best["at_end"])
    shown = describe_setting(best["setting"]) + (f" (at the end of the grid: {ends})" if ends else "")
    return {"selected": shown, "tried": best["count"]}


def _section(title: str, of: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, with its title, and without the columns in which all is None."""
    if not rows:
        return []
    columns = [name for name in next(iter(rows.values())) if any(row[name] is not None for row in rows.values())]
    table = [[of, *columns]]
    for name, row in rows.items():
        values = ("" if row[column] is None else row[column] for column in columns)
        table.append([name, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)])
    return ["", f"## {title}", "", *markdown_rows(table)]
