r"""Evaluate embeddings: accuracy, calibration, retrieval, class overlap and out-of-distribution (OOD) detection.

hf-sphere evaluate outputs/embeddings/mnist-test \
    --train_embeddings outputs/embeddings/mnist-train --out_of_distribution outputs/embeddings/digits-test --ks 1 2 4 8

The embeddings of a saved model come from `hf-sphere extract`. Any dataset with the columns `embedding` and `label` will
do. Metrics for which a column is missing are skipped with a note. Results are written to `all_results.json`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_sphere import evaluation, search, visualization
from hf_sphere.evaluation.options import EvaluationOptions
from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.files import read_whole, write_json

PLOTS = ("reliability.png", "risk_coverage.png")
FILES = (*PLOTS, output_dir.RUN_FILE, output_dir.RESULTS_FILE)


@dataclass
class EvaluatedEmbeddings(Arguments):
    """Embeddings to evaluate."""

    embeddings: str = argument(help="Folder written by hf-sphere extract. It can be the first argument.")
    out_of_distribution: list[str] = argument(list, "One or several embeddings of OOD images by the same model.")
    train_embeddings: str | None = argument(
        None,
        "Embeddings of the training images (--split training) by the same model, to fit scores of OOD images to.",
        only_with=["out_of_distribution"],
    )
    output_dir: str | None = argument(None, "Output folder; <embeddings>/evaluation if not set.")
    overwrite_output_dir: bool = argument(False, "Replace the results in output_dir.")
    split: str | None = argument(None, "Split to read, for datasets with several splits.")
    max_samples: int | None = argument(None, "Maximum number of embeddings of each dataset.", ge=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the metrics, write them and plot."""
    args, options = parse_arguments((EvaluatedEmbeddings, EvaluationOptions), named_first("embeddings", argv), __doc__)
    from hf_sphere.evaluation.evaluate import read_ood_embeddings

    if args.output_dir is None and not read_whole(args.embeddings, Path.is_dir):
        raise ValueError(f"{args.embeddings} is not a folder. If it is a dataset on the Hub, set --output_dir.")
    output = Path(args.output_dir or Path(args.embeddings) / "evaluation")
    output_dir.check_results_dir(output, overwrite=args.overwrite_output_dir)
    reading = {"split": args.split, "max_samples": args.max_samples, "seed": options.seed}
    needed = ["label"] if options.overlap_threshold is None else ["label", "prediction"]
    data = search.read_embeddings(args.embeddings, needed=needed, **reading)
    ood = read_ood_embeddings(args.out_of_distribution, data, **reading)
    train = None
    if args.train_embeddings is not None:
        train = search.read_embeddings(args.train_embeddings, needed=["label"], only_split=True, **reading)
    measured = evaluation.evaluate_embeddings(data, options, ood=ood, train=train)
    assert data.labels is not None  # needed
    (count, dim), classes = data.embeddings.shape, len(data.labels.unique())
    print(f"{data.name}: embeddings {count:,} x {dim}, classes {classes}, distance {measured.distance}")
    for name, value in measured.results.items():
        print(f"{name:<48}{value:>8,}" if isinstance(value, int) else f"{name:<48}{100 * value:>8.2f} %")
    for other in ood.values():
        if args.split not in (None, other.split):
            print(f"Note: {other.name} has no split {args.split!r}; its only split, {other.split!r}, was read instead.")
    for note in measured.notes:
        print(f"Note: {note}")
    with output_dir.results_dir(output, FILES, overwrite=args.overwrite_output_dir):
        output_dir.write_settings(output, {**asdict(args), **asdict(options)})
        write_json(output / output_dir.RESULTS_FILE, measured.results)
        print(f"saved {output / output_dir.RESULTS_FILE}")
        if measured.reliability is None:
            return
        title, paths = Path(data.name).resolve().name, [output / name for name in PLOTS]
        errors = [100 * measured.results[f"eval_calibration_error_{n}"] for n in ("equal_mass_l2", "equal_width_l1")]
        caption = "calibration error {:.2f} % (equal mass, root mean square), {:.2f} % (equal width, mean)"
        try:
            visualization.plot_reliability(
                measured.reliability, title=title, caption=caption.format(*errors), path=paths[0]
            )
            visualization.plot_risk_coverage(measured.risk_coverage, title=title, path=paths[1])
            print(f"plotted {paths[0]} and {paths[1]}")
        except ImportError as error:
            print(f"no plots: {error}")
