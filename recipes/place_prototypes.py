"""Place class prototypes on the hypersphere, say how good they are, draw their cosines and save them.

python recipes/place_prototypes.py --num_classes 100 --dim 25
python recipes/place_prototypes.py --dataset_name uoft-cs/cifar100 --dim 25 --text_model bert-base-uncased

The file `prototypes.safetensors` in --output_dir is what a training run names as `prototypes_file`. With --text_model
or --class_vectors the prototypes keep the order of the classes' similarities.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_sphere.data.sources import LABEL_COLUMNS, find_column, find_split, load_splits
from hf_sphere.data.targets import read_class_names
from hf_sphere.prototypes import METHODS, Placement, embed_class_names, place_prototypes
from hf_sphere.training import claim_output_dir
from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE, check_output_dir
from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import write_json
from hf_sphere.visualization import plot_cosines


@dataclass
class PlacementArguments:
    """What to place, and how."""

    dim: int = field(metadata={"help": "Dimension of the space."})
    num_classes: int | None = field(
        default=None, metadata={"help": "Number of classes; that of the data set if not set."}
    )
    method: str = field(default="auto", metadata={"help": f"One of: {', '.join(METHODS)}."})
    restarts: int | None = field(default=None, metadata={"help": "Random starts of a search; more take longer."})
    max_iterations: int | None = field(
        default=None, metadata={"help": "Iterations of a search; of `lbfgs` those at each sharpness."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the placement."})
    device: str | None = field(default=None, metadata={"help": "Where to search; the CPU if not set."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Take number and names of the classes from this data set."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_split: str = field(default="train", metadata={"help": "Split whose classes to take."})
    label_column_name: str | None = field(default=None, metadata={"help": "Column of the labels; found if not set."})
    text_model: str | None = field(
        default=None, metadata={"help": "Keep the order of similarities that this text model gives the class names."}
    )
    template: str | None = field(
        default=None, metadata={"help": "Text round a class name, for instance 'a photo of a {}'; none if not set."}
    )
    class_vectors: str | None = field(
        default=None, metadata={"help": "Keep the order of similarities of the tensor `class_vectors` of this file."}
    )
    ordering: Literal["ranking", "assignment"] | None = field(
        default=None,
        metadata={
            "help": "Keep the order by a ranking loss, or by assigning well separated points to classes; `ranking` if "
            "not set."
        },
    )
    ordering_weight: float | None = field(default=None, metadata={"help": "Weight of the ranking loss; 1 if not set."})
    num_neighbors: int | None = field(default=None, metadata={"help": "Near classes of each; a tenth if not set."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder to write; outputs/prototypes/<classes>-<dim> if not set."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace what is in output_dir."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})


def main(argv: Sequence[str] | None = None) -> None:
    """Place, report, draw and save as the arguments say."""
    (args,) = parse_arguments((PlacementArguments,), argv, "Place class prototypes on the hypersphere.")
    names = read_names(args)
    count = number_of_classes(args, names)
    folder = Path(args.output_dir or f"outputs/prototypes/{count}-{args.dim}")
    vectors = read_vectors(args, names)
    check_free(folder, overwrite=args.overwrite_output_dir)
    chosen = ("restarts", "max_iterations", "ordering", "ordering_weight", "num_neighbors")
    options = {name: value for name in chosen if (value := getattr(args, name)) is not None}
    placement = place_prototypes(
        count,
        args.dim,
        method=args.method,
        class_vectors=vectors,
        class_names=names,
        seed=args.seed,
        device=args.device or "cpu",
        progress=False if args.disable_tqdm else None,
        **options,
    )
    print(placement)
    claim_output_dir(folder, overwrite=args.overwrite_output_dir, resume=False)
    placement.save(folder / "prototypes.safetensors")
    write_json(folder / RUN_FILE, asdict(args))
    write_json(folder / RESULTS_FILE, results(placement))
    print(f"saved {folder / 'prototypes.safetensors'}")
    try:
        title = f"{count} prototypes in {args.dim} dimensions"
        plot_cosines(placement.prototypes, bound=placement.bound, title=title, path=folder / "cosines.png")
        print(f"drew  {folder / 'cosines.png'}")
    except ImportError as error:
        print(f"no picture of the cosines: {error}")


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds other results, before the search and with advice that fits it."""
    try:
        check_output_dir(folder, overwrite=overwrite, resume=False)
    except FileExistsError as error:
        if not folder.is_dir():
            raise
        raise FileExistsError(
            f"{folder} holds other results. Choose another --output_dir, or replace them with --overwrite_output_dir."
        ) from error


def read_names(args: PlacementArguments) -> list[str] | None:
    """Read the class names of the data set, if one is named."""
    if args.dataset_name is None:
        given = [name for name in ("dataset_config_name", "label_column_name") if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} says something about a data set; name it with --dataset_name.")
        return None
    rows = find_split(load_splits(args.dataset_name, args.dataset_config_name), args.train_split, "--train_split")
    return read_class_names(rows, find_column(rows, args.label_column_name, LABEL_COLUMNS, "label"))


def number_of_classes(args: PlacementArguments, names: list[str] | None) -> int:
    """Find out how many prototypes to place."""
    if names is None and args.num_classes is None:
        raise ValueError("name the number of classes with --num_classes, or a data set with --dataset_name.")
    if names is not None and args.num_classes not in (None, len(names)):
        raise ValueError(f"--num_classes is {args.num_classes}, but {args.dataset_name} has {len(names)} classes.")
    return args.num_classes if names is None else len(names)


def read_vectors(args: PlacementArguments, names: list[str] | None) -> Tensor | None:
    """Get the class vectors from a text model or a file, if one is named."""
    if args.template is not None and args.text_model is None:
        raise ValueError("--template is text for a text model to read; name one with --text_model.")
    if args.text_model is not None and args.class_vectors is not None:
        raise ValueError("class vectors come from --text_model or from --class_vectors, not from both.")
    if args.text_model is not None:
        if names is None:
            raise ValueError("--text_model embeds the class names of a data set; name it with --dataset_name.")
        return embed_class_names(names, args.text_model, template=args.template or "{}")
    if args.class_vectors is None:
        return None
    if not Path(args.class_vectors).is_file():
        raise FileNotFoundError(f"--class_vectors {args.class_vectors} is no file.")
    try:
        tensors = load_file(args.class_vectors)
    except SafetensorError as error:
        raise ValueError(f"{args.class_vectors} is no safetensors file: {error}") from error
    if "class_vectors" not in tensors:
        raise ValueError(f"{args.class_vectors} has no tensor class_vectors; it has: {', '.join(tensors)}.")
    return tensors["class_vectors"].to(torch.float64)


def results(placement: Placement) -> dict[str, Any]:
    """Gather what was reached."""
    reached = {name: getattr(placement, name) for name in ("separation", "bound", "optimal", "method", "seconds")}
    order = {} if placement.order is None else asdict(placement.order)
    return {**reached, "interrupted": placement.interrupted, **order}


if __name__ == "__main__":
    run_recipe(main)
