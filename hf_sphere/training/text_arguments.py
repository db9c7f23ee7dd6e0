"""Arguments of the recipes for text."""

from dataclasses import dataclass, field
from typing import Literal

from hf_sphere.data.options import TextDataOptions
from hf_sphere.training.arguments import TrainingArguments, described
from hf_sphere.utils.arguments import Options


@dataclass
class TextModelArguments:
    """Which language model."""

    model_name_or_path: str = field(
        metadata=described("Start from this masked language model, Hub id or folder: bert, roberta or a spherized one.")
    )
    from_scratch: bool = field(
        default=False,
        metadata=described("Take its configuration and tokenizer only; the initial weights follow from the seed."),
    )
    tokenizer_name: str | None = field(
        default=None, metadata=described("Tokenizer, Hub id or folder; that of the model if not set.")
    )
    spherized: bool = field(default=False, metadata=described("Spherize a plain bert or roberta model."))
    spherized_layers: list[int] | None = field(
        default=None,
        metadata=described("Layers to spherize, from 0, or from the end if negative; the last one, -1, if not set."),
    )
    spherization_kwargs: Options = field(
        default_factory=Options,
        metadata=described(
            "Options of the spherization, a mapping: scaling, radius, delta, learn_scaling, learn_radius."
        ),
    )
    calibrate: bool = field(
        default=False,
        metadata=described(
            "Fit the spherized layers' new output maps to the plain model on training text, at the start."
        ),
    )
    calibration_tokens: int | None = field(
        default=None, metadata=described("Tokens of training text to fit them on; 16,384 if not set.")
    )

    def __post_init__(self) -> None:
        if not self.spherized:
            given = [name for name in ("spherized_layers", "spherization_kwargs", "calibrate") if getattr(self, name)]
            if given:
                raise ValueError(f"{', '.join(given)} is for spherized models; add --spherized, or leave it out.")
        if self.calibrate and self.from_scratch:
            raise ValueError(
                "calibrate fits spherized layers to those of a trained model, and from_scratch trains a new one; leave "
                "one of them out."
            )
        if self.calibration_tokens is not None and not self.calibrate:
            raise ValueError("calibration_tokens has a meaning only with --calibrate; add that, or leave it out.")
        if self.calibration_tokens is not None and self.calibration_tokens < 1:
            raise ValueError(f"calibration_tokens must be at least 1; got {self.calibration_tokens}.")


TextDataArguments = TextDataOptions


@dataclass
class TextTrainingArguments(TrainingArguments):
    """How to train a language model: as any model, but by default as transformers' `TrainingArguments` does."""

    num_train_epochs: int = field(default=3, metadata=described("Epochs to train."))
    per_device_train_batch_size: int = field(default=8, metadata=described("Blocks a training batch and process."))
    per_device_eval_batch_size: int = field(default=8, metadata=described("Blocks an evaluation batch and process."))
    optimizer: Literal["adam", "adamw", "sgd", "adam_s", "adam_srt", "adam_g", "sgd_mrt"] = field(
        default="adamw",
        metadata=described("Optimiser; the last four act on the sphere, and find the scale-invariant weights."),
    )
    learning_rate: float = field(default=5e-5, metadata=described("Peak learning rate."))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not for language models; leave it out.")
        if self.loss_reduction == "sum":
            raise ValueError("loss_reduction sum is not for language models, whose loss is a mean; leave it out.")
