"""Say how biased the hyperplane arrangements of a network are, layer by layer, with a test of significance.

python recipes/compute_projections.py --model_name_or_path timm/resnet50.a1_in1k
python recipes/compute_projections.py --model_name_or_path torchvision:vgg11_bn --layers all
python recipes/compute_projections.py --model_name_or_path outputs/hyperplanes/cifar10-vgg11

Any model of the Hub or on disk; of files only the weights are read, and no model is built. `timm:<name>` and
`torchvision:<name>` are models of these libraries. A run that has kept snapshots is followed along its training. Writes
`projections.json` (and `training.json` with each snapshot's), `all_results.json`, and pictures as PNG and SVG.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm

from hf_sphere.analysis import (
    Distances,
    ProjectionStatistics,
    distance_from_initialization,
    projection_statistics,
)
from hf_sphere.analysis.projection_table import SIGNIFICANT
from hf_sphere.model_sources import file_name, find_weights, load_classifier
from hf_sphere.snapshot_files import find_snapshots, list_snapshots
from hf_sphere.training import claim_output_dir, parse_arguments
from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE, check_output_dir
from hf_sphere.training.run import run_recipe, write_json
from hf_sphere.visualization import (
    plot_projection_histograms,
    plot_projection_masses,
    plot_projections_along_training,
)

logger = logging.getLogger(__name__)

NOTED = ("backbone", "dataset_name", "seed", "label_noise", "shuffled_pixels", "sample_classes", "corruption_seed")
"""Settings of a training run that are noted beside the results."""


@dataclass
class ProjectionArguments:
    """Which layers of which model."""

    model_name_or_path: str = field(
        metadata={
            "help": "A run's folder, a file or folder of safetensors, a repository of the Hub, timm:<name> or "
            "torchvision:<name>."
        }
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder to write; outputs/projections/<name of the model> if not set."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the results in output_dir."})
    layers: Literal["conv", "linear", "all"] = field(default="conv", metadata={"help": "Which kinds of layers."})
    include_1x1: bool = field(default=False, metadata={"help": "Convolutions whose kernel is one point as well."})
    normalize: bool = field(
        default=True, metadata={"help": "Project filters of unit length; false for filters as they are."}
    )
    by_stage: bool = field(
        default=False,
        metadata={"help": "Write stages.json as well: the results under stage and block. Builds the model."},
    )
    snapshots: list[str] | None = field(
        default=None, metadata={"help": "Files of snapshots of the model; those in the run's folder if not set."}
    )
    initial_model: str | None = field(
        default=None,
        metadata={"help": "Measure distances from this model; from the snapshot of epoch 0 if not set."},
    )
    random_weights: bool = field(
        default=False, metadata={"help": "Take the random initialisation of a model of timm or torchvision."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, print, write and draw."""
    (args,) = parse_arguments((ProjectionArguments,), argv, __doc__ or "")
    source = find_weights(args.model_name_or_path, random_weights=args.random_weights)
    output_dir = Path(args.output_dir or f"outputs/projections/{file_name(args.model_name_or_path)}")
    check_output_dir(output_dir, overwrite=args.overwrite_output_dir, resume=False)
    training = follow(args, source)
    last = training["epochs"][-1]
    statistics = ProjectionStatistics.from_dict(last["projections"])
    stages = by_stage(args, statistics, last.get("distances")) if args.by_stage else None

    claim_output_dir(output_dir, overwrite=args.overwrite_output_dir, resume=False)
    print(statistics)
    if "distances" in last:
        print(f"\nDistance from the initialisation\n{Distances.from_dict(last['distances'])}")
    statistics.save(output_dir / "projections.json")
    if len(training["epochs"]) > 1:
        write_json(output_dir / "training.json", training)
    if stages is not None:
        write_json(output_dir / "stages.json", stages)
    draw(args, training, output_dir)
    write_json(
        output_dir / RESULTS_FILE, {"model": args.model_name_or_path, **training["metadata"], **sums(statistics)}
    )
    print(f"\nResults in {output_dir}")


def follow(args: ProjectionArguments, source: nn.Module | Path) -> dict[str, Any]:
    """Statistics of every snapshot, or of the model alone where there are none, beside what the run says of itself."""
    if args.snapshots is not None:
        snapshots, missing = find_snapshots(args.snapshots)
        if missing:
            logger.warning("Snapshots that are not there are left out: %s.", ", ".join(map(str, missing)))
        if not snapshots:
            raise FileNotFoundError(f"none of the snapshots is there: {', '.join(args.snapshots)}.")
    else:
        snapshots = list_snapshots(source) if isinstance(source, Path) and source.is_dir() else []
    initial: Any = next((one for one in snapshots if one.epoch == 0), None)
    if args.initial_model is not None:
        initial = find_weights(args.initial_model)
    chosen = {"layers": args.layers, "include_1x1": args.include_1x1}
    metadata, accuracies = read_run(source)
    steps: list[tuple[int | None, Any]] = [(one.epoch, one) for one in snapshots] or [(None, source)]
    entries = []
    for epoch, weights in tqdm(steps, unit="snapshot", disable=args.disable_tqdm or len(steps) == 1):
        entry: dict[str, Any] = {"epoch": epoch, **accuracies.get(epoch, {})}
        entry["projections"] = projection_statistics(weights, normalize=args.normalize, **chosen).to_dict()
        if initial is not None:
            entry["distances"] = distance_from_initialization(weights, initial, **chosen).to_dict()
        entries.append(entry)
    return {"metadata": metadata, "epochs": entries}


def read_run(source: nn.Module | Path) -> tuple[dict[str, Any], dict[int | None, dict[str, float]]]:
    """What the folder of a run says of itself, and the accuracies after each epoch; nothing for other sources."""
    if not isinstance(source, Path) or not (source / RUN_FILE).is_file():
        return {}, {}
    settings = json.loads((source / RUN_FILE).read_text(encoding="utf-8"))
    metadata = {name: settings[name] for name in NOTED if settings.get(name) is not None}
    accuracies: dict[int | None, dict[str, float]] = {}
    if (source / RESULTS_FILE).is_file():
        for entry in json.loads((source / RESULTS_FILE).read_text(encoding="utf-8"))["history"]:
            found = {"train_accuracy": entry.get("train_accuracy")}
            found["eval_accuracy"] = entry.get("eval_accuracy", entry.get("validation_accuracy"))
            accuracies[entry["epoch"]] = {name: value for name, value in found.items() if value is not None}
    return metadata, accuracies


def by_stage(
    args: ProjectionArguments, statistics: ProjectionStatistics, distances: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The results under stage and block, from the names of layers or else from the model."""
    try:
        filed = statistics.by_stage()
    except ValueError as unknown:  # where poolings are is not in the weights
        try:
            model = load_classifier(args.model_name_or_path).model
        except (OSError, ValueError) as error:
            raise ValueError(f"{unknown} And no model can be built of {args.model_name_or_path}: {error}") from error
        statistics = projection_statistics(model, args.layers, args.normalize, args.include_1x1)
        filed = statistics.by_stage()
    for name, layer in statistics.layers.items():
        if distances is not None:
            distance = distances["layers"][name]
            filed[str(layer.stage)][str(layer.block)] |= {"l2_dist": distance["l2"], "l_inf_dist": distance["l_inf"]}
    return filed


def draw(args: ProjectionArguments, training: Mapping[str, Any], output_dir: Path) -> None:
    """Draw what there is, each as PNG and SVG."""
    title = Path(args.model_name_or_path).name
    last = training["epochs"][-1]["projections"]
    shown = training if len(training["epochs"]) > 1 else last
    try:
        for suffix in (".png", ".svg"):
            plot_projection_masses(last, title=title, path=output_dir / f"masses{suffix}")
            if args.normalize:
                plot_projection_histograms(shown, title=title, path=output_dir / f"histograms{suffix}")
            if shown is training:
                plot_projections_along_training(training, title=title, path=output_dir / f"along_training{suffix}")
    except ImportError as error:
        print(f"no picture: {error}")


def sums(statistics: ProjectionStatistics) -> dict[str, Any]:
    """The network as a whole, and how many of its layers are biased."""
    net = statistics.net
    p_values = [layer.sign_p_value_adjusted for layer in statistics.layers.values()]
    return {
        "num_layers": len(statistics.layers),
        "num_layers_biased": sum(p is not None and p < SIGNIFICANT for p in p_values),
        "num_filters": net.num_filters,
        "num_dead": net.num_dead,
        "mean": net.mean,
        "mass": net.mass,
        "null_mass_low": net.null_mass_low,
        "null_mass_high": net.null_mass_high,
        "ks_p_value": net.ks_p_value,
        "sign_p_value": net.sign_p_value,
    }


if __name__ == "__main__":
    run_recipe(main)
