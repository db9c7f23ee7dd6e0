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

import transformers
from torch import nn
from tqdm.auto import tqdm

from hf_sphere.analysis import (
    Distances,
    ProjectionStatistics,
    distance_from_initialization,
    projection_statistics,
)
from hf_sphere.analysis.model_sources import file_name, find_weights, load_classifier
from hf_sphere.analysis.null_distribution import is_significant
from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.output_dir import RESULTS_FILE, RUN_FILE, check_results_dir, prepare_results_dir
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import write_json
from hf_sphere.utils.snapshots import Snapshot, find_snapshots, list_snapshots
from hf_sphere.visualization import (
    plot_projection_histograms,
    plot_projection_masses,
    plot_projections_along_training,
)

logger = logging.getLogger(__name__)

NOTED = ("backbone", "dataset_name", "seed", "label_noise", "shuffled_pixels", "sample_classes", "corruption_seed")
"""Settings of a training run that are noted beside the results."""


SUFFIXES = (".png", ".svg")
PICTURES = [f"{name}{suffix}" for name in ("masses", "histograms", "along_training") for suffix in SUFFIXES]
FILES = ["projections.json", "training.json", "stages.json", RESULTS_FILE, *PICTURES]
"""All that may be written."""


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
    seed: int = field(default=0, metadata={"help": "Seed of this."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, print, write and draw."""
    (args,) = parse_arguments((ProjectionArguments,), argv, __doc__ or "")
    transformers.utils.logging.disable_progress_bar()  # one bar is enough: that of the snapshots
    name = args.model_name_or_path
    output_dir = Path(args.output_dir or f"outputs/projections/{file_name(name)}")
    check_results_dir(output_dir, overwrite=args.overwrite_output_dir)
    source: Any = find_weights(name, random_weights=args.random_weights, seed=args.seed)
    snapshots = snapshots_of(args, source)
    initial: Any = next((one for one in snapshots if one.epoch == 0), None)
    if args.initial_model is not None:
        initial = find_weights(args.initial_model)
    if snapshots and not has_weights(source):
        source = snapshots[-1]
        print(f"{name} has no model yet; this is its snapshot of epoch {source.epoch}.\n")
    result = measure(args, source, initial)
    metadata, accuracies = read_run(Path(name))
    bar = tqdm(snapshots, unit="snapshot", disable=args.disable_tqdm or not snapshots)
    entries = [{"epoch": one.epoch, **accuracies.get(one.epoch, {}), **measure(args, one, initial)} for one in bar]
    statistics = ProjectionStatistics.from_dict(result["projections"])
    stages = by_stage(args, statistics, result.get("distances")) if args.by_stage else None

    prepare_results_dir(output_dir, FILES, overwrite=args.overwrite_output_dir)
    print(statistics)
    if "distances" in result:
        print(f"\nDistance from the initialisation\n{Distances.from_dict(result['distances'])}")
    statistics.save(output_dir / "projections.json")
    training = {"metadata": metadata, "epochs": entries}
    if len(entries) > 1:
        write_json(output_dir / "training.json", training)
    if stages is not None:
        write_json(output_dir / "stages.json", {"metadata": {"model": name, **metadata}, **stages})
    draw(args, result["projections"], training, output_dir)
    write_json(output_dir / RESULTS_FILE, {"model": name, **metadata, **sums(statistics)})
    print(f"\nResults in {output_dir}")


def snapshots_of(args: ProjectionArguments, source: nn.Module | Path) -> list[Snapshot]:
    """The snapshots that were named, else those that the run has kept."""
    if args.snapshots is None:
        return list_snapshots(source) if isinstance(source, Path) and source.is_dir() else []
    snapshots, missing = find_snapshots(args.snapshots)
    if missing:
        logger.warning("Snapshots that are not there are left out: %s.", ", ".join(map(str, missing)))
    if not snapshots:
        raise FileNotFoundError(f"none of the snapshots is there: {', '.join(args.snapshots)}.")
    return snapshots


def has_weights(source: nn.Module | Path) -> bool:
    """Whether there is a model, and not only snapshots on the way to one."""
    return not isinstance(source, Path) or source.is_file() or any(source.glob("*.safetensors*"))


def measure(args: ProjectionArguments, source: Any, initial: Any) -> dict[str, Any]:
    """Statistics of some weights, and their distances from the initial ones if those are known."""
    chosen = {"layers": args.layers, "include_1x1": args.include_1x1}
    result = {"projections": projection_statistics(source, normalize=args.normalize, **chosen).to_dict()}
    if initial is not None:
        result["distances"] = distance_from_initialization(source, initial, **chosen).to_dict()
    return result


def read_run(folder: Path) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    """What the folder of a run says of itself, and the accuracies after each epoch; nothing of other models."""
    if not (folder / RUN_FILE).is_file():
        return {}, {}
    settings = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    metadata = {name: settings[name] for name in NOTED if settings.get(name) is not None}
    accuracies: dict[int, dict[str, float]] = {}
    if (folder / RESULTS_FILE).is_file():
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        metadata["epoch"] = results["epoch"]
        for entry in results["history"]:
            found = {"train_accuracy": entry.get("train_accuracy")}
            found["eval_accuracy"] = entry.get("eval_accuracy", entry.get("validation_accuracy"))
            accuracies[entry["epoch"]] = {name: value for name, value in found.items() if value is not None}
    return metadata, accuracies


def by_stage(
    args: ProjectionArguments, statistics: ProjectionStatistics, distances: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The results under stage and block: of the model, which knows where it pools, or else of the names of layers."""
    try:
        model = load_classifier(args.model_name_or_path, random_weights=args.random_weights, seed=args.seed).model
        statistics = projection_statistics(model, args.layers, args.normalize, args.include_1x1)
    except (OSError, ValueError) as error:
        if any(layer.stage is None for layer in statistics.layers.values()):
            raise ValueError(
                f"the stages are not in the names of the layers, and no model can be built of "
                f"{args.model_name_or_path}: {error}"
            ) from error
    filed = statistics.by_stage()
    for name, layer in statistics.layers.items():
        # A file may leave out the start of a module's path.
        fits = (d for other, d in (distances or {"layers": {}})["layers"].items() if f".{name}".endswith(f".{other}"))
        for distance in fits:
            filed[str(layer.stage)][str(layer.block)] |= {"l2_dist": distance["l2"], "l_inf_dist": distance["l_inf"]}
    return filed


def draw(
    args: ProjectionArguments, projections: Mapping[str, Any], training: Mapping[str, Any], output_dir: Path
) -> None:
    """Draw what there is, each as PNG and SVG."""
    title = Path(args.model_name_or_path).name
    followed = len(training["epochs"]) > 1
    try:
        for suffix in SUFFIXES:
            plot_projection_masses(projections, title=title, path=output_dir / f"masses{suffix}")
            if args.normalize:
                shown = training if followed else projections
                plot_projection_histograms(shown, title=title, path=output_dir / f"histograms{suffix}")
            if followed:
                plot_projections_along_training(training, title=title, path=output_dir / f"along_training{suffix}")
    except ImportError as error:
        print(f"no picture: {error}")


def sums(statistics: ProjectionStatistics) -> dict[str, Any]:
    """The network as a whole, and how many of its layers are biased."""
    net = statistics.net
    sign = {name for name, one in statistics.layers.items() if is_significant(one.sign_p_value_adjusted)}
    ks = {name for name, one in statistics.layers.items() if is_significant(one.ks_p_value_adjusted)}
    return {
        "num_layers": len(statistics.layers),
        "num_layers_biased": len(sign),
        "num_layers_unlike_isotropic": len(sign | ks),
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
