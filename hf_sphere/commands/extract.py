r"""Write the predictions and embeddings of a split as a dataset.

hf-sphere extract --model_name_or_path outputs/mnist --dataset_name ylecun/mnist \
    --split test --output_dir outputs/embeddings/mnist-test
hf-sphere extract --model_name_or_path outputs/birds --dataset_name <folder> --train_classes 100 \
    --output_dir outputs/embeddings/birds-unseen
accelerate launch -m hf_sphere.commands.main extract --config <file>

`datasets.load_dataset(<output_dir>)` loads it; the columns are described in `hf_sphere.search.store`. There are
fewer columns for data without labels and models without a head. `hf-sphere evaluate` evaluates the
embeddings.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.training.arguments import PrecisionArguments
from hf_sphere.utils.arguments import SEED, Arguments, argument, parse_arguments
from hf_sphere.utils.files import check_writable, list_folder

COMMON = ("dataset_config_name", "train_classes", "train_split", "image_column_name", "image_mean", "image_std")
"""Arguments that are stored in `embeddings.json` under the same name."""


@dataclass
class ExtractionArguments(Arguments):
    """Model and images."""

    model_name_or_path: str = argument(help="Model of this library or image encoder of transformers: folder or Hub id.")
    dataset_name: str = argument(help="Hub id, folder, or a bundled dataset: `digits` or `two_clusters`.")
    output_dir: str = argument(help="Output folder.")
    dataset_config_name: str | None = argument(None, "Configuration of the dataset.")
    split: str | None = argument(
        None,
        "Split to embed, or by the record of a model that was trained on the data: training, evaluation, validation or "
        "rejection, the images of this part; the evaluation split if not set.",
    )
    train_classes: int | None = argument(
        None,
        "For a retrieval model trained with this option: pool the training split and --split, and embed the images of "
        "all classes after the first train_classes, on which the model was evaluated.",
        ge=1,
    )
    train_split: str | None = argument(None, "Training split; train if not set.", only_with=["train_classes"])
    image_column_name: str | None = argument(None, "Image column; detected by name by default.")
    label_column_name: str | None = argument(None, "Label column, if any; detected by name by default.")
    image_mean: list[float] | None = argument(None, "Mean per channel, 0 to 1; for models without an image processor.")
    image_std: list[float] | None = argument(
        None, "Deviation per channel; for models without an image processor.", gt=0
    )
    classes: Literal["known", "unknown"] | None = argument(
        None, "Embed only the images whose class is, or is not, one of the model's classes; by default, all images."
    )
    max_samples: int | None = argument(None, "Maximum number of images.", ge=1)
    seed: int = argument(0, "Seed of the sample of --max_samples.", **SEED)
    batch_size: int = argument(256, "Images per batch and process.", ge=1)
    num_workers: int | None = argument(None, "Number of decoding processes; one per core if not set.", ge=0, le=1024)
    cache_dir: str | None = argument(None, "Folder for decoded images; in the Hugging Face home if not set.")
    skip_invalid: bool = argument(False, "Skip images that cannot be decoded.")
    overwrite_output_dir: bool = argument(False, "Replace the embeddings in output_dir.")
    disable_tqdm: bool = argument(False, "Disable progress bars.")


def main(argv: Sequence[str] | None = None) -> None:
    """Embed the images and write the results."""
    args, precision = parse_arguments((ExtractionArguments, PrecisionArguments), argv, __doc__)
    from hf_sphere.data import load_image_split
    from hf_sphere.search import extract as extraction
    from hf_sphere.search.index_files import check_replaceable
    from hf_sphere.search.store import ABOUT_FILE, DATA_FOLDER
    from hf_sphere.training.run import start_accelerator

    accelerator = start_accelerator(mixed_precision=precision.mixed_precision)
    output = Path(args.output_dir)
    check_writable(output)
    check_replaceable(output, {ABOUT_FILE, DATA_FOLDER, "evaluation", "pictures"})  # of hf-sphere evaluate, visualize
    if list_folder(output) and not args.overwrite_output_dir:
        hint = "replace them, with their evaluation and pictures, with --overwrite_output_dir"
        raise FileExistsError(f"{output} contains embeddings. Choose another --output_dir, or {hint}.")
    model = extraction.load_embedding_model(args.model_name_or_path).to(accelerator.device).eval()
    names = set(extraction.class_names(model))
    if args.classes is not None and not names:
        raise ValueError(f"--classes {args.classes} needs a model with classes; {args.model_name_or_path} has none.")
    progress = accelerator.is_main_process and not args.disable_tqdm
    selections = {"known": names.__contains__, "unknown": lambda name: name not in names}
    shared = {field.name for field in fields(ImageSourceOptions)} & {*vars(args)} - {"train_split"}
    options = ImageSourceOptions(
        **{name: getattr(args, name) for name in shared},
        train_split=args.train_split or "train",
        dataloader_num_workers=args.num_workers,
    )
    with accelerator.main_process_first():  # it decodes the images; the others read its cache
        images = load_image_split(
            options,
            args.split,
            like=args.model_name_or_path,
            train_classes=args.train_classes,
            select_class=None if args.classes is None else selections[args.classes],
            max_samples=args.max_samples,
            batch_size=args.batch_size,
            device=accelerator.device,
            seed=args.seed,
            progress=progress,
        )
    head = f"{model.config.head} head, {len(names)} classes" if hasattr(model, "head") else "no head"
    labels = f"{len(images.class_names)} classes" if images.class_names else "no labels"
    accelerator.print(
        f"model     {args.model_name_or_path}: {extraction.backbone_name(model)}, {head}, on {model.device}\n"
        f"data      {args.dataset_name}, split {images.name}: {images.num_images:,} images, {labels}"
    )
    if images.recorded:
        accelerator.print(f"record    the model was trained on {images.recorded['train']:,} of these images")
    about = {"model": args.model_name_or_path, "dataset": args.dataset_name}
    about |= {name: getattr(args, name) for name in COMMON}
    columns = extraction.extract_embeddings(model, images, output, accelerator, about=about, progress=progress)
    step = "evaluate" if images.class_names else "visualize"
    accelerator.print(
        f"wrote     {output}: {images.num_images:,} rows of {', '.join(columns)}\n"
        f"next step hf-sphere {step} --embeddings {shlex.quote(str(output))}"
    )
    accelerator.end_training()
