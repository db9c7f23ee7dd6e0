"""Place class prototypes on the hypersphere, report their separation, and save them.

hf-sphere place --num_classes 100 --dim 25
hf-sphere place --dataset_name uoft-cs/cifar100 --dim 25 --text_model bert-base-uncased

Training runs load `prototypes.safetensors` from --output_dir with `prototypes_file`. With --text_model or
--class_vectors the prototypes preserve the similarity order of the classes.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import hf_sphere.prototypes
from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import SEED, Arguments, argument, parse_arguments
from hf_sphere.utils.files import read_tensors, write_json

METHODS = ("auto", "catalogue", "closed_form", "lbfgs", "sgd", "sgd_as_published", "slsqp")
"""Names of the placement methods, since importing them takes seconds."""


@dataclass
class PlacementArguments(Arguments):
    """Placement of the prototypes."""

    dim: int = argument(help="Dimension of the space.", ge=1)
    num_classes: int | None = argument(None, "Number of classes; by default of the dataset.", ge=1)
    method: str = argument(
        "auto",
        "Placement method.",
        choices=lambda: getattr(sys.modules.get("hf_sphere.prototypes.methods"), "METHODS", METHODS),  # with one's own
    )
    restarts: int | None = argument(None, "Number of random starts of a search.", ge=1)
    max_iterations: int | None = argument(None, "Iterations of a search; for `lbfgs`, per sharpness.", ge=1)
    seed: int = argument(0, "Seed of the placement.", **SEED)
    dataset_name: str | None = argument(None, "Dataset that defines the number and names of the classes.")
    dataset_config_name: str | None = argument(None, "Configuration of the dataset.", only_with=["dataset_name"])
    train_split: str = argument("train", "Split that defines the classes.", only_with=["dataset_name"])
    label_column_name: str | None = argument(None, "Label column; detected by default.", only_with=["dataset_name"])
    text_model: str | None = argument(
        None, "Preserve the similarity order of the class names in this text model.", only_with=["dataset_name"]
    )
    template: str | None = argument(None, "Text around a name, such as 'a photo of a {}'.", only_with=["text_model"])
    class_vectors: str | None = argument(
        None, "Preserve the similarity order of `class_vectors` in this file.", not_with=["text_model"]
    )
    ordering: Literal["ranking", "assignment"] | None = argument(
        None, "Preserve the order by a ranking loss (default), or by assigning well-separated points to classes."
    )
    output_dir: str | None = argument(None, "Output folder; outputs/prototypes/<classes>-<dim> by default.")
    overwrite_output_dir: bool = argument(False, "Replace earlier results in output_dir.")
    disable_tqdm: bool = argument(False, "Disable progress bars.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name is None and self.num_classes is None:
            raise ValueError("set the number of classes with --num_classes, or a dataset with --dataset_name.")


def main(argv: Sequence[str] | None = None) -> None:
    """Place, report and save the prototypes."""
    (args,) = parse_arguments((PlacementArguments,), argv, __doc__)

    names = None
    if args.dataset_name:
        from hf_sphere.data.sources import LABEL_COLUMNS, find_column, find_split, load_splits
        from hf_sphere.data.targets import read_class_names

        splits = load_splits(args.dataset_name, args.dataset_config_name)
        rows = find_split(splits, args.train_split, "--train_split")
        names = read_class_names(rows, find_column(rows, args.label_column_name, LABEL_COLUMNS, "label"))
    count = len(names) if names else args.num_classes
    if args.num_classes not in (None, count):
        raise ValueError(f"--num_classes is {args.num_classes}, but {args.dataset_name} has {count} classes.")
    folder = Path(args.output_dir or f"outputs/prototypes/{count}-{args.dim}")
    output_dir.check_results_dir(folder, overwrite=args.overwrite_output_dir)
    vectors: Any = None
    if args.text_model is not None:
        template = args.template or "{}"
        vectors = hf_sphere.prototypes.embed_class_names(names or [], args.text_model, template=template)
    elif args.class_vectors is not None:
        tensors = read_tensors(args.class_vectors)
        if "class_vectors" not in tensors:
            raise ValueError(f"{args.class_vectors} has no tensor class_vectors; it has: {', '.join(tensors)}.")
        vectors = tensors["class_vectors"].double()
    options = ("method", "seed", "restarts", "max_iterations", "ordering")
    placement = hf_sphere.prototypes.place_prototypes(
        count,
        args.dim,
        class_vectors=vectors,
        class_names=names,
        progress=False if args.disable_tqdm else None,
        **{name: value for name in options if (value := getattr(args, name)) is not None},
    )
    print(placement)
    files = ("prototypes.safetensors", output_dir.RUN_FILE, output_dir.RESULTS_FILE)
    with output_dir.results_dir(folder, files, overwrite=args.overwrite_output_dir):
        placement.save(folder / files[0])
        output_dir.write_settings(folder, asdict(args))
        reached = {name: getattr(placement, name) for name in ("separation", "bound", "optimal", "method", "seconds")}
        order = asdict(placement.order) if placement.order else {}
        write_json(folder / output_dir.RESULTS_FILE, reached | order)
    print(f"saved {folder / files[0]}")
