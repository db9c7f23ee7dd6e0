"""Masked language modeling, with plain or spherized encoders."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere import data, models
from hf_sphere.data.options import TextDataOptions
from hf_sphere.models.sphere_encoder import ENCODERS
from hf_sphere.training.arguments import OPTIMIZER_HELP, RecipeArguments, optimizer_choices
from hf_sphere.training.tasks import Description, Prepared, Task
from hf_sphere.utils.arguments import Arguments, Options, argument
from hf_sphere.utils.checks import check_choice, check_names
from hf_sphere.utils.loading import load_model, load_pretrained

if TYPE_CHECKING:
    from hf_sphere.data import TextData
    from hf_sphere.models import SpherizationFit
    from hf_sphere.training.run import Run

SPHERIZED = {name: f"Sphere{prefix}" for name, prefix in ENCODERS.items() if name != "vit"}
"""Prefix of the spherized classes by the `model_type` of the plain model."""

SETTINGS = {name: f"spherization_{name}" for name in ("scaling", "radius", "delta")}
SETTINGS |= {name: name.replace("_", "_spherization_") for name in ("learn_scaling", "learn_radius")}
"""Names of configuration settings by option of the spherization."""

FIT_TOKENS = 16_384
LONGEST_BLOCK = 512


@dataclass
class TextModelArguments(Arguments):
    """Language model."""

    model_name_or_path: str = argument(help="Masked language model, plain or spherized: Hub id or folder.")
    from_scratch: bool = argument(False, "Use only its configuration and tokenizer; the weights are random.")
    tokenizer_name: str | None = argument(None, "Tokenizer, Hub id or folder; by default of the model.")
    spherized: bool = argument(False, f"Spherize a plain model: {', '.join(SPHERIZED)}.")
    spherized_layers: list[int] | None = argument(
        None, "Layers to spherize, from 0, or from the end if negative; -1 if not set.", only_with=["spherized"]
    )
    spherization_kwargs: Options = argument(
        Options,
        "Options of the spherization, a mapping: scaling, radius, delta, learn_scaling, learn_radius.",
        only_with=["spherized"],
    )
    fit_spherization: bool = argument(
        False,
        f"Before training, fit the spherized layers' new output maps to the plain model on {FIT_TOKENS:,} tokens.",
        only_with=["spherized"],
        not_with=["from_scratch"],
    )


@dataclass
class TextRecipeArguments(RecipeArguments):
    """Training, with the defaults of transformers' `TrainingArguments`."""

    num_train_epochs: int = argument(3, "Epochs to train; 0 only evaluates a saved model.", ge=0)
    per_device_train_batch_size: int = argument(8, "Blocks per training batch and process.", ge=1)
    per_device_eval_batch_size: int = argument(8, "Blocks per evaluation batch and process.", ge=1)
    optim: str = argument("adamw", OPTIMIZER_HELP, choices=optimizer_choices)
    learning_rate: float = argument(5e-5, "Peak learning rate.", ge=0)


def prepare(
    run: "Run", model_args: TextModelArguments, data_args: TextDataOptions, args: TextRecipeArguments
) -> Prepared:
    """Load tokenizer and data, build the model, and fit its spherized layers if requested."""
    from transformers import AutoTokenizer

    from hf_sphere.training.evaluation import measure_tokens, perplexity
    from hf_sphere.utils.modules import longest_input

    tokenizer = load_pretrained(AutoTokenizer, model_args.tokenizer_name or model_args.model_name_or_path)
    accelerator = run.accelerator
    model = build_language_model(model_args).to(accelerator.device)
    longest = longest_input(model, tokenizer) or sys.maxsize
    length = data_args.max_seq_length or min(longest, LONGEST_BLOCK)
    if length > longest:
        raise ValueError(f"max_seq_length {length} exceeds the maximum of the model, {longest} tokens.")
    with accelerator.main_process_first():
        text = data.load_text_data(data_args, tokenizer, block_length=length, **run.loading)
    config = model.config
    indices = getattr(config, "spherized_layer_indices", ())
    layers = f"spherized: {', '.join(f'layer {index}' for index in indices)}" if indices else "no layer spherized"
    size = f"{config.num_hidden_layers} layers of width {config.hidden_size}, {layers}"
    held_out = f", {text.validation.num_examples:,} for validation" if text.validation is not None else ""
    accelerator.print(
        f"data      {text.train.num_examples:,} training blocks of {text.train.block_length} tokens{held_out}, "
        f"{text.evaluation.num_examples:,} for evaluation\n"
        f"model     {type(model).__name__}, {size}\n"
        f"          {sum(p.numel() for p in model.parameters()):,} parameters on {model.device}"
    )
    if model_args.fit_spherization and args.resume_from_checkpoint is None:
        for fit in fit_to_plain_model(model, model_args, text):
            accelerator.print(f"          fitted {fit}")
    how = "trained from scratch" if model_args.from_scratch else "fine-tuned"
    goal = "predict masked tokens" if data_args.objective == "masked" else "reproduce its input, with nothing masked"
    properties = {"encoder": size, "tokens": f"{config.vocab_size:,}", "block": f"{text.train.block_length} tokens"}
    if indices:
        properties["spherization"] = ", ".join(f"{k} {v}" for k, v in config.spherization_options.items())
    kind, name = "spherized" if indices else "plain", Path(model_args.model_name_or_path).name
    description = Description(
        title=f"{name}, {kind}, {how} on {Path(data_args.dataset_name).name}",
        summary=f"Masked language model, {how} to {goal}; {layers}.",
        model=properties,
        dataset=data_args.dataset_name,
        held_out=text.validation_split or "",
        tags=["spherized"] if indices else [],
        packages=["tokenizers"],
    )
    return Prepared(model, text, tokenizer, description, measure_tokens, perplexity)


def build_language_model(args: TextModelArguments) -> Any:
    """Load a masked language model or initialize one from its configuration, and spherize it if requested."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    name, model_class = args.model_name_or_path, AutoModelForMaskedLM
    config: Any = load_pretrained(AutoConfig, name)
    if args.spherized:
        check_names("spherization_kwargs", args.spherization_kwargs, SETTINGS)
        settings = {SETTINGS[key]: value for key, value in args.spherization_kwargs.items()}
        prefix = SPHERIZED[check_choice("the model type to spherize", config.model_type, SPHERIZED)]
        model_class = getattr(models, f"{prefix}ForMaskedLM")
        config_class = getattr(models, f"{prefix}Config")
        config = load_pretrained(config_class, name, spherized_layers=args.spherized_layers, **settings)
    if args.from_scratch:
        return MODEL_FOR_MASKED_LM_MAPPING[type(config)](config)
    # Trained in float32 whatever the saved dtype; --bf16 is for speed.
    return load_model(model_class, name, config=config, dtype=torch.float32)


def fit_to_plain_model(model: Any, args: TextModelArguments, text: "TextData") -> "list[SpherizationFit]":
    """Fit the spherized layers' new output maps to the plain model, on training inputs."""
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the head of the checkpoint is expected to be unused
    reference = load_model(AutoModel, args.model_name_or_path, dtype=torch.float32).to(model.device)
    logging.set_verbosity(verbosity)
    return models.fit_spherization(model, reference, text.train.epoch(), max_tokens=FIT_TOKENS)


TASK = Task(
    summary="Train a masked language model, plain or spherized.",
    example="hf-sphere train masked-lm --model_name_or_path bert-base-uncased --spherized \\\n"
    "    --dataset_name lines.txt --output_dir outputs/bert",
    arguments=(TextModelArguments, TextDataOptions, TextRecipeArguments),
    prepare=prepare,
    metric="loss",
    headline=("perplexity", "accuracy"),
    pipeline_tag="fill-mask",
    numerics=2,
    unused=("label_smoothing_factor", "loss_reduction=sum", "layer_decay"),
)
