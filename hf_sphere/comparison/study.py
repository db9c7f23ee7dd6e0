"""The tuning and the runs of a comparison, which resume where they were interrupted, and its results."""

import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame, isna

from hf_sphere.comparison import arms
from hf_sphere.comparison.arms import Arm, Division, Setting, apply_setting, describe_setting
from hf_sphere.comparison.measures import MEASURES, mean_or_none, measure
from hf_sphere.comparison.plan import UNSEEN, Plan
from hf_sphere.comparison.runs import RunComparison, compare_runs
from hf_sphere.comparison.training_runs import FrozenRuns, TrainingRuns
from hf_sphere.utils.arguments import import_modules, imported
from hf_sphere.utils.files import JsonLines, write_json, write_text
from hf_sphere.utils.pages import markdown_rows

MARGIN_HEADS = ("arcface", "subcenter_arcface", "adaface", "cosface")


@dataclass(frozen=True)
class Study:
    """Arms that are tuned and run on the same parts of the data."""

    runs: FrozenRuns | TrainingRuns
    arms: Sequence[Arm]
    division: Division
    plan: Plan
    epochs: int  # of a full training
    folder: Path  # of the results

    @property
    def tuned_by(self) -> str:
        """The measure of tuning: chance is well calibrated, so not the calibration error."""
        return "accuracy" if self.plan.metric == "calibration_error" else self.plan.metric

    def read_trials(self, *, read: bool = True) -> JsonLines:
        """Return the finished trials by key; unless they are `read`, only to add some."""
        return JsonLines(self.folder / "trials.jsonl", read=read)

    def tune(self, arm: Arm) -> dict[str, Any] | None:
        """Tune an arm; None if it always diverges."""
        finished = self.read_trials()
        evaluate = partial(self.evaluate, finished, arm)
        finished["tuned", arm.name] = arms.tune(arm.grid, evaluate, count=self.plan.num_settings, epochs=self.epochs)
        return finished["tuned", arm.name]

    def evaluate(self, finished: JsonLines, arm: Arm, setting: Setting, epochs: int) -> float | None:
        """Return the score of a trial in tuning, which is run unless it is finished; None if it diverges."""
        key = ("tuning", arm.name, tuple(setting.items()), epochs)
        if key not in finished:
            evaluated = self.runs.run(arm, setting, self.division.tuning(), seed=arms.TUNING_SEED, epochs=epochs)
            values = evaluated and measure(self.tuned_by, evaluated).values()
            finished[key] = values and statistics.fmean(values)
        return finished[key]

    def time_trial(self, arm: Arm) -> float:
        """Run the first trial in tuning of an arm, and return its minutes per epoch."""
        start, epochs = time.monotonic(), math.ceil(self.epochs / 9)
        setting = arms.setting_at(arm.grid, arms.draw_places(arm.grid, self.plan.num_settings)[0])
        self.evaluate(self.read_trials(), arm, setting, epochs)
        return (time.monotonic() - start) / 60 / epochs

    def print_time(self, pool: Any, workers: int) -> None:
        """Print how long all takes if each epoch of an arm takes as long as those of its first trial, which is run."""
        minutes = [*pool.map(self.time_trial, self.arms)]
        tuning = [arms.tuning_epochs(arm.grid, self.plan.num_settings, self.epochs) for arm in self.arms]
        runs, at_once = self.plan.seeds * self.epochs / workers, min(workers, len(self.arms))
        low, high = (
            sum(each * (epochs / at_once + runs) for each, epochs in zip(minutes, column, strict=True))
            for column in zip(*tuning, strict=True)
        )
        print(f"time      about {low:.1f} to {high:.1f} min, judged by the first trial of each")

    def run(self, arm: Arm, setting: Setting, seed: int) -> Any:
        """Run an arm with a seed, and return and save its measures and the outcome of the planned one per image."""
        evaluated = self.runs.run(arm, setting, self.division.of_seed(seed), seed=seed, epochs=self.epochs)
        result: Any = None
        if evaluated is not None:
            outcomes = measure(self.plan.metric, evaluated, per_image=True)
            names = [name for name in MEASURES if evaluated.unseen is not None or not name.startswith(UNSEEN)]
            values = {name: mean_or_none(name, evaluated) for name in names}
            result = {"values": values, "ids": [*outcomes], "outcomes": [*outcomes.values()]}
        self.read_trials(read=False)["run", arm.name, seed] = result
        return result

    def complete(self, workers: int) -> None:
        """Tune and run what is not finished, by processes."""
        finished, runs, metric = self.read_trials(), self.plan.seeds * len(self.arms), self.plan.metric
        open_arms = [arm for arm in self.arms if ("tuned", arm.name) not in finished]
        if finished:
            done, tuned = sum(key[0] == "run" for key in finished), len(self.arms) - len(open_arms)
            print(f"resumed   {tuned} of {len(self.arms)} are tuned, and {done} of {runs} runs are finished")
        with _pool(workers) as pool:
            if not finished:
                self.print_time(pool, workers)
            for arm, tuned, left in _finished({pool.submit(self.tune, arm): arm for arm in open_arms}):
                result = "all settings diverged"
                if tuned is not None:
                    score = f"{self.tuned_by} {tuned['score']:.2f} % in tuning ({tuned['count']} settings)"
                    result = f"{describe_setting(tuned['setting'])}; {score}"
                print(f"tuned     {arm.name}: {result}{left}")
            finished = self.read_trials()
            pending: dict[Any, Any] = {}
            for seed, arm in itertools.product(range(self.plan.seeds), self.arms):
                best: Any = finished["tuned", arm.name]
                if best is not None and ("run", arm.name, seed) not in finished:
                    pending[pool.submit(self.run, arm, best["setting"], seed)] = arm, seed
            for (arm, seed), result, left in _finished(pending):
                value = "diverged" if result is None else f"{metric} {result['values'][metric]:.2f} %"
                print(f"ran       {arm.name}, seed {seed}: {value}{left}")


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that end in the middle of their tasks when this one is interrupted, or is killed."""
    spawn = multiprocessing.get_context("spawn")  # forked processes would share the threads of torch
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, spawn, _start_worker, (threads, [*imported])) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _start_worker(threads: int, modules: Sequence[str]) -> None:
    """Import the modules of one's own parts, divide the cores, and end with the parent."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too
    import_modules([f"--import={name}" for name in modules])
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def _finished(tasks: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield what each task is for when it is finished, its result, and what is left."""
    start = time.monotonic()
    for done, future in enumerate(as_completed(tasks), start=1):
        minutes = (time.monotonic() - start) / 60 / done * (len(tasks) - done)
        left = f", about {minutes:.1f} min left" if done < len(tasks) else ""
        yield tasks[future], future.result(), f"   [{done} of {len(tasks)}{left}]"


class Results:
    """What the arms of a finished study have achieved; the first arm is the reference.

    `comparison` is None if the reference or all others lack seeds. `ranked` are the arms with a value of all seeds, and
    their settings, best mean first.
    """

    def __init__(self, study: Study) -> None:
        trials, seeds, self.study, self.lines = study.read_trials(), range(study.plan.seeds), study, list[str]()
        self.tuned: dict[str, Any] = {arm.name: trials["tuned", arm.name] for arm in study.arms}
        self.runs = {name: {seed: trials.get(("run", name, seed)) for seed in seeds} for name in self.tuned}
        self.measure = MEASURES[study.plan.metric]
        self.comparison = self.compare(study.arms)
        means: Any = {arm.name: self.mean(arm, study.plan.metric) for arm in study.arms}
        ranked = [(arm, self.tuned[arm.name]["setting"]) for arm in study.arms if means[arm.name] is not None]
        self.ranked = sorted(ranked, key=lambda pair: means[pair[0].name], reverse=self.measure.higher_is_better)

    def mean(self, arm: Arm, name: str) -> float | None:
        """Return the mean of a measure over the seeds; None if a run diverged or lacks it."""
        values: Any = [run and run["values"].get(name) for run in self.runs[arm.name].values()]
        return None if None in values else statistics.fmean(values)

    def compare(self, arms: Sequence[Arm]) -> RunComparison | None:
        """Compare arms with the first one; runs with the same seed are paired if images are drawn for each seed."""
        plan, division, values = self.study.plan, self.study.division, defaultdict[str, dict[int, Any]](dict)
        for arm, seed in itertools.product(arms, range(plan.seeds)):
            if (run := self.runs[arm.name][seed]) is not None:
                values[arm.name][seed] = dict(zip(run["ids"], run["outcomes"], strict=True))
        if len(values.get(arms[0].name, ())) < plan.seeds or len(values) < 2:
            return None
        return compare_runs(
            values,
            reference=arms[0].name,
            higher_is_better=self.measure.higher_is_better,
            perfect=100.0 if self.measure.higher_is_better else 0.0,
            seeds=plan.seeds,
            test="paired" if division.is_redrawn else "welch",
            test_fraction=division.test_fraction if division.test is None else None,
        )

    def write(self, num_classes: int, backbones: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the verdict, and write `comparison.md` and `comparison.json`; `backbones` are scores of features."""
        study, comparison, records = self.study, self.comparison, None
        lines = [self.conclude()]
        if comparison is not None:
            table = comparison.to_markdown()
            kind = "Welch's t-test (unequal variances)" if "(Welch" in table else "a t-test of paired differences"
            note = f"p-values are by {kind}, corrected for all comparisons (Holm), as verdicts; intervals are for one."
            chance = f"Power is the probability of finding a difference of {comparison.minimum or 0:.3g} points"
            lines += ["", table, "", f"{note} Deviations are those of seeds. {chance}, if there is one."]
            frame = comparison.to_pandas().reset_index(names="name").astype(object)
            records = frame.where(frame.notna(), None).to_dict("records")  # JSON has no NaN
        lines += ["", margin] if (margin := self.judge_margins()) else []
        lines += ["", *self.describe_losses(num_classes)] if self.ranked else []
        print("\n".join(["", *lines]))
        measures = {arm.name: {name: self.mean(arm, name) for name in MEASURES} for arm in study.arms}
        lines += _section("Settings", "compared", {name: _describe_tuned(best) for name, best in self.tuned.items()})
        lines += _section("Other measures (means over seeds in percent, without a test)", "compared", measures)
        lines += _section("Backbones (scores of the features, means over seeds in percent)", "backbone", backbones)
        self.lines = [*lines, "", "## How measured", "", self.describe()]
        write_text(study.folder / "comparison.md", "\n".join(["# Comparison", "", *self.lines, ""]))
        values = {name: {seed: run and run["values"] for seed, run in runs.items()} for name, runs in self.runs.items()}
        compared = {name: {"tuned": self.tuned[name], "runs": runs} for name, runs in values.items()}
        content = {"metric": study.plan.metric, "comparison": records, "compared": compared, "backbones": backbones}
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
        for arm, setting in [pair for pair in self.ranked if pair[0] in (self.ranked[0][0], study.arms[0])]:
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
    frame = DataFrame.from_dict(rows, orient="index", dtype=object).dropna(axis=1, how="all")
    frame = frame.map(lambda value: "" if isna(value) else f"{value:.2f}" if isinstance(value, float) else str(value))
    table = [[of, *frame], *([name, *cells] for name, cells in zip(frame.index, frame.values.tolist(), strict=True))]
    return ["", f"## {title}", "", *markdown_rows(table)] if rows else []
