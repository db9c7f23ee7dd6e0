"""A language model with its tokenizer, of any text architecture of transformers."""

import os
from typing import Any, Literal, Self

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.modules import eval_mode

Kind = Literal["masked", "causal", "embedding"]


class LanguageModel:
    """A model and its tokenizer, usually loaded by `LanguageModel.load`.

    Args:
        model: Masked or causal language model of transformers, or a bare text encoder or decoder.
        tokenizer: Its tokenizer.
        name: Name of the model in messages; by default its name or folder, or its class.

    Attributes:
        kind: `masked` models predict masked tokens, `causal` models the next token, `embedding` models have hidden
            states only.

    Raises:
        ValueError: If the kind of the model is not supported, or the tokenizer lacks a vocabulary.

    Example:
        >>> language_model = LanguageModel(model, tokenizer)  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.name_or_path or type(model).__name__
        self.kind = _find_kind(type(model).__name__, model.config, self.name)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers builds one if it finds no files
            raise ValueError(f"the tokenizer of {self.name} has no vocabulary. Pass one: load(model, tokenizer).")
        if self.kind == "causal" and getattr(model.config, "is_decoder", True) is False:
            raise ValueError(
                f"{self.name} is a {type(model).__name__}, whose output for a token depends on the tokens after it. "
                "Load it with config.is_decoder=True, or as a masked model (...ForMaskedLM)."
            )

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a model by name, or wrap a loaded one.

        Args:
            model: Hub id, folder, or a model of transformers. The `architectures` of the configuration determine its
                kind. A loaded model is not copied: `device` and `dtype` change the object itself.
            tokenizer: Tokenizer, or its Hub id or folder; by default of the model.
            device: Device of the model. By default an accelerator if there is one; a loaded model stays on its device.
            dtype: Type of the weights. By default from a loaded model, else bfloat16 on a GPU that supports it, and
                float32 elsewhere.

        Raises:
            ValueError: If the kind of the model is not supported (image, sequence-to-sequence, classifier, ...), its
                head was not saved, or there is no valid tokenizer.
            OSError: If there is no such model, or it has no tokenizer and none is given.
        """
        name = model.name_or_path if isinstance(model, PreTrainedModel) else os.fspath(model)
        if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
            tokenizer = load_pretrained(transformers.AutoTokenizer, tokenizer or name)
        if not isinstance(model, PreTrainedModel):
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            target = torch.device(device or accelerator or "cpu")
            if dtype is None:
                halves = target.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
                dtype = torch.bfloat16 if halves else torch.float32
            return cls(_load_model(name, dtype).to(target), tokenizer, name)
        return cls(model.to(device=device, dtype=dtype), tokenizer)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens per batch if no batch size is set; larger batches are not faster."""
        return 2048 if self.device.type == "cpu" else 16384

    @torch.inference_mode()
    def forward(self, ids: Tensor, *, base: bool = False) -> Any:
        """Run the model in evaluation mode, or only its base without the head, on sequences (B, L) without padding."""
        more = {"use_cache": False} if self.kind == "causal" else {}
        with eval_mode(self.model):
            return (self.model.base_model if base else self.model)(input_ids=ids.to(self.device), **more)

    def logits(self, ids: Tensor) -> Tensor:
        """Run the model and its head, (B, L) to (B, L, V)."""
        output = self.forward(ids)
        return output.prediction_logits if "prediction_logits" in output else output.logits  # of pretraining


def _find_kind(class_name: str, config: PreTrainedConfig, name: str) -> Kind:
    """Determine the kind of a text model from the end of its class name."""
    if not config.is_encoder_decoder and getattr(config.get_text_config(), "vocab_size", None) is not None:
        if class_name.endswith(("ForMaskedLM", "ForPreTraining")):
            return "masked"
        if class_name.endswith(("ForCausalLM", "LMHeadModel")):
            return "causal"
        if class_name.endswith("Model") and not class_name.endswith(("HeadModel", "HeadsModel")):  # for other tasks
            return "embedding"
    allowed = "masked (...ForMaskedLM) and causal (...ForCausalLM, ...LMHeadModel) models, and bare ones (...Model)"
    raise ValueError(f"{name} is a {class_name}; allowed are {allowed} of texts.")


def _load_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with the head that it was saved with; without `architectures`, it is an encoder or decoder."""
    config = load_pretrained(transformers.AutoConfig, name)
    class_name = (config.architectures or [type(config).__name__.replace("Config", "Model")])[0]
    kind = _find_kind(class_name, config, name)
    loaders = {"masked": transformers.AutoModelForMaskedLM, "causal": transformers.AutoModelForCausalLM}
    # Encoders of sequence-to-sequence models have no Auto class.
    loader = loaders.get(kind) or getattr(transformers, class_name, transformers.AutoModel)
    model, report = load_pretrained(loader, name, dtype=dtype, output_loading_info=True)
    if missing := sorted(key for key in report["missing_keys"] if "pooler" not in key):  # no score uses the pooler
        raise ValueError(
            f"{name} was saved without {', '.join(missing[:3])}, so the head of its {type(model).__name__} would be "
            "random. Pass AutoModel.from_pretrained(name)."
        )
    return model
