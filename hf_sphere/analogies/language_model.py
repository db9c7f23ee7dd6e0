"""A language model with its tokenizer, of any text architecture of transformers: perplexities and embeddings of words.

Every distinct sequence is processed once, in a batch of sequences of the same length.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sphere.analogies.prompts import Sentence
from hf_sphere.analogies.questions import Question
from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.modules import eval_mode

Kind = Literal["masked", "causal", "embedding"]

CPU_LOGITS = 2**26
"""Maximum number of logits per batch on a CPU: 256 MiB in float32. On a GPU it is 16 times this."""

Target = tuple[int, int, int]
"""A scored token: the position of its logits in the sequence, the token, and the number of its sentence."""


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
        if isinstance(model, PreTrainedModel):
            return cls(model.to(device=device, dtype=dtype), tokenizer)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        target = torch.device(device or accelerator or "cpu")
        if dtype is None:
            halves = target.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = torch.bfloat16 if halves else torch.float32
        config = load_pretrained(transformers.AutoConfig, name)
        # Without `architectures`, it is an encoder or decoder.
        class_name = (config.architectures or [type(config).__name__.replace("Config", "Model")])[0]
        loaders = {"masked": transformers.AutoModelForMaskedLM, "causal": transformers.AutoModelForCausalLM}
        # Encoders of sequence-to-sequence models have no Auto class.
        other = getattr(transformers, class_name, transformers.AutoModel)
        loader = loaders.get(_find_kind(class_name, config, name), other)
        loaded, report = load_pretrained(loader, name, dtype=dtype, output_loading_info=True)
        if missing := sorted(key for key in report["missing_keys"] if "pooler" not in key):  # no score uses the pooler
            what = f"{', '.join(missing[:3])}, so the head of its {type(loaded).__name__} would be random"
            raise ValueError(f"{name} was saved without {what}. Pass AutoModel.from_pretrained(name).")
        return cls(loaded.to(target), tokenizer, name)

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


class Encoding(NamedTuple):
    """Tokens of a sentence."""

    ids: NDArray[np.int64]  # (L,), with special tokens; those of hidden words are replaced by the mask token
    plain: NDArray[np.bool_]  # (L,), whether a token is neither special nor a mask
    words: NDArray[np.bool_]  # (W, L), whether a token belongs to a word; no rows if words were not requested


def encode(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, words: bool = False, start_token: int | None = None
) -> list[Encoding]:
    """Tokenize sentences; `start_token` is added before a sentence if the tokenizer adds none.

    With `words`, find the tokens of every word in `spans`: those that share a character with it.
    """
    tokenizer, encodings = language_model.tokenizer, []
    output = tokenizer(
        [sentence.text for sentence in sentences],
        return_special_tokens_mask=True,
        return_offsets_mapping=words or any(sentence.hidden for sentence in sentences),
        verbose=False,
    )
    for index, sentence in enumerate(sentences):
        ids = np.array(output["input_ids"][index], dtype=np.int64)
        special = np.array(output["special_tokens_mask"][index], dtype=bool)
        masks = {}
        for word in range(len(sentence.spans)) if words else sentence.hidden:
            starts, ends = np.array(output["offset_mapping"][index]).reshape(-1, 2).T
            first, end = sentence.spans[word]
            masks[word] = (np.maximum(starts, first) < np.minimum(ends, end)) & ~special
            if not masks[word].any():  # its cost would be 0
                raise ValueError(f"{sentence.text[first:end]!r} in {sentence.text!r} has no token of its own.")
        for word in sentence.hidden:
            ids[masks[word]] = tokenizer.mask_token_id
        plain = ~special
        if tokenizer.mask_token_id is not None:
            plain &= ids != tokenizer.mask_token_id
        of_words = np.array(list(masks.values()) if words else [], dtype=bool).reshape(-1, len(ids))
        if start_token is not None and not special[:1].any():
            ids, plain = np.insert(ids, 0, start_token), np.insert(plain, 0, False)
        encodings.append(Encoding(ids, plain, of_words))
    return encodings


def warn_unknown_words(language_model: LanguageModel, questions: Sequence[Question]) -> None:
    """Name the words that the tokenizer does not know in a warning: those with the unknown token, or no token."""
    pairs = (pair for question in questions for pair in (question.stem, *question.choices))
    words = sorted({word.strip() for pair in pairs for word in pair})
    tokenizer = language_model.tokenizer
    tokens = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = [word for word, ids in zip(words, tokens, strict=True) if not ids or tokenizer.unk_token_id in ids]
    if unknown:
        what = f"the tokenizer of {language_model.name} does not know the words {', '.join(unknown)}"
        why = "Choices that differ only in unknown words tie, and a tie of k choices counts 1/k if one is correct"
        warnings.warn(f"{what}. {why}.", stacklevel=3)


def equal_length_batches(
    lengths: Sequence[int], batch_tokens: int, batch_size: int | None = None
) -> Iterator[list[int]]:
    """Yield the indices of sequences of some lengths (N,) in batches of equal length, which need no padding."""
    for length in np.unique(lengths):
        members = torch.from_numpy(np.flatnonzero(np.equal(lengths, length)))
        for batch in members.split(batch_size or max(1, batch_tokens // max(1, int(length)))):
            yield batch.tolist()


def scored_sequences(language_model: LanguageModel, sentences: Sequence[Sentence]) -> dict[bytes, list[Target]]:
    """Return the distinct sequences of tokens (int64) that score sentences, with the targets of each.

    A masked model needs one sequence per scored token, with that token masked.
    """
    sequences: dict[bytes, list[Target]] = {}
    if language_model.kind == "masked":
        for number, (ids, plain, _) in enumerate(encode(language_model, sentences)):
            for position in np.flatnonzero(plain).tolist():
                masked = ids.copy()
                masked[position] = language_model.tokenizer.mask_token_id
                sequences.setdefault(masked.tobytes(), []).append((position, int(ids[position]), number))
        return sequences
    start = getattr(language_model.model.config.get_text_config(), "bos_token_id", None)
    for number, (ids, plain, _) in enumerate(encode(language_model, sentences, start_token=start)):
        targets = [(position, int(ids[position + 1]), number) for position in np.flatnonzero(plain[1:]).tolist()]
        sequences.setdefault(ids.tobytes(), []).extend(targets)
    return sequences


def perplexities(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, batch_size: int | None = None
) -> Tensor:
    """Compute the perplexities of N sentences, (N,), at least 1, float64, on the CPU.

    With a masked model these are pseudo-perplexities (Salazar et al., "Masked Language Model Scoring", ACL 2020): each
    token is masked in turn, and `exp` of its mean negative log-likelihood is taken. Special tokens and masks are not
    scored. With a causal model, each token is scored given the tokens before it. The first one is scored if the
    tokenizer adds a special token before it, or if the configuration has a `bos_token_id`, which is then added.

    A sentence without a token to score is NaN. The batch size is chosen for speed by default.
    """
    sequences = scored_sequences(language_model, sentences)
    arrays, targets = [np.frombuffer(sequence, dtype=np.int64) for sequence in sequences], [*sequences.values()]
    most = CPU_LOGITS if language_model.device.type == "cpu" else 16 * CPU_LOGITS
    vocabulary_size = language_model.model.get_input_embeddings().num_embeddings
    batch_tokens = min(language_model.batch_tokens, most // vocabulary_size)
    losses, counts = torch.zeros(2, len(sentences), dtype=torch.float64)
    for batch in equal_length_batches([*map(len, arrays)], batch_tokens, batch_size):
        ids = torch.from_numpy(np.stack([arrays[index] for index in batch]))
        batch_targets = [(row, *target) for row, index in enumerate(batch) for target in targets[index]]
        row, position, token, sentence = torch.tensor(batch_targets, dtype=torch.int64).view(-1, 4).T
        # Each position is read once, and -log softmax at a token is logsumexp(logits) - logits[token].
        (rows, positions), target_of = torch.stack([row, position]).unique(dim=1, return_inverse=True)
        output = language_model.forward(ids)
        logits = (output.prediction_logits if "prediction_logits" in output else output.logits)[rows, positions]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        negative_log_likelihoods = logits.logsumexp(-1)[target_of] - logits[target_of, token]
        losses.index_add_(0, sentence, negative_log_likelihoods.double().cpu())
        counts.index_add_(0, sentence, torch.ones_like(sentence, dtype=torch.float64))
    return (losses / counts).exp()


def embed_words(language_model: LanguageModel, words: Sequence[str], *, batch_size: int | None = None) -> Tensor:
    """Embed N single words: the mean of the last hidden states of their tokens, (N, hidden size), float32, on the CPU.

    A word is tokenized as in the middle of a text: with a leading space for tokenizers that encode it, such as GPT-2's.
    """
    tokenize = partial(language_model.tokenizer, add_special_tokens=False)
    first, spaced, both = (tokenize(text)["input_ids"] for text in ("x", " x", "x x"))
    space = " " if both != first + first and both == first + spaced else ""
    sentences = [Sentence(space + word, ((len(space), len(space) + len(word)),)) for word in words]
    return embed_words_in_context(language_model, sentences, batch_size=batch_size).flatten(1)


def embed_words_in_context(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, batch_size: int | None = None
) -> Tensor:
    """Embed the W words of N sentences: the mean of the last hidden states of their tokens, (N, W, hidden size)."""
    encodings = encode(language_model, sentences, words=True)
    keys = [(encoding.ids.tobytes(), encoding.words.tobytes()) for encoding in encodings]
    inputs = [*dict(zip(keys, encodings, strict=True)).items()]
    lengths, means = [len(encoding.ids) for _, encoding in inputs], dict[tuple[bytes, bytes], Tensor]()
    for batch in equal_length_batches(lengths, language_model.batch_tokens, batch_size):
        of_batch, encoded = zip(*(inputs[index] for index in batch), strict=True)
        ids, _, weights = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*encoded, strict=True))
        weights = weights.float() / weights.sum(-1, keepdim=True)
        states = language_model.forward(ids, base=True).last_hidden_state.float()
        means |= zip(of_batch, (weights.to(states.device) @ states).cpu(), strict=True)
    return torch.stack([means[key] for key in keys])  # outside inference mode, so that it can be modified and trained
