"""A language model with its tokenizer, of any architecture of transformers that reads plain text."""

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal, Self

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_sphere.analogies.fingerprint import fingerprint_model, read_state
from hf_sphere.utils.input_length import longest_input

Kind = Literal["masked", "causal", "embedding"]

KIND_OF_ENDING: dict[str, Kind | None] = {
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "HeadModel": None,  # heads for other work, as in GPT2DoubleHeadsModel
    "HeadsModel": None,
    "Model": "embedding",
}
"""What the end of a class name says of a model; the first that fits counts."""

ALLOWED = (
    "allowed are text models for masked tokens (...ForMaskedLM), for the next token (...ForCausalLM, ...LMHeadModel) "
    "and bare encoders or decoders (...Model)"
)


_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
"""Of each model that was ever run: kept here, as a model that has one itself could not be copied."""


class LanguageModel:
    """A model and its tokenizer, loaded once and used for every score.

    `LanguageModel.load` makes one.

    Args:
        model: Model of transformers: for masked tokens, for the next token, or a bare text encoder or decoder.
        tokenizer: Its tokenizer.
        name: What messages call the model.

    Attributes:
        kind: `masked`: answers which token is behind a mask. `causal`: answers which token comes next. `embedding`: has
            no answer, only hidden states.
        name: Name, folder or class of the model.
        model: The model.
        tokenizer: The tokenizer.
        max_length: Most tokens of an input, special ones included; None if nothing limits it.

    Raises:
        ValueError: If the model is of no such kind, or the tokenizer lacks a vocabulary or, for a masked model, a mask.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.name_or_path or type(model).__name__
        self.kind = _find_kind(type(model).__name__, model.config, self.name)
        self.max_length = longest_input(model, tokenizer)
        self._fingerprint: tuple[Any, str] | None = None
        if not isinstance(self._input_embeddings(), nn.Embedding):
            raise ValueError(f"{self.name} is a {type(model).__name__}, which reads no tokens; {ALLOWED}.")
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError(  # transformers makes an empty tokenizer where it finds no files
                f"the tokenizer of {self.name} has no vocabulary, which is what transformers makes of missing files. "
                "Give another: LanguageModel.load(model, tokenizer)."
            )
        if self.kind == "masked" and tokenizer.mask_token_id is None:
            raise ValueError(
                f"{self.name} is a model for masked tokens, but its tokenizer {type(tokenizer).__name__} has no mask "
                "token. Set tokenizer.mask_token to the one it was trained with, or give another tokenizer."
            )
        if self.kind == "masked" and not self._answers_with_tokens():
            raise ValueError(
                f"{self.name} is a {type(model).__name__}, which does not answer with tokens, as a discriminator does "
                f"not; {ALLOWED}."
            )
        if self.kind == "causal" and self._sees_what_follows():
            raise ValueError(
                f"{self.name} is a {type(model).__name__}, whose answer for a token depends on the tokens after it, so "
                "it gives no likelihood of a text. Load it with config.is_decoder=True if it was trained that way, "
                "or as a model for masked tokens (...ForMaskedLM)."
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
        """Load a model by name, or take one that is loaded.

        Args:
            model: Name on the Hub, folder, or a model of transformers. The configuration's `architectures` say which
                kind it is. A loaded model is used as it is: `device` and `dtype` change the object itself.
            tokenizer: Tokenizer, or its name or folder; that of the model's name or folder if None.
            device: Where the model runs. By default an accelerator if there is one, and where a loaded model is.
            dtype: Type of the weights. By default that of a loaded model, otherwise bfloat16 on a GPU that computes in
                it, and else float32.

        Raises:
            TypeError: If `model` is neither a name nor a model of transformers.
            ValueError: If the model is of another kind (image, sequence to sequence, classifier, ...), its head was not
                saved, or there is no tokenizer that fits.
            OSError: If there is no such model.
        """
        if isinstance(model, str | os.PathLike):
            name = os.fspath(model)
            target = _default_device() if device is None else torch.device(device)
            loaded = _load_model(name, _default_dtype(target) if dtype is None else dtype).to(target)
            return cls(loaded, _load_tokenizer(tokenizer, name, name), name)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a name, a folder or a model of transformers; got a {type(model).__name__}.")
        name = model.name_or_path or type(model).__name__
        tokenizer = _load_tokenizer(tokenizer, model.name_or_path, name)
        return cls(model.to(device=device, dtype=dtype), tokenizer, name)

    def __repr__(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"LanguageModel({self.name!r}, kind={self.kind!r}, device={str(self.device)!r}, dtype={dtype!r})"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def fingerprint(self) -> str:
        """Digest of weights, configuration, tokenizer and dtype: models that score alike have the same one.

        It is computed when it is first asked for, and anew after the weights, as by training, or the tokenizer changed.
        """
        state = read_state(self.model, self.tokenizer)
        if self._fingerprint is None or self._fingerprint[0] != state:
            self._fingerprint = state, fingerprint_model(self.model, self.tokenizer)
        return self._fingerprint[1]

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that the model knows."""
        return self._input_embeddings().num_embeddings

    @property
    def batch_tokens(self) -> int:
        """Tokens that a batch may have unless a number of rows is given: more would not be faster."""
        return 2048 if self.device.type == "cpu" else 16384

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch dropout off and gradients too; afterwards every module is in its mode again.

        Other threads wait meanwhile: they would find the model in a mode, or with hooks, that are not theirs.
        """
        with _LOCKS.setdefault(self.model, threading.RLock()):
            training = [module for module in self.model.modules() if module.training]
            self.model.eval()
            try:
                with torch.inference_mode():
                    yield
            finally:
                for module in training:
                    module.training = True

    def forward(self, ids: Tensor, *, base: bool = False) -> Any:
        """Run the model, or only what is below its head.

        Args:
            ids: (B, L), sequences without padding.
            base: Leave the head out.
        """
        model = self.model.base_model if base else self.model
        more = {"use_cache": False} if self.kind == "causal" else {}  # nothing is generated
        return model(input_ids=ids.to(self.device), **more)

    def logits(self, ids: Tensor) -> Tensor:
        """Run the model and its head, (B, L) to (B, L, V)."""
        output = self.forward(ids)
        logits = getattr(output, "prediction_logits", None)  # of models with a second head, for pretraining
        return output.logits if logits is None else logits

    def _input_embeddings(self) -> Any:
        try:
            return self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):  # models of images and sound have none
            return None

    def _answers_with_tokens(self) -> bool:
        """Whether there is a number for each token of the vocabulary, and not one in all."""
        with self.evaluating():
            return self.logits(torch.tensor([[0, 1, 0]])).ndim == 3

    def _sees_what_follows(self) -> bool:
        """Whether the answers for two tokens change with a third one, were it by little as before any training."""
        one, other = [token for token in range(3) if token != self.model.config.get_text_config().pad_token_id][:2]
        ids = torch.tensor([[one, other, one], [one, other, other]])
        with self.evaluating():
            first, second = self.logits(ids)[:, :2].float()
        tolerance = min(1e-2, math.sqrt(torch.finfo(self.model.dtype).eps))
        return not torch.allclose(first, second, rtol=0, atol=tolerance * float(first.std()))


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _default_dtype(device: torch.device) -> torch.dtype:
    halves = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if halves else torch.float32


def _find_kind(class_name: str, config: PreTrainedConfig, name: str) -> Kind:
    """Kind of a model by the name of its class, where it reads text."""
    kind = next((kind for ending, kind in KIND_OF_ENDING.items() if class_name.endswith(ending)), None)
    if kind is None or config.is_encoder_decoder or getattr(config.get_text_config(), "vocab_size", None) is None:
        raise ValueError(f"{name} is a {class_name}; {ALLOWED}.")
    return kind


def _undeclared_class(config: PreTrainedConfig) -> str:
    """Class name of a saved model whose configuration does not tell it."""
    kind = type(config)
    if kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return transformers.MODEL_FOR_MASKED_LM_MAPPING[kind].__name__
    if kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__
    return kind.__name__.replace("Config", "Model")


def _load_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with the head that it was saved with."""
    config = AutoConfig.from_pretrained(name)
    declared = (config.architectures or [None])[0]
    class_name = declared or _undeclared_class(config)
    kind = _find_kind(class_name, config, name)
    # Encoders of sequence-to-sequence models have no Auto class, but are classes of transformers.
    bare = getattr(transformers, class_name, AutoModel) if kind == "embedding" else AutoModel
    loaders = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "embedding": bare}
    model, report = loaders[kind].from_pretrained(name, dtype=dtype, output_loading_info=True)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)  # no score uses the pooler
    if missing and kind != "embedding" and declared is None:
        return AutoModel.from_pretrained(name, dtype=dtype)  # an encoder that was saved without a head
    if missing:
        raise ValueError(
            f"{name} was saved without {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}, so that its "
            f"{type(model).__name__} would answer at random. Train and save that head, or load the bare encoder and "
            "hand it over: LanguageModel.load(AutoModel.from_pretrained(name))."
        )
    return model


def _load_tokenizer(tokenizer: Any, of_model: str, name: str) -> Any:
    """Tokenizer as it was given, by its name, or by that of the model."""
    source = of_model if tokenizer is None else tokenizer
    if not isinstance(source, str | os.PathLike):
        return source
    if not source:
        raise ValueError(
            f"{name} was not loaded from a folder or the Hub, so its tokenizer cannot be found there. "
            "Give it: LanguageModel.load(model, tokenizer)."
        )
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(source)} has no tokenizer that transformers can load ({error}). "
            "Give one: LanguageModel.load(model, tokenizer)."
        ) from error
