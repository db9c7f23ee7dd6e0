"""A language model with its tokenizer, of any text architecture of transformers."""

import contextlib
import json
import math
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal, Self

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.modules import digest_weights, eval_mode

Kind = Literal["masked", "causal", "embedding"]

KIND_OF_ENDING: dict[str, Kind | None] = {
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "HeadModel": None,  # heads for other tasks, as in GPT2DoubleHeadsModel
    "HeadsModel": None,
    "Model": "embedding",
}
"""Kind of a model by the end of its class name; the first match is used."""

ALLOWED = (
    "allowed are masked language models (...ForMaskedLM), causal language models (...ForCausalLM, ...LMHeadModel) "
    "and bare text encoders or decoders (...Model)"
)

PASS_TOKENIZER = "Pass one: LanguageModel.load(model, tokenizer)."

_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
"""One lock per model, not an attribute of the model, which could then not be copied."""

VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Entries of a configuration that do not affect scores; the dtype is read from the weights."""


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
        ValueError: If the kind of the model is not supported, or the tokenizer lacks a vocabulary or, for a masked
            model, a mask token.

    Example:
        >>> language_model = LanguageModel(model, tokenizer)  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.name_or_path or type(model).__name__
        self.kind = _find_kind(type(model).__name__, model.config, self.name)
        self.checked_words: set[str] = set()  # by `warn_unknown_words`
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            # transformers builds an empty tokenizer if it finds no files
            raise ValueError(f"the tokenizer of {self.name} has no vocabulary. {PASS_TOKENIZER}")
        if self.kind == "masked" and tokenizer.mask_token_id is None:
            problem = f"{self.name} is masked, but its tokenizer {type(tokenizer).__name__} has no mask token"
            raise ValueError(f"{problem}. Set tokenizer.mask_token to the one it was trained with.")
        if self.kind == "causal" and self._sees_next_tokens():
            what = f"{self.name} is a {type(model).__name__}, whose output for a token depends on the tokens after it"
            raise ValueError(f"{what}. Load it with config.is_decoder=True, or as a masked model (...ForMaskedLM).")

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

    def __repr__(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"LanguageModel({self.name!r}, kind={self.kind!r}, device={str(self.device)!r}, dtype={dtype!r})"

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def fingerprint(self) -> str:
        """Digest of weights, dtype, configuration and tokenizer: 64 hexadecimal digits.

        It is computed at every access, since training changes the weights, and takes about a second per gigabyte.
        """
        config = {key: value for key, value in self.model.config.to_dict().items() if key not in VOLATILE}
        tokenizer = self.tokenizer
        tokens: Any = tokenizer.get_vocab()
        if tokenizer.is_fast:  # every call sets padding and truncation
            tokens = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        return digest_weights(self.model, [type(self.model).__name__, config, tokens, tokenizer.special_tokens_map])

    @property
    def vocabulary_size(self) -> int:
        """Number of token embeddings of the model."""
        return self.model.get_input_embeddings().num_embeddings

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens per batch if no batch size is set; larger batches are not faster."""
        return 2048 if self.device.type == "cpu" else 16384

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch off dropout and gradients; every module returns to its mode afterwards.

        Other threads wait, so that none runs the model in the wrong mode.
        """
        with _LOCKS.setdefault(self.model, threading.RLock()), eval_mode(self.model), torch.inference_mode():
            yield

    def forward(self, ids: Tensor, *, base: bool = False) -> Any:
        """Run the model, or only its base without the head, on sequences (B, L) without padding."""
        model = self.model.base_model if base else self.model
        more = {"use_cache": False} if self.kind == "causal" else {}
        return model(input_ids=ids.to(self.device), **more)

    def logits(self, ids: Tensor) -> Tensor:
        """Run the model and its head, (B, L) to (B, L, V)."""
        output = self.forward(ids)
        logits = getattr(output, "prediction_logits", None)  # the output of models for pretraining
        return output.logits if logits is None else logits

    def _sees_next_tokens(self) -> bool:
        """Whether the logits of two tokens depend on a third one, even slightly, as in an untrained model."""
        one, other = [token for token in range(3) if token != self.model.config.get_text_config().pad_token_id][:2]
        ids = torch.tensor([[one, other, one], [one, other, other]])
        with self.evaluating():
            first, second = self.logits(ids)[:, :2].float()
        tolerance = min(1e-2, math.sqrt(torch.finfo(self.model.dtype).eps))
        return not torch.allclose(first, second, rtol=0, atol=tolerance * float(first.std()))


def _find_kind(class_name: str, config: PreTrainedConfig, name: str) -> Kind:
    """Determine the kind of a text model from its class name."""
    kind = next((kind for ending, kind in KIND_OF_ENDING.items() if class_name.endswith(ending)), None)
    if kind is None or config.is_encoder_decoder or getattr(config.get_text_config(), "vocab_size", None) is None:
        raise ValueError(f"{name} is a {class_name}; {ALLOWED}.")
    return kind


def _load_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with the head that it was saved with; without `architectures`, it is an encoder or decoder."""
    config = load_pretrained(transformers.AutoConfig, name)
    class_name = (config.architectures or [type(config).__name__.replace("Config", "Model")])[0]
    kind = _find_kind(class_name, config, name)
    loaders = {"masked": transformers.AutoModelForMaskedLM, "causal": transformers.AutoModelForCausalLM}
    # Encoders of sequence-to-sequence models have no Auto class.
    loader = loaders.get(kind) or getattr(transformers, class_name, transformers.AutoModel)
    model, report = load_pretrained(loader, name, dtype=dtype, output_loading_info=True)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)  # no score uses the pooler
    if missing:
        keys = ", ".join(missing[:3])
        advice = f"so the head of its {type(model).__name__} would be random. Pass AutoModel.from_pretrained(name)."
        raise ValueError(f"{name} was saved without {keys}, {advice}")
    return model
