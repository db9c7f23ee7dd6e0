"""Write the embeddings of a split as a data set, with what the model says about each image.

python recipes/extract_embeddings.py --model_name_or_path outputs/mnist --dataset_name ylecun/mnist \
    --split test --output_dir outputs/embeddings/mnist-test
python recipes/extract_embeddings.py --model_name_or_path outputs/birds --dataset_name <folder> --train_classes 100 \
    --output_dir outputs/embeddings/birds-unseen
accelerate launch recipes/extract_embeddings.py --config <run>.yaml

`datasets.load_dataset(<output_dir>)` loads it; the columns are described in `hf_sphere.embedding_files`. Data without
labels, and models without a head, have fewer of them. `recipes/evaluate_embeddings.py` measures how good they are.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig

from hf_sphere.data import ImageBatches, ImageSplit, load_image_split
from hf_sphere.embedding_files import ABOUT_FILE, DATA_FOLDER, Columns, written_embeddings
from hf_sphere.models import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionImageProcessor,
    SphereVisionModel,
)
from hf_sphere.training import parse_arguments
from hf_sphere.training.run import run_recipe

EVALUATION_FOLDER = "evaluation"
MODELS = {kind.__name__: kind for kind in (SphereVisionForImageClassification, SphereVisionModel)}


@dataclass
class ExtractionArguments:
    """Which model sees which images."""

    model_name_or_path: str = field(
        metadata={"help": "A saved SphereVisionForImageClassification or SphereVisionModel: folder or Hub id."}
    )
    dataset_name: str = field(metadata={"help": "Id on the Hub, a folder, or the embedded `digits` or `two_clusters`."})
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
    model = load_model(args.model_name_or_path).to(accelerator.device).eval()
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
        for columns in in_order(embed(model, data, accelerator), data.batches):
            seen = list(columns)
            bar.update(len(columns["index"]))
            if write is not None:
                write(columns)
    accelerator.print(
        f"wrote     {output}: {data.num_images:,} rows of {', '.join(seen)}\n"
        f"go on by  python recipes/evaluate_embeddings.py --embeddings {output}"
    )


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but embeddings (with their evaluation), and that only if asked to."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    own = {ABOUT_FILE, DATA_FOLDER, EVALUATION_FOLDER}
    other = [path for path in output.iterdir() if path.name not in own] if output.is_dir() else [output]
    if other:
        raise FileExistsError(f"{output} is not replaced: {other[0]} is no embeddings. Choose another --output_dir.")
    if not overwrite:
        raise FileExistsError(
            f"{output} holds embeddings. Choose another --output_dir, or replace them, and their evaluation if there "
            "is one, with --overwrite_output_dir."
        )


def load_model(name: str) -> Any:
    """Load a classifier or an encoder, whichever was saved."""
    config = AutoConfig.from_pretrained(name)
    if not isinstance(config, SphereVisionConfig):
        raise ValueError(f"{name} is a model of type {config.model_type}; this recipe embeds images by sphere_vision.")
    built = (config.architectures or ["model of an unknown class"])[0]
    if built not in MODELS:
        raise ValueError(f"{name} is a {built}; this recipe takes a {' or a '.join(MODELS)}.")
    return MODELS[built].from_pretrained(name)


def load_data(args: ExtractionArguments, config: SphereVisionConfig, accelerator: Accelerator) -> ImageSplit:
    """Load the split as the model wants its images; the main process decodes first, the others read its cache."""
    if args.train_split is not None and args.train_classes is None:
        raise ValueError(f"--train_split {args.train_split} has no use without --train_classes; leave it out.")
    with accelerator.main_process_first():
        return load_image_split(
            args.dataset_name,
            args.split,
            **preparation(args, config),
            config_name=args.dataset_config_name,
            image_column=args.image_column_name,
            label_column=args.label_column_name,
            train_classes=args.train_classes,
            train_split=args.train_split or "train",
            max_samples=args.max_samples,
            skip_corrupt=args.skip_corrupt_images,
            cache_dir=args.cache_dir,
            num_workers=args.num_workers,
            batch_size=args.batch_size,
            device=accelerator.device,
            seed=args.seed,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            progress=accelerator.is_main_process and not args.disable_tqdm,
        )


def preparation(args: ExtractionArguments, config: SphereVisionConfig) -> dict[str, Any]:
    """Find out how the model wants its images: from its image processor, or from its configuration and the arguments.

    The configuration knows the size but not the statistics, and guessed ones would make other embeddings.
    """
    given = [name for name in ("image_mean", "image_std") if getattr(args, name) is not None]
    try:
        processor = SphereVisionImageProcessor.from_pretrained(args.model_name_or_path)
    except OSError as error:
        if len(given) < 2:
            raise ValueError(
                f"{args.model_name_or_path} has no image processor that says how images are normalised. Give "
                "--image_mean and --image_std of its training images."
            ) from error
        size, channels = list(config.input_size), config.num_channels
        return {"image_size": size, "num_channels": channels, "mean": args.image_mean, "std": args.image_std}
    if given:
        raise ValueError(f"{args.model_name_or_path} has an image processor that says --{given[0]}; leave it out.")
    return {
        "image_size": [processor.size["height"], processor.size["width"]],
        "num_channels": processor.num_channels,
        "mean": processor.image_mean,
        "std": processor.image_std,
    }


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
        **distance,
    }


def class_names_of(model: Any) -> list[str]:
    """Names of the classes that a model predicts, by index; none without a head."""
    labels = model.config.id2label
    return [labels[index] for index in range(len(labels))] if hasattr(model, "head") else []


def summarize(about: dict[str, Any], data: ImageSplit, model: Any) -> str:
    """Sum up model and data in two lines."""
    head = f"{about['head']} head, {len(class_names_of(model))} classes" if about["head"] else "no head"
    labels = f"{len(data.class_names)} classes" if data.class_names else "no labels"
    return (
        f"model     {about['model']}: {about['backbone']}, {head}, on {model.device}\n"
        f"data      {about['dataset']}, split {about['split']}: {data.num_images:,} images, {labels}"
    )


@torch.inference_mode()
def embed(model: Any, data: ImageSplit, accelerator: Accelerator) -> Iterator[Columns]:
    """Yield the columns of each batch of this process."""
    rows = data.batches.epoch_rows().split(data.batches.batch_size)
    for batch, index in zip(data.batches.epoch(), rows, strict=True):
        with accelerator.autocast():
            output = model(pixel_values=batch["pixel_values"])
        columns = {"embedding": output.embeddings.float().cpu()}
        if data.class_names:
            columns["label"] = batch["labels"].cpu()
        if "logits" in output:
            logits = output.logits.float().cpu()
            confidence, prediction = logits.softmax(-1).max(-1)
            columns |= {"prediction": prediction, "confidence": confidence, "logits": logits}
        if output.get("concentration") is not None:
            columns["concentration"] = output.concentration.float().cpu()
        check_finite(columns, index)
        yield {**columns, "index": index}


def check_finite(columns: Columns, index: Tensor) -> None:
    """Refuse what is not a number: it would spoil every measure later."""
    for name, values in columns.items():
        wrong = ~values.isfinite().reshape(len(index), -1).all(-1)
        if wrong.any():
            raise ValueError(
                f"{name} of image {int(index[wrong][0])} is not finite. Is the model a trained one? With "
                "--mixed_precision fp16 values may be too large: try bf16, or no."
            )


def in_order(own: Iterator[Columns], batches: ImageBatches) -> Iterator[Columns]:
    """Yield the rows of all processes in the order of the split, on each process, one batch of each at a time.

    Processes have every n-th image, so their batches of one number make a piece of the split without gaps.
    """
    longest = math.ceil(batches.num_examples / batches.num_processes)
    for _ in range(math.ceil(longest / batches.batch_size)):
        parts = [part for part in gather_object([next(own, None)]) if part is not None]
        order = torch.cat([part["index"] for part in parts]).argsort()
        yield {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


if __name__ == "__main__":
    run_recipe(main)
