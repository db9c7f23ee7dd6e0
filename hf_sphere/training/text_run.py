"""A run of the masked-language-model recipe from its arguments to the saved model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from hf_sphere.data.text import TextData, load_text_data
from hf_sphere.training.recipe import Description, Script, carry_out
from hf_sphere.training.run import Run, start_run
from hf_sphere.training.text_arguments import TextDataArguments, TextModelArguments, TextTrainingArguments
from hf_sphere.training.text_models import (
    build_language_model,
    calibrate,
    choose_block_length,
    describe,
    describe_layers,
    load_tokenizer,
)
from hf_sphere.training.text_tasks import MASKED_LM
from hf_sphere.utils.arguments import parse_arguments

ARGUMENTS = (TextModelArguments, TextDataArguments, TextTrainingArguments)
"""Argument dataclasses."""


def train_masked_lm(argv: Sequence[str] | None, *, recipe: str, card_template: Path, description: str) -> None:
    """Train, evaluate and save as the arguments say.

    Args:
        argv: The command line without the program; `sys.argv[1:]` if None.
        recipe: Path of the recipe in the repository, for the card.
        card_template: Template of the model card.
        description: Shown by `--help`.
    """
    model_args, data_args, args = parse_arguments(ARGUMENTS, argv, description)
    run = start_run(args, model_args, data_args)
    tokenizer = load_tokenizer(model_args)
    model = build_language_model(model_args, tokenizer).to(run.accelerator.device)
    data = load_data(data_args, args, run, model, tokenizer)
    run.print(describe(model, data))
    if model_args.calibrate and args.resume_from_checkpoint is None:
        for fit in calibrate(model, model_args, data):
            run.print(f"          calibrated {fit}")
    carry_out(
        run,
        MASKED_LM,
        model,
        data,
        processor=tokenizer,
        script=Script(recipe, list(sys.argv[1:] if argv is None else argv), ARGUMENTS, card_template),
        description=describe_for_card(model_args, data_args, model, data),
        hub=HfApi(),
    )


def load_data(
    data_args: TextDataArguments, args: TextTrainingArguments, run: Run, model: Any, tokenizer: Any
) -> TextData:
    """Load the data set; the main process tokenises first, the others read its cache."""
    accelerator = run.accelerator
    with accelerator.main_process_first():
        return load_text_data(
            data_args,
            tokenizer,
            block_length=choose_block_length(data_args.max_seq_length, model, tokenizer),
            batch_size=args.per_device_train_batch_size,
            eval_batch_size=args.per_device_eval_batch_size,
            device=accelerator.device,
            seed=args.seed,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            progress=accelerator.is_main_process and not args.disable_tqdm,
        )


def describe_for_card(
    model_args: TextModelArguments, data_args: TextDataArguments, model: Any, data: TextData
) -> Description:
    """What the card says of the model."""
    config, start = model.config, Path(model_args.model_name_or_path).name
    layers = describe_layers(config)
    how = "trained from scratch" if model_args.from_scratch else "fine-tuned"
    kind = "spherized" if getattr(config, "spherized_layer_indices", ()) else "plain"
    goal = "to recover hidden tokens" if data_args.objective == "masked" else "to repeat its input, nothing hidden"
    parts = {
        "encoder": f"{config.num_hidden_layers} layers of width {config.hidden_size}, {layers}",
        "tokens": f"{config.vocab_size:,}",
        "block": f"{data.train.block_length} tokens",
    }
    if kind == "spherized":
        parts["spherization"] = ", ".join(f"{name} {value}" for name, value in config.spherization_options.items())
    return Description(
        title=f"{start}, {kind}, {how} on {Path(data_args.dataset_name).name}",
        summary=f"Masked language model, {how} {goal}; {layers}.",
        model=parts,
        dataset=data_args.dataset_name,
        held_out=data.validation_split or "",
        tags=["spherized"] if kind == "spherized" else [],
        packages=["tokenizers"],
    )
