"""Measure embeddings: accuracy, calibration, retrieval, overlap of classes, and how well strange images stand out.

python recipes/evaluate_embeddings.py --embeddings outputs/embeddings/mnist-test \
    --out_of_distribution outputs/embeddings/digits-test --ks 1 2 4 8

The embeddings are those of `recipes/extract_embeddings.py`, or any data set with the columns `embedding` and `label`.
What can be measured depends on the columns; what is left out is said. Results are in `all_results.json`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hf_sphere.embeddings.store import Embeddings, read_embeddings
from hf_sphere.metrics import (
    ReliabilityBins,
    area_under_risk_coverage,
    calibration_errors,
    class_overlap,
    detection_scores,
    reliability_bins,
    retrieval_scores,
    risk_coverage,
    sampled_retrieval_scores,
)
from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.output_dir import RESULTS_FILE, RUN_FILE
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import write_json
from hf_sphere.visualization import plot_reliability, plot_risk_coverage

PICTURES = ("reliability.png", "risk_coverage.png")


@dataclass
class EvaluationArguments:
    """What to measure."""

    embeddings: str = field(metadata={"help": "Embeddings: a folder that recipes/extract_embeddings.py wrote."})
    out_of_distribution: list[str] = field(
        default_factory=list, metadata={"help": "Embeddings of strange images by the same model, one or several."}
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder to write; <embeddings>/evaluation if not set."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the results in output_dir."})
    split: str | None = field(default=None, metadata={"help": "Split to read of data sets that have several."})
    ks: list[int] = field(default_factory=lambda: [1], metadata={"help": "Neighbours of the recalls."})
    distance: Literal["cosine", "euclidean", "hyperbolic"] | None = field(
        default=None, metadata={"help": "Distance of retrieval; the model's own, else cosine, if not set."}
    )
    curvature: float | None = field(
        default=None, metadata={"help": "Curvature of the hyperbolic distance; the model's own if not set."}
    )
    num_samples: int = field(
        default=10, metadata={"help": "Samples of each uncertain embedding for sampled retrieval; 0 leaves it out."}
    )
    num_bins: int = field(default=15, metadata={"help": "Bins of the picture; the calibration errors always have 15."})
    overlap_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Count images whose embedding is nearer than this to one of another class, and the wrong answers "
            "among them: degrees, or for --overlap_distance euclidean a distance. Left out if not set."
        },
    )
    overlap_distance: Literal["angular", "euclidean"] | None = field(
        default=None, metadata={"help": "Distance of --overlap_threshold; angular if not set."}
    )
    max_samples: int | None = field(default=None, metadata={"help": "Use only so many embeddings of each data set."})
    seed: int = field(default=0, metadata={"help": "Seed of samples and of the choice of --max_samples."})

    def __post_init__(self) -> None:
        if min(self.ks, default=0) < 1:
            raise ValueError(f"--ks must be integers of at least 1, for instance 1 5; got {self.ks}.")
        self.ks = list(dict.fromkeys(self.ks))
        for name, least in (("num_bins", 1), ("num_samples", 0), ("max_samples", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}.")
        if self.curvature is not None and not (self.curvature > 0 and math.isfinite(self.curvature)):
            raise ValueError(
                f"--curvature must be finite and positive, c for the curvature -c; got {self.curvature:g}."
            )
        if self.curvature is not None and self.distance not in (None, "hyperbolic"):
            raise ValueError(
                f"--curvature is for --distance hyperbolic; this one is {self.distance}. Leave one of them out."
            )
        if self.overlap_threshold is not None:
            self.overlap_distance = self.overlap_distance or "angular"
            most, allowed = math.inf, "positive and finite"
            if self.overlap_distance == "angular":
                most, allowed = 180.0, "above 0 and up to 180 degrees"
            if not (0 < self.overlap_threshold <= most and math.isfinite(self.overlap_threshold)):
                raise ValueError(f"--overlap_threshold must be {allowed}; got {self.overlap_threshold:g}.")
        elif self.overlap_distance is not None:
            raise ValueError(f"--overlap_distance {self.overlap_distance} needs a threshold; give --overlap_threshold.")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do as it says."""
    (args,) = parse_arguments((EvaluationArguments,), argv, "Measure embeddings.")
    try:
        evaluate(args)
    except KeyboardInterrupt:
        print("\nStopped; no results were written.", file=sys.stderr)
        sys.exit(130)


def evaluate(args: EvaluationArguments) -> None:
    """Measure, write the results and draw."""
    output = choose_output(args)
    reading = {"split": args.split, "max_samples": args.max_samples, "seed": args.seed}
    needed = ["label"] if args.overlap_threshold is None else ["label", "prediction"]
    data = read_embeddings(args.embeddings, needed=needed, **reading)
    evaluation = Evaluation(data, args)
    strange = read_strange(args, data, reading)
    print(summarize(data))
    evaluation.measure_predictions()
    evaluation.measure_retrieval()
    evaluation.measure_sampled_retrieval()
    evaluation.measure_overlap()
    evaluation.measure_detection(strange)
    output.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        (output / picture).unlink(missing_ok=True)  # of results that are replaced, and perhaps not drawn again
    write_json(output / RUN_FILE, asdict(args))
    write_json(output / RESULTS_FILE, evaluation.results)
    for note in evaluation.notes:
        print(f"Note: {note}")
    print(f"saved {output / RESULTS_FILE}")
    try:
        for path in evaluation.draw(output):
            print(f"drew  {path}")
    except ImportError as error:
        print(f"no pictures: {error}")


def choose_output(args: EvaluationArguments) -> Path:
    """Find the folder to write to, and refuse one with other results."""
    if args.output_dir is None and not Path(args.embeddings).is_dir():
        raise ValueError(
            f"{args.embeddings} is no folder. If it is a data set of the Hub, name a folder for the results with "
            "--output_dir."
        )
    output = Path(args.output_dir or Path(args.embeddings) / "evaluation")
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file and no folder; choose another --output_dir.")
    if (output / RESULTS_FILE).exists() and not args.overwrite_output_dir:
        raise FileExistsError(
            f"{output} holds other results. Choose another --output_dir, or replace them with --overwrite_output_dir."
        )
    return output


def read_strange(args: EvaluationArguments, data: Embeddings, reading: dict[str, Any]) -> dict[str, Embeddings]:
    """Read the out-of-distribution sets, by the names of their folders."""
    names = [Path(path).resolve().name for path in args.out_of_distribution]
    if len(set(names)) < len(names):
        raise ValueError(f"results are named by the folder, and two are called the same: {', '.join(names)}.")
    certain = certainties(data)
    if names and not certain:
        raise ValueError(
            f"--out_of_distribution needs a column confidence or concentration, and {data.name} has neither: extract "
            "embeddings with a model that has a head."
        )
    needed = list(certain)
    return {
        name: read_embeddings(path, needed=needed, only_split=True, **reading)
        for name, path in zip(names, args.out_of_distribution, strict=True)
    }


def certainties(data: Embeddings) -> dict[str, Tensor]:
    """The measures of certainty that a data set has, by column."""
    both = {"confidence": data.confidences, "concentration": data.concentrations}
    return {name: values for name, values in both.items() if values is not None}


def summarize(data: Embeddings) -> str:
    """Say in a line what is measured."""
    assert data.labels is not None  # a needed column
    classes, (count, coordinates) = len(data.labels.unique()), data.embeddings.shape
    return (
        f"{data.name}: {counted(count, 'embedding')} of {counted(classes, 'class', 'classes')}, "
        f"{counted(coordinates, 'coordinate')}"
    )


class Evaluation:
    """Measures embeddings, step by step.

    Attributes:
        results: Everything that was measured, by name.
        notes: What could not be, and why.
    """

    def __init__(self, data: Embeddings, args: EvaluationArguments) -> None:
        assert data.labels is not None  # a needed column
        self.data, self.args, self.labels = data, args, data.labels
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []
        self.known: Tensor | None = None
        self.correct: Tensor | None = None
        self.certain: dict[str, Tensor] = {}
        self.bins: ReliabilityBins | None = None
        self.options = self.retrieval_options()

    def report(self, name: str, value: float, what: str, detail: str) -> None:
        """Keep a share and print it in percent."""
        self.results[name] = value
        print(f"{what:<34}{100 * value:>8.2f} %  {detail}")

    def measure_predictions(self) -> None:
        """Measure accuracy, calibration and risk, on the labels that are classes of the model."""
        if self.data.predictions is None:
            self.notes.append("without a column prediction there is no accuracy, no calibration and no risk.")
            return
        known, correct = self.data.judge_predictions()
        unknown = int((~known).sum())
        self.results["eval_num_unknown_labels"] = unknown
        if not known.any():
            self.notes.append(
                "no label is one of the model's classes (an open set), so there is no accuracy, no calibration and no "
                "risk."
            )
            return
        if unknown:
            self.notes.append(
                f"{unknown:,} of {len(known):,} labels are none of the model's classes; accuracy, calibration and risk "
                "are of the others."
            )
        self.known, self.correct = known, correct[known]
        self.certain = {name: values[known] for name, values in certainties(self.data).items()}
        self.report(
            "eval_accuracy", self.correct.double().mean().item(), "accuracy", counted(len(self.correct), "image")
        )
        for name, error in calibration_errors(self.certain["confidence"], self.correct).items():
            squared = name.endswith("l2")
            what = f"calibration error, equal {'mass' if squared else 'width'}"
            self.report(f"eval_{name}", error, what, f"{'root mean square' if squared else 'mean'} of 15 bins")
        self.bins = reliability_bins(self.certain["confidence"], self.correct, num_bins=self.args.num_bins)
        for name, values in self.certain.items():
            suffix = "" if name == "confidence" else f"_{name}"
            area = area_under_risk_coverage(values, self.correct)
            self.report(f"eval_area_under_risk_coverage{suffix}", area, "area under risk-coverage", f"by {name}")

    def measure_retrieval(self) -> None:
        """Measure how well images find others of their class."""
        if self.labels.unique(return_counts=True)[1].max() < 2:
            self.notes.append("no class has two images, so there is no retrieval.")
            return
        scores = retrieval_scores(self.data.embeddings, self.labels, **self.options)
        counts = {name: int(scores.pop(name)) for name in ("num_queries", "num_excluded")}
        self.results |= {f"eval_{name}": count for name, count in counts.items()}
        detail = f"{counted(counts['num_queries'], 'query', 'queries')}, {self.options['distance']} distance"
        for name, value in scores.items():
            self.report(f"eval_{name}", value, readable(name), detail)
        if alone := counts["num_excluded"]:
            self.notes.append(f"{counted(alone, 'image')} alone in a class, left out of the queries of retrieval.")

    def measure_sampled_retrieval(self) -> None:
        """Measure retrieval on samples of uncertain embeddings."""
        if self.data.concentrations is None or self.args.num_samples == 0 or self.options["distance"] == "hyperbolic":
            return
        if "eval_num_queries" not in self.results:
            return
        zero = int((~self.data.embeddings.any(-1)).sum())
        if zero:
            vectors = counted(zero, "embedding is the zero vector", "embeddings are zero vectors")
            self.notes.append(f"{vectors}, without a direction to sample around, so there is no sampled retrieval.")
            return
        scores = sampled_retrieval_scores(
            self.data.embeddings,
            self.data.concentrations,
            self.labels,
            num_samples=self.args.num_samples,
            seed=self.args.seed,
            **self.options,
        )
        for name in (*(f"recall_at_{k}" for k in self.args.ks), "r_precision", "map_at_r"):
            low, high = scores[name]["low"], scores[name]["high"]
            self.results |= {f"eval_sampled_{name}_low": low, f"eval_sampled_{name}_high": high}
            detail = f"95 % of {self.args.num_samples} samples within {100 * low:.2f} to {100 * high:.2f} %"
            self.report(f"eval_sampled_{name}", scores[name]["mean"], f"sampled {readable(name)}", detail)

    def measure_overlap(self) -> None:
        """Measure how many images lie at one of another class, of those whose labels are classes of the model."""
        threshold, distance = self.args.overlap_threshold, self.args.overlap_distance
        if threshold is None or distance is None:
            return
        if self.correct is None:
            self.notes.append("without a label that is a class of the model, there is no overlap.")
            return
        points = self.data.embeddings[self.known]
        zero = int((~points.any(-1)).sum())
        if zero and distance == "angular":
            vectors = counted(zero, "embedding is the zero vector", "embeddings are zero vectors")
            self.notes.append(
                f"{vectors}, without an angle to others, so there is no overlap; there would be with "
                "--overlap_distance euclidean."
            )
            return
        labels = self.labels[self.known]
        counts = class_overlap(points, labels, self.correct, threshold=threshold, distance=distance)
        self.results |= {f"eval_overlap_{name}": count for name, count in counts.items()}
        unit = " degrees" if distance == "angular" else ""
        detail = (
            f"{counts['num_errors']:,} of {counted(int(counts['num_overlaps']), 'image')} nearer than "
            f"{threshold:g}{unit} to another class"
        )
        self.report("eval_overlap_ratio", counts["ratio"], "wrong where classes overlap", detail)

    def retrieval_options(self) -> dict[str, Any]:
        """Distance and recalls, from the arguments or from what the embeddings say of themselves."""
        about = self.data.about
        distance = self.args.distance or about.get("distance", "cosine")
        options = {"distance": distance, "ks": tuple(self.args.ks)}
        if distance != "hyperbolic":
            if self.args.curvature is not None:
                raise ValueError(
                    f"--curvature is for the distance hyperbolic; that of {self.data.name} is {distance}. Leave it "
                    "out, or give --distance hyperbolic."
                )
            return options
        curvature = self.args.curvature if self.args.curvature is not None else about.get("curvature")
        if curvature is None:
            raise ValueError(
                f"--distance hyperbolic needs a curvature, and {self.data.name} does not tell the curvature of its "
                "space; give --curvature."
            )
        return {**options, "curvature": curvature}

    def measure_detection(self, strange: Mapping[str, Embeddings]) -> None:
        """Measure how well each measure of certainty tells strange images from those of the data."""
        for where, others in strange.items():
            outside = certainties(others)
            if self.args.split not in (None, others.split):
                self.notes.append(
                    f"{others.name} has no split {self.args.split!r}; its only one, {others.split!r}, was read instead."
                )
            models = {whereabouts(about["model"]) for about in (self.data.about, others.about) if "model" in about}
            if len(models) == 2:
                self.notes.append(f"{others.name} was embedded by another model, so its certainties do not compare.")
            for name, inside in certainties(self.data).items():
                scores = detection_scores(inside, outside[name])
                self.report(f"ood_{where}_auroc_{name}", scores["auroc"], f"AUROC by {name}", f"against {where}")
                detail = f"of {where} pass where 95 % of the own images do"
                self.report(f"ood_{where}_fpr_at_95_{name}", scores["fpr_at_95"], f"FPR at 95 % by {name}", detail)

    def draw(self, folder: Path) -> list[Path]:
        """Draw what can be drawn, and return the pictures' paths."""
        if self.correct is None or self.bins is None:
            return []
        title = Path(self.data.name).resolve().name
        squared, plain = (
            100 * self.results[f"eval_calibration_error_{kind}"] for kind in ("equal_mass_l2", "equal_width_l1")
        )
        caption = f"calibration error {squared:.2f} % (equal mass, root mean square), {plain:.2f} % (equal width, mean)"
        paths = [folder / name for name in PICTURES]
        plot_reliability(self.bins, title=title, caption=caption, path=paths[0])
        curves = {name: risk_coverage(values, self.correct) for name, values in self.certain.items()}
        plot_risk_coverage(curves, title=title, path=paths[1])
        return paths


def counted(number: int, one: str, several: str | None = None) -> str:
    """Put a number before what it counts."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def whereabouts(model: str) -> str:
    """Make names of one model equal: a folder can be written in several ways, an id of the Hub in one."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def readable(name: str) -> str:
    """Turn the name of a score into words."""
    known = {"r_precision": "R-precision", "map_at_r": "MAP@R"}
    return known.get(name) or name.replace("_at_", "@")


if __name__ == "__main__":
    run_recipe(main)
