"""From arguments to a masked language model and its tokenizer: loaded or begun anew, plain or spherized."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging as hf_logging

from hf_sphere import models
from hf_sphere.data.text import TextData
from hf_sphere.models.sphere_text.encoders import TEXT_ENCODERS
from hf_sphere.models.sphere_text.fit_spherization import SpherizationFit, calibrate_spherization
from hf_sphere.training.text_arguments import TextModelArguments
from hf_sphere.utils.input_length import longest_input

SPHERIZED = {encoder.model_type: f"Sphere{encoder.prefix}" for encoder in TEXT_ENCODERS}
"""What the spherized classes of a kind of model are called, by its `model_type`."""

SETTINGS = {
    "scaling": "spherization_scaling",
    "radius": "spherization_radius",
    "delta": "spherization_delta",
    "learn_scaling": "learn_spherization_scaling",
    "learn_radius": "learn_spherization_radius",
}
"""Options of the spherization, and the settings of a configuration that they are."""

CALIBRATION_TOKENS = 16_384
"""Tokens to calibrate on where nothing is asked for."""

LONGEST_BLOCK = 512
"""Tokens a block where the model would take more and nothing is asked for."""


def load_tokenizer(args: TextModelArguments) -> Any:
    """Load the tokenizer that was named, or the model's.

    Raises:
        ValueError: If it has no mask token.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or args.model_name_or_path)
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {args.tokenizer_name or args.model_name_or_path} has no mask token, which a masked "
            "language model needs; name another one with --tokenizer_name."
        )
    return tokenizer


def build_language_model(args: TextModelArguments, tokenizer: Any) -> Any:
    """Load a masked language model, or begin one anew from its configuration, and spherize it if told.

    Raises:
        ValueError: If the checkpoint is no masked language model, cannot be spherized as told, or has fewer tokens than
            the tokenizer.
    """
    name = args.model_name_or_path
    config = AutoConfig.from_pretrained(name)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"{name} is a {config.model_type} model, of which there is no masked language model; choose for instance a "
            "bert or roberta model."
        )
    model_class: Any = AutoModelForMaskedLM
    if args.spherized:
        config, model_class = _spherized(args, config)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and {name} only {config.vocab_size}; name the tokenizer that "
            "belongs to it with --tokenizer_name."
        )
    if not args.from_scratch:
        # Trained in float32 whatever it was saved in; --mixed_precision is for speed.
        return model_class.from_pretrained(name, config=config, dtype=torch.float32)
    return MODEL_FOR_MASKED_LM_MAPPING[type(config)](config)


def calibrate(model: Any, args: TextModelArguments, data: TextData) -> list[SpherizationFit]:
    """Fit the spherized layers' new output maps to the plain model they come from, on inputs as in training."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # that the plain encoder leaves its head behind is no news
    try:
        reference = AutoModel.from_pretrained(args.model_name_or_path, dtype=torch.float32).to(model.device)
    finally:
        hf_logging.set_verbosity(verbosity)
    tokens = CALIBRATION_TOKENS if args.calibration_tokens is None else args.calibration_tokens
    return calibrate_spherization(model, reference, data.train.epoch(), max_tokens=tokens)


def choose_block_length(asked: int | None, model: Any, tokenizer: Any) -> int:
    """Take the length asked for, and where none is, what the model takes."""
    longest = longest_input(model, tokenizer)
    if asked is not None and longest is not None and asked > longest:
        raise ValueError(
            f"max_seq_length {asked} is more than the {longest} tokens that the model takes; give at most that."
        )
    return min(longest or LONGEST_BLOCK, LONGEST_BLOCK) if asked is None else asked


def describe(model: Any, data: TextData) -> str:
    """Sum up data and model in a few lines."""
    parameters = sum(p.numel() for p in model.parameters())
    held_out = f", {data.validation.num_examples:,} for validation" if data.validation is not None else ""
    return (
        f"data      {data.train.num_examples:,} training blocks of {data.train.block_length} tokens{held_out}, "
        f"{data.evaluation.num_examples:,} for evaluation\n"
        f"model     {type(model).__name__}, {model.config.num_hidden_layers} layers of width "
        f"{model.config.hidden_size}, {describe_layers(model.config)}\n"
        f"          {parameters:,} parameters on {model.device}"
    )


def describe_layers(config: Any) -> str:
    """Say which layers are spherized."""
    layers = getattr(config, "spherized_layer_indices", ())
    return f"spherized: {', '.join(f'layer {index}' for index in layers)}" if layers else "no layer spherized"


def _spherized(args: TextModelArguments, config: Any) -> tuple[Any, Any]:
    """Configuration and class of the spherized model that goes with a plain one."""
    name = args.model_name_or_path
    if config.model_type not in SPHERIZED:
        advice = (
            "it is spherized already; leave --spherized out"
            if config.model_type.startswith("sphere_")
            else (f"what can be spherized is: {', '.join(SPHERIZED)}")
        )
        raise ValueError(f"{name} is a {config.model_type} model: {advice}.")
    unknown = [key for key in args.spherization_kwargs if key not in SETTINGS]
    if unknown:
        raise ValueError(f"no option {unknown[0]!r} in spherization_kwargs; the options are: {', '.join(SETTINGS)}.")
    settings = {SETTINGS[key]: value for key, value in args.spherization_kwargs.items()}
    prefix = SPHERIZED[config.model_type]
    spherized = getattr(models, f"{prefix}Config").from_pretrained(
        name, spherized_layers=args.spherized_layers, **settings
    )
    return spherized, getattr(models, f"{prefix}ForMaskedLM")
