"""Measure the bias of a network's hyperplane arrangements per layer, with significance tests.

hf-sphere projections --model_name_or_path timm/resnet50.a1_in1k
hf-sphere projections --model_name_or_path timm:vgg11_bn --layers all
hf-sphere projections --model_name_or_path outputs/hyperplanes/cifar10-vgg11

The model is a Hub repository or on disk (only its weights are read), or `timm:<name>`. The
snapshots of a training run are measured as well. Writes `projections.json` (and `training.json` for the snapshots),
`all_results.json`, and plots as PNG and SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_sphere import hyperplanes, visualization
from hf_sphere.training.output_dir import RESULTS_FILE, check_results_dir, read_settings, results_dir
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.files import read_json, write_json

RUN_SETTINGS = (
    *("backbone", "dataset_name", "seed"),
    *("label_noise", "shuffled_pixels", "sample_classes", "corruption_seed"),
)
"""Settings of a training run that are copied to the results."""
PLOTS = [f"{name}{suffix}" for name in ("masses", "histograms", "along_training") for suffix in (".png", ".svg")]
FILES = ["projections.json", "training.json", "all_results.json", *PLOTS]


@dataclass
class ProjectionArguments(Arguments):
    """Model and layers."""

    model_name_or_path: str = argument(help="Training run, safetensors file or folder, Hub repository, or timm:<name>.")
    output_dir: str | None = argument(None, "Output folder; default: outputs/projections/<name of the model>.")
    overwrite_output_dir: bool = argument(False, "Replace the results in output_dir.")
    layers: Literal["conv", "linear", "all"] = argument("conv", "Kinds of layers.")
    include_1x1: bool = argument(False, "Include pointwise (1x1) convolutions.")
    normalize: bool = argument(True, "Normalize filters to unit length before projecting them.")
    snapshots: list[str] | None = argument(None, "Snapshot files; default: those in the folder of the training run.")
    disable_tqdm: bool = argument(False, "Disable the progress bar.")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a model and its snapshots, print the results, and write files and plots."""
    (args,) = parse_arguments((ProjectionArguments,), argv, __doc__)
    from hf_sphere.utils.model_sources import file_name, find_weights
    from hf_sphere.utils.progress import progress_bar
    from hf_sphere.utils.snapshots import list_snapshots, read_snapshot

    name = args.model_name_or_path
    output_dir = Path(args.output_dir or f"outputs/projections/{file_name(name)}")
    check_results_dir(output_dir, overwrite=args.overwrite_output_dir)
    source: Any = find_weights(name)
    folder = source if isinstance(source, Path) and source.is_dir() else None
    snapshots = [read_snapshot(path) for path in args.snapshots or ()]
    if args.snapshots is None and folder:
        snapshots = list_snapshots(folder)
    initial: Any = next((one for one in snapshots if one.epoch == 0), None)
    if snapshots and folder and not any(folder.glob("*.safetensors*")):
        source = snapshots[-1]
        print(f"{name} has no final model yet; these are the results of its snapshot of epoch {source.epoch}.\n")

    def measure(weights: Any) -> dict[str, Any]:
        results: dict[str, Any] = {
            "projections": hyperplanes.projection_statistics(weights, args.layers, args.normalize, args.include_1x1)
        }
        if initial is not None:
            distances = hyperplanes.distance_from_initialization(weights, initial, args.layers, args.include_1x1)
            results["distances"] = distances
        return results

    measured = measure(source)
    settings, accuracies = read_settings(Path(name)) or {}, dict[int, dict[str, float]]()
    entries = list[dict[str, Any]]()
    metadata = {key: settings[key] for key in RUN_SETTINGS if settings.get(key) is not None}
    if settings and (path := Path(name, RESULTS_FILE)).is_file():
        results = read_json(path)
        metadata["epoch"] = results["epoch"]
        for entry in results["history"]:
            values = {"train_accuracy": entry.get("train_accuracy")}
            values["eval_accuracy"] = entry.get("eval_accuracy", entry.get("validation_accuracy"))
            accuracies[entry["epoch"]] = {key: value for key, value in values.items() if value is not None}
    for one in progress_bar(snapshots, unit="snapshot", disable=args.disable_tqdm or not snapshots):
        results = {key: result.to_dict() for key, result in measure(one).items()}
        entries.append({"epoch": one.epoch, **accuracies.get(one.epoch, {}), **results})
    statistics = measured["projections"]
    drawn: dict[str, Any] = {"masses": (visualization.plot_projection_masses, statistics.to_dict())}
    if args.normalize:
        drawn["histograms"] = visualization.plot_projection_histograms, statistics.to_dict()
    with results_dir(output_dir, FILES, overwrite=args.overwrite_output_dir):
        print(statistics)
        if "distances" in measured:
            print(f"\nDistance from initialization\n{measured['distances']}")
        statistics.save(output_dir / "projections.json")
        if len(entries) > 1:
            training = {"metadata": metadata, "epochs": entries}
            write_json(output_dir / "training.json", training)
            drawn |= {"histograms": (visualization.plot_projection_histograms, training)} if args.normalize else {}
            drawn["along_training"] = visualization.plot_projections_along_training, training
        try:
            for path in (output_dir / name for name in PLOTS):
                if path.stem in drawn:
                    draw, values = drawn[path.stem]
                    draw(values, title=Path(name).name, path=path)
        except ImportError as error:
            print(f"no plots: {error}")
        write_json(output_dir / "all_results.json", {"model": name, **metadata, **statistics.summary()})
    print(f"\nResults in {output_dir}")
