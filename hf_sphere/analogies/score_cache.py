"""Likelihoods of sentences on disk, so that an interrupted run can be resumed."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

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
            raise ValueError(
                f"{self.path} is damaged or not a score cache ({error}). Delete it, or choose another file."
            ) from error

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
