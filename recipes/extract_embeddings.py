"""Write the embeddings of a split as a data set, with what the model says about each image.

python recipes/extract_embeddings.py --model_name_or_path outputs/mnist --dataset_name ylecun/mnist \
    --split test --output_dir outputs/embeddings/mnist-test
python recipes/extract_embeddings.py --model_name_or_path outputs/birds --dataset_name <folder> --train_classes 100 \
    --output_dir outputs/embeddings/birds-unseen
accelerate launch recipes/extract_embeddings.py --config <run>.yaml

`datasets.load_dataset(<output_dir>)` loads it; the columns are described in `hf_sphere.embeddings.store`. Data without
labels, and models without a head, have fewer of them. `recipes/evaluate_embeddings.py` measures how good they are.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm

from hf_sphere.data import ImageDataOptions, ImageSplit, load_image_split
from hf_sphere.embeddings.extract import class_names_of, embed, find_preparation, in_order, load_embedder
from hf_sphere.embeddings.store import ABOUT_FILE, DATA_FOLDER, written_embeddings
from hf_sphere.models import SphereVisionConfig
from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.arguments import parse_arguments

RESULTS_FOLDERS = {"evaluation", "pictures"}
"""Where the recipes that measure and draw embeddings put what they find, unless told otherwise."""


@dataclass
class ExtractionArguments:
    """Which model sees which images."""

    model_name_or_path: str = field(
        metadata={"help": "A saved classifier, encoder or few-shot model of sphere_vision: folder or Hub id."}
    )
    dataset_name: str = field(metadata={"help": "Id on the Hub, a folder, or the bundled `digits` or `two_clusters`."})
    output_dir: str = field(metadata={"help": "Folder to write."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    split: str = field(default="test", metadata={"help": "Split whose images to embed."})
    train_classes: int | None = field(
        default=None,
        metadata={
            "help": "For a model of retrieval that was trained with this option: put the training split and --split "
            "together and embed the images of all but the first so many classes, those that the model was evaluated on."
        },
    )
    train_split: str | None = field(
        default=None, metadata={"help": "Training split, for --train_classes alone; train if not set."}
    )
    image_column_name: str | None = field(default=None, metadata={"help": "Column of the images; found if not set."})
    label_column_name: str | None = field(
        default=None, metadata={"help": "Column of the labels; if not set found, or none where there is none."}
    )
    image_mean: list[float] | None = field(
        default=None, metadata={"help": "Mean a channel on the scale 0 to 1; only for models without image processor."}
    )
    image_std: list[float] | None = field(
        default=None, metadata={"help": "Standard deviation a channel; only for models without image processor."}
    )
    max_samples: int | None = field(default=None, metadata={"help": "Use only so many images."})
    seed: int = field(default=0, metadata={"help": "Seed of the choice of --max_samples."})
    batch_size: int = field(default=256, metadata={"help": "Images a batch and process."})
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "Precision of the model; as `accelerate launch` says if not set."}
    )
    num_workers: int | None = field(default=None, metadata={"help": "Decoding processes; one a core if not set."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Folder for decoded images; below the Hugging Face home if not set."}
    )
    skip_corrupt_images: bool = field(default=False, metadata={"help": "Leave out images that cannot be decoded."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the embeddings in output_dir."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do as it says."""
    (args,) = parse_arguments((ExtractionArguments,), argv, "Write the embeddings of a split as a data set.")
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    transformers.utils.logging.disable_progress_bar()  # loading weights is quick; the bar of the images is enough
    try:
        extract(args, accelerator)
    except KeyboardInterrupt:
        if accelerator.is_main_process:
            print("\nStopped; nothing was written.", file=sys.stderr)
        sys.exit(130)
    accelerator.end_training()


def extract(args: ExtractionArguments, accelerator: Accelerator) -> None:
    """Embed the images and write what came out."""
    output = Path(args.output_dir)
    check_output(output, overwrite=args.overwrite_output_dir)
    model = load_embedder(args.model_name_or_path).to(accelerator.device).eval()
    data = load_data(args, model.config, accelerator)
    about = describe(args, model, data)
    accelerator.print(summarize(about, data, model))
    seen: list[str] = []
    with ExitStack() as stack:
        write = None
        if accelerator.is_main_process:
            names = {"class_names": data.class_names, "predicted_names": class_names_of(model)}
            split = data.name.replace("+", "_")  # two splits are written as one, and its name may not have a plus
            write = stack.enter_context(written_embeddings(output, split, about, **names))
        hidden = args.disable_tqdm or not accelerator.is_main_process
        bar = stack.enter_context(tqdm(total=data.num_images, desc="Embedding", unit="image", disable=hidden))
        rows = embed(model, data.batches, accelerator, labelled=bool(data.class_names))
        for columns in in_order(rows, data.batches):
            seen = list(columns)
            bar.update(len(columns["index"]))
            if write is not None:
                write(columns)
    accelerator.print(
        f"wrote     {output}: {data.num_images:,} rows of {', '.join(seen)}\n"
        f"go on by  python recipes/evaluate_embeddings.py --embeddings {output}"
    )


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but embeddings (with what was found out about them), and that only if asked to."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    own = {ABOUT_FILE, DATA_FOLDER, *RESULTS_FOLDERS}
    other = [path for path in output.iterdir() if path.name not in own] if output.is_dir() else [output]
    if other:
        raise FileExistsError(f"{output} is not replaced: {other[0]} is no embeddings. Choose another --output_dir.")
    if not overwrite:
        raise FileExistsError(
            f"{output} holds embeddings. Choose another --output_dir, or replace them, and what was measured and drawn "
            "of them, with --overwrite_output_dir."
        )


def load_data(args: ExtractionArguments, config: SphereVisionConfig, accelerator: Accelerator) -> ImageSplit:
    """Load the split as the model wants its images; the main process decodes first, the others read its cache."""
    if args.train_split is not None and args.train_classes is None:
        raise ValueError(f"--train_split {args.train_split} has no use without --train_classes; leave it out.")
    options = ImageDataOptions(
        args.dataset_name,
        args.dataset_config_name,
        train_split=args.train_split or "train",
        image_column_name=args.image_column_name,
        label_column_name=args.label_column_name,
        **find_preparation(args.model_name_or_path, config, args.image_mean, args.image_std),
        skip_corrupt_images=args.skip_corrupt_images,
        cache_dir=args.cache_dir,
        dataloader_num_workers=args.num_workers,
    )
    with accelerator.main_process_first():
        return load_image_split(
            options,
            args.split,
            train_classes=args.train_classes,
            max_samples=args.max_samples,
            batch_size=args.batch_size,
            device=accelerator.device,
            seed=args.seed,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            progress=accelerator.is_main_process and not args.disable_tqdm,
        )


def describe(args: ExtractionArguments, model: Any, data: ImageSplit) -> dict[str, Any]:
    """Gather what `embeddings.json` is to tell: what was embedded by what, and which distance to use."""
    head = getattr(model, "head", None)
    distance: dict[str, Any] = {"distance": "cosine" if head is None else head.distance}
    if distance["distance"] == "hyperbolic":
        distance["curvature"] = float(head.curvature)
    return {
        "model": args.model_name_or_path,
        "backbone": model.config.backbone,
        "head": None if head is None else model.config.head,
        "dataset": args.dataset_name,
        "dataset_config_name": args.dataset_config_name,
        "split": data.name,
        "train_classes": args.train_classes,
        "train_split": args.train_split,
        "image_column_name": args.image_column_name,
        "image_mean": args.image_mean,
        "image_std": args.image_std,
        **distance,
    }


def summarize(about: dict[str, Any], data: ImageSplit, model: Any) -> str:
    """Sum up model and data in two lines."""
    head = f"{about['head']} head, {len(class_names_of(model))} classes" if about["head"] else "no head"
    labels = f"{len(data.class_names)} classes" if data.class_names else "no labels"
    return (
        f"model     {about['model']}: {about['backbone']}, {head}, on {model.device}\n"
        f"data      {about['dataset']}, split {about['split']}: {data.num_images:,} images, {labels}"
    )


if __name__ == "__main__":
    run_recipe(main)
