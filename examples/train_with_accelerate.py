"""A training script of one's own, from the data to the model card: a spherized classifier, trained with Accelerate.

accelerate launch examples/train_with_accelerate.py --image_size 28 --learning_rate 2e-3

The numbers are those of `hf-sphere train classification` with `--lr_scheduler_type linear`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import HfArgumentParser, get_scheduler

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.data import ImageBatches, ImageDataOptions, load_image_data
from hf_sphere.optim import build_optimizer


@dataclass
class Arguments:
    """What to train, besides the options of the data."""

    output_dir: str = "outputs/own-loop"
    backbone: str = "lenet5"
    optim: str = "adam"
    learning_rate: float = 1e-3
    batch_size: int = 32
    num_train_epochs: int = 3
    seed: int = 0


@torch.inference_mode()
def evaluate(model: torch.nn.Module, batches: ImageBatches, accelerator: Accelerator) -> float:
    """Return the accuracy on a split, over all processes."""
    model.eval()
    correct: Tensor = sum((model(**batch).logits.argmax(-1) == batch["labels"]).sum() for batch in batches)
    return accelerator.reduce(correct, "sum").item() / batches.num_examples


def main() -> None:
    """Train, evaluate, save, and describe the model."""
    args, data_args = HfArgumentParser([Arguments, ImageDataOptions]).parse_args_into_dataclasses()
    accelerator = Accelerator()
    set_seed(args.seed)
    options = {"batch_size": args.batch_size, "device": accelerator.device, "seed": args.seed}
    options |= {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
    with accelerator.main_process_first():
        data = load_image_data(data_args, **options)
    size = {"num_channels": data.shape.channels, "image_size": [data.shape.height, data.shape.width]}
    labels = dict(enumerate(data.class_names))
    config = SphereVisionConfig(backbone=args.backbone, head="spherized", id2label=labels, **size)
    model = SphereVisionForImageClassification(config)
    model = model.to(accelerator.device, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, args.optim, next(iter(data.train)), lr=args.learning_rate)
    schedule = get_scheduler("linear", optimizer, 0, num_training_steps=len(data.train) * args.num_train_epochs)
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in data.train.epoch(epoch):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, data.evaluation, accelerator)
        accelerator.print(f"epoch {epoch + 1}  accuracy {100 * accuracy:.2f} %")
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
        SphereVisionImageProcessor.from_data(data).save_pretrained(args.output_dir)
        card = ModelCardData(library_name="transformers", tags=["hf_sphere"], pipeline_tag="image-classification")
        text = f"# {args.backbone}, spherized\n\nAccuracy {100 * accuracy:.2f} % on {data.eval_split}.\n"
        ModelCard(f"---\n{card}\n---\n{text}").save(Path(args.output_dir, "README.md"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
