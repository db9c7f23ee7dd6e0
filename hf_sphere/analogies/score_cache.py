"""Likelihoods of sentences on disk, so that a run that was stopped goes on where it was."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

APPLICATION_ID = 0x68667368
"""Mark of our files among those of SQLite: `hfsh`."""

VERSION = 1
"""Changes with the layout and with the definition of a score, so that no old score is taken for a new one."""

WAIT_S = 60.0
"""Seconds to wait for another process that writes."""

LOOKUPS_AT_ONCE = 10_000

LAYOUT = """
CREATE TABLE IF NOT EXISTS models (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS scores (
    model INTEGER NOT NULL, text TEXT NOT NULL, hidden TEXT NOT NULL, loss REAL NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (model, text, hidden)
) WITHOUT ROWID;
"""


class SentenceKey(NamedTuple):
    """What a score depends on beside the model.

    Attributes:
        text: The sentence.
        hidden: Ranges of characters that are hidden by mask tokens, ascending.
    """

    text: str
    hidden: tuple[tuple[int, int], ...] = ()


class Score(NamedTuple):
    """Likelihood of a sentence; its perplexity is `exp(loss / tokens)`.

    Attributes:
        loss: Sum of the negative log-likelihoods of its tokens, in nats.
        tokens: Number of tokens that were scored.
    """

    loss: float
    tokens: int


class ScoreCache:
    """Scores of sentences in a file of SQLite, by the model's fingerprint. Several processes may share it.

    Args:
        path: The file; it and its folder are made when they are needed.

    Raises:
        ValueError: By every method, if the file is damaged, or was made by another program or version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connect():
            pass  # a file that is none of ours is refused before anything was computed

    def __repr__(self) -> str:
        return f"ScoreCache({str(self.path)!r})"

    def __len__(self) -> int:
        with self._connect() as connection:
            return int(connection.execute("SELECT count(*) FROM scores").fetchone()[0])

    def read(self, fingerprint: str, keys: Sequence[SentenceKey]) -> dict[SentenceKey, Score]:
        """Look sentences up.

        Args:
            fingerprint: That of the model.
            keys: The sentences.

        Returns:
            The scores of those that are there.
        """
        query = (
            "SELECT text, hidden, loss, tokens FROM scores JOIN models ON models.id = scores.model "
            "WHERE fingerprint = ? AND text IN (SELECT value FROM json_each(?))"
        )
        found: dict[SentenceKey, Score] = {}
        with self._connect() as connection:
            for start in range(0, len(keys), LOOKUPS_AT_ONCE):
                wanted = {(key.text, _write_ranges(key)): key for key in keys[start : start + LOOKUPS_AT_ONCE]}
                texts = json.dumps(sorted({text for text, _ in wanted}))
                for text, hidden, loss, tokens in connection.execute(query, (fingerprint, texts)):
                    if (text, hidden) in wanted:
                        found[wanted[text, hidden]] = Score(loss, tokens)
        return found

    def write(self, fingerprint: str, scores: Mapping[SentenceKey, Score]) -> None:
        """Add scores, all of them or, if the process is killed meanwhile, none.

        Args:
            fingerprint: That of the model.
            scores: Score of each sentence.
        """
        with self._connect() as connection:
            connection.execute("INSERT OR IGNORE INTO models (fingerprint) VALUES (?)", (fingerprint,))
            (model,) = connection.execute("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?)",
                ((model, key.text, _write_ranges(key), *score) for key, score in scores.items()),
            )

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction: nothing stays open that a fork or a thread would share."""
        try:
            connection = sqlite3.connect(self.path, timeout=WAIT_S)
            with contextlib.closing(connection), connection:
                self._lay_out(connection)
                yield connection
        except sqlite3.OperationalError as error:  # locked, full, not writable: the file itself is in order
            raise OSError(f"the score cache {self.path} cannot be used: {error}.") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.path} is damaged or not a score cache ({error}). Delete it, or name another file."
            ) from error

    def _lay_out(self, connection: sqlite3.Connection) -> None:
        # The tables are counted first: another process may just be making them, and marks them in the same moment.
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (mark,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if (mark, version) == (APPLICATION_ID, VERSION):
            return
        if tables:
            author = f"version {version} of this cache" if mark == APPLICATION_ID else "another program"
            raise ValueError(f"{self.path} was written by {author}. Delete it, or name another file.")
        connection.executescript(
            f"BEGIN IMMEDIATE; {LAYOUT} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {VERSION}; COMMIT;"
        )


def _write_ranges(key: SentenceKey) -> str:
    return json.dumps(key.hidden, separators=(",", ":"))
