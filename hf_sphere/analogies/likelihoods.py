"""Perplexities of sentences by causal models, pseudo-perplexities by masked models, and their cache on disk.

Every distinct sequence is processed once, in a batch of sequences of the same length. The head of a masked model runs
only on the scored tokens.
"""

import contextlib
import itertools
import json
import math
import os
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from hf_sphere.analogies.encoding import Encoding, encode, equal_length_batches
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence

APPLICATION_ID = 0x68667368  # distinguishes our files from other SQLite files: `hfsh`
VERSION = 1  # changed when the tables or the definition of a score change
TIMEOUT_S = 60.0  # seconds to wait for another process that is writing
TABLES = """
CREATE TABLE IF NOT EXISTS models (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS scores (
    model INTEGER NOT NULL, text TEXT NOT NULL, hidden TEXT NOT NULL, loss REAL NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (model, text, hidden)
) WITHOUT ROWID;
"""

BATCHES_IN_CHUNK = 8  # approximate number of batches between writes of finished scores: seconds of work
CPU_LOGITS = 2**26
"""Maximum number of logits per batch of a causal model on a CPU: 256 MiB in float32. On a GPU it is 16 times this."""


class SentenceKey(NamedTuple):
    """Everything that a score depends on besides the model."""

    text: str  # the sentence
    hidden: tuple[tuple[int, int], ...] = ()  # ranges of characters that are replaced by mask tokens, ascending

    @classmethod
    def of(cls, sentence: Sentence) -> Self:
        """Return the key of a sentence."""
        return cls(sentence.text, tuple(sorted({sentence.spans[word] for word in sentence.hidden})))


class Score(NamedTuple):
    """Likelihood of a sentence; its perplexity is `exp(loss / tokens)`."""

    loss: float  # sum of the negative log-likelihoods of its tokens, in nats
    tokens: int  # number of scored tokens


class ScoreCache:
    """Scores of sentences in an SQLite file, by the fingerprint of the model. Several processes may share it.

    Args:
        path: The file; it and its folder are created if necessary.

    Raises:
        ValueError: From every method, if the file is damaged, or was written by another program or version.
        OSError: From every method, if the file is locked or cannot be written.

    Example:
        >>> cache = ScoreCache("scores.sqlite")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connect():
            pass  # raises an error for a file of another program before anything is computed

    def __repr__(self) -> str:
        return f"ScoreCache({str(self.path)!r})"

    def __len__(self) -> int:
        with self._connect() as connection:
            return int(connection.execute("SELECT count(*) FROM scores").fetchone()[0])

    def read(self, fingerprint: str, keys: Sequence[SentenceKey]) -> dict[SentenceKey, Score]:
        """Return the scores of the cached ones among these sentences, by the model with this fingerprint."""
        query = (
            "SELECT text, hidden, loss, tokens FROM scores JOIN models ON models.id = scores.model "
            "WHERE fingerprint = ? AND text IN (SELECT value FROM json_each(?))"
        )
        wanted = {(key.text, _ranges(key)): key for key in keys}
        texts = json.dumps(sorted({key.text for key in keys}))
        with self._connect() as connection:
            return {
                wanted[text, hidden]: Score(loss, tokens)
                for text, hidden, loss, tokens in connection.execute(query, (fingerprint, texts))
                if (text, hidden) in wanted
            }

    def write(self, fingerprint: str, scores: Mapping[SentenceKey, Score]) -> None:
        """Add scores in one transaction: if the process is killed, none of them is written."""
        with self._connect() as connection:
            connection.execute("INSERT OR IGNORE INTO models (fingerprint) VALUES (?)", (fingerprint,))
            (model,) = connection.execute("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?)",
                ((model, key.text, _ranges(key), *score) for key, score in scores.items()),
            )

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, so that forks and threads do not share connections."""
        try:
            connection = sqlite3.connect(self.path, timeout=TIMEOUT_S)
            with contextlib.closing(connection), connection:
                self._create_tables(connection)
                yield connection
        except sqlite3.OperationalError as error:  # locked, full, not writable: the file itself is valid
            raise OSError(f"the score cache {self.path} cannot be used: {error}.") from error
        except sqlite3.DatabaseError as error:
            problem = f"{self.path} is damaged or not a score cache ({error})"
            raise ValueError(f"{problem}. Delete it, or choose another file.") from error

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        # The tables are counted first: another process may be creating them, in the same transaction as the ids.
        queries = ("SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version")
        tables, application, version = (connection.execute(query).fetchone()[0] for query in queries)
        if (application, version) == (APPLICATION_ID, VERSION):
            return
        if tables:
            author = f"version {version} of this cache" if application == APPLICATION_ID else "another program"
            raise ValueError(f"{self.path} was written by {author}. Delete it, or choose another file.")
        connection.executescript(
            f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; "
            "COMMIT;"
        )


def _ranges(key: SentenceKey) -> str:
    return json.dumps(key.hidden, separators=(",", ":"))


def perplexities(
    language_model: LanguageModel,
    sentences: Sequence[Sentence],
    *,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
) -> Tensor:
    """Compute the perplexities of sentences.

    With a masked model these are pseudo-perplexities (Salazar et al., "Masked Language Model Scoring", ACL 2020): each
    token is masked in turn, and `exp` of its mean negative log-likelihood is taken. Special tokens and masks are not
    scored. With a causal model, each token is scored given the tokens before it. The first one is scored if the
    tokenizer adds a special token before it, or if the configuration has a `bos_token_id`, which is then added.

    Args:
        language_model: A masked or causal model.
        sentences: N sentences; repeated ones are scored once.
        batch_size: Sequences per batch; chosen for speed by default.
        cache: Cache of scores, written every few seconds.

    Returns:
        (N,), at least 1, float64, on the CPU.

    Raises:
        ValueError: If the model has no likelihoods, a sentence is empty, too long or has no token to score, a sentence
            for a causal model has hidden words, or a likelihood is not finite.
    """
    if language_model.kind == "embedding":
        what = f"{language_model.name} is a bare {type(language_model.model).__name__}, which has no likelihoods"
        raise ValueError(f"{what}. Use a masked (...ForMaskedLM) or causal (...ForCausalLM) language model.")
    keys = [SentenceKey.of(sentence) for sentence in sentences]
    distinct = dict(zip(keys, sentences, strict=True))
    scores: dict[SentenceKey, Score] = {}
    if cache is not None:
        fingerprint = language_model.fingerprint
        scores = cache.read(fingerprint, list(distinct))
    new = {key: sentence for key, sentence in distinct.items() if key not in scores}
    remaining = iter(new)
    with contextlib.closing(_score(language_model, list(new.values()), batch_size)) as chunks:
        for chunk in chunks:
            finished = dict(zip(itertools.islice(remaining, len(chunk)), chunk, strict=True))
            scores |= finished
            if cache is not None:
                cache.write(fingerprint, finished)
    return torch.tensor([scores[key].loss / scores[key].tokens for key in keys], dtype=torch.float64).exp()


class Rows:
    """Distinct sequences that a model must process to score sentences, in the order of the sentences.

    A masked model requires one row per scored token, with that token replaced by `mask`; sentences that differ only in
    this token share the row. A causal model (`mask` is None) requires one row per sentence and cannot score the first
    token.
    """

    def __init__(self, encodings: Sequence[Encoding], mask: int | None) -> None:
        # Scored tokens by row: position of the logits, token and number of the sentence.
        self.targets: dict[bytes, list[tuple[int, int, int]]] = {}
        self.ends: list[int] = []  # number of distinct rows of the sentences up to and including each sentence
        self.counts: list[int] = []  # number of scored tokens per sentence
        for number, (ids, plain, _) in enumerate(encodings):
            scored = np.flatnonzero(plain) if mask is not None else np.flatnonzero(plain[1:]) + 1
            for position in scored.tolist():
                if mask is None:
                    row, read = ids, position - 1
                else:
                    row, read = ids.copy(), position
                    row[position] = mask
                self.targets.setdefault(row.tobytes(), []).append((read, int(ids[position]), number))
            self.ends.append(len(self.targets))
            self.counts.append(len(scored))


def build_rows(language_model: LanguageModel, sentences: Sequence[Sentence]) -> Rows:
    """Tokenize sentences for a masked or causal model and list the sequences that it must process."""
    if language_model.kind == "masked":
        return Rows(encode(language_model, sentences), language_model.tokenizer.mask_token_id)
    start = getattr(language_model.model.config.get_text_config(), "bos_token_id", None)
    return Rows(encode(language_model, sentences, start_token=start), None)


def _score(
    language_model: LanguageModel, sentences: Sequence[Sentence], batch_size: int | None
) -> Generator[list[Score]]:
    """Score distinct sentences in order, in chunks."""
    if not sentences:
        return
    rows = build_rows(language_model, sentences)
    if 0 in rows.counts:
        text = sentences[rows.counts.index(0)].text
        causal = language_model.kind == "causal"
        reason = "nothing comes before its only token" if causal else "all of its tokens are masks or special"
        raise ValueError(f"there is nothing to score in {text!r}: {reason}.")
    batch_tokens = language_model.batch_tokens
    if language_model.kind == "causal":  # the logits of all tokens are in memory at the same time
        most = CPU_LOGITS if language_model.device.type == "cpu" else 16 * CPU_LOGITS
        batch_tokens = min(batch_tokens, most // language_model.vocabulary_size)
    losses = torch.zeros(len(sentences), dtype=torch.float64)
    ids_of_rows = [np.frombuffer(row, dtype=np.int64) for row in rows.targets]
    targets = list(rows.targets.values())
    lengths = np.array([len(ids) for ids in ids_of_rows])
    tokens_needed = np.concatenate([[0], lengths.cumsum()])[rows.ends]
    _, starts = np.unique(tokens_needed // (BATCHES_IN_CHUNK * batch_tokens), return_index=True)
    ends = [0, *rows.ends]
    reader = _LogitReader(language_model)
    with reader.reading():
        for first, end in itertools.pairwise([*starts.tolist(), len(sentences)]):
            numbers = np.arange(ends[first], ends[end])
            for batch in equal_length_batches(lengths[numbers], batch_tokens, batch_size):
                chosen = numbers[batch].tolist()
                ids = torch.from_numpy(np.stack([ids_of_rows[number] for number in chosen]))
                found = [(row, *target) for row, number in enumerate(chosen) for target in targets[number]]
                row, position, token, sentence = torch.tensor(found).T
                places, which = torch.stack([row, position]).unique(dim=1, return_inverse=True)
                logits = reader.read(ids, *places)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                negative_log_likelihoods = logits.logsumexp(-1)[which] - logits[which, token]
                losses.index_add_(0, sentence, negative_log_likelihoods.double().cpu())
            for number in range(first, end):
                if not losses[number].isfinite():
                    what = f"{language_model.name} in {language_model.model.dtype} returns {losses[number]:.4g}"
                    text = sentences[number].text
                    raise ValueError(f"{what} for the likelihood of {text!r}. Load it with dtype=torch.float32.")
            yield [Score(loss, rows.counts[first + place]) for place, loss in enumerate(losses[first:end].tolist())]


class _LogitReader:
    """Computes the logits of selected tokens.

    Heads of masked models usually process each token independently, so a hook passes them the hidden states of the
    selected tokens only, as one sequence. The first batch tests whether the head supports this; if not, for instance
    because it mixes tokens, all logits are computed.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        self._language_model = language_model
        self._choice: tuple[torch.Size, Tensor, Tensor] | None = None
        model: Any = language_model.model
        base: Any = model.base_model
        children = model.children() if language_model.kind == "masked" and base is not model else ()
        self._heads = [child for child in children if base not in child.modules()]
        self._works: bool | None = None if self._heads else False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Switch the model to evaluation mode, with the hook on its head."""
        with self._language_model.evaluating(), contextlib.ExitStack() as stack:
            for head in self._heads:
                stack.callback(head.register_forward_pre_hook(self._choose, with_kwargs=True).remove)
            yield

    def read(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (M, V) of the tokens at (rows, positions), (M,) each, of sequences (B, L)."""
        if self._works is None:
            few = rows < 2
            self._works = self._try(ids[:2], rows[few], positions[few])
        if self._works:
            return self._read_chosen(ids, rows, positions)[0]
        return self._language_model.logits(ids)[rows, positions]

    def _read_chosen(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        self._choice = ids.shape, rows, positions
        try:
            return self._language_model.logits(ids)
        finally:
            self._choice = None

    def _try(self, ids: Tensor, rows: Tensor, positions: Tensor) -> bool:
        """Return whether the head computes the same logits for the selected tokens alone."""
        full = self._language_model.logits(ids)[rows, positions]
        try:
            chosen = self._read_chosen(ids, rows, positions)
        except (RuntimeError, ValueError, IndexError):  # the head needs the shape of the batch
            return False
        if chosen.shape != (1, *full.shape):
            return False
        tolerance = math.sqrt(torch.finfo(full.dtype).eps) * float(full.abs().max())
        return bool((chosen[0] - full).abs().max() <= tolerance)

    def _choose(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook of the head: the first module that receives hidden states (B, L, H) gets (1, M, H) instead."""
        return tuple(map(self._cut, args)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if self._choice is None or not isinstance(value, Tensor) or value.ndim != 3:
            return value
        shape, rows, positions = self._choice
        if value.shape[:2] != shape:
            return value
        self._choice = None  # the next modules of the head receive the selected states already
        return value[rows, positions].unsqueeze(0)
