"""Which sequences must a model see to score sentences, and which tokens are read from each?"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_sphere.analogies.encoding import Encoding

Integers = NDArray[np.int64]


class Targets(NamedTuple):
    """Tokens whose likelihood is asked for.

    Attributes:
        row: (T,), the row that a token is read from.
        position: (T,), where in the row its logits are.
        token: (T,), the token.
        sentence: (T,), number of the sentence that it belongs to.
    """

    row: Integers
    position: Integers
    token: Integers
    sentence: Integers


class Chunk(NamedTuple):
    """Sentences, and the rows that they need and no earlier sentence does.

    Attributes:
        sentences: Their numbers.
        rows: Numbers of the rows.
    """

    sentences: range
    rows: range


class Rows:
    """Distinct sequences of tokens, in the order in which sentences need them, and what is read from each.

    For a masked model there is a row for every token to be scored, with this token masked. Sentences that differ in
    that token only share the row, and several tokens are read from it. For a causal model the sentence is the row.

    Args:
        encodings: Sentences, whose plain tokens are scored.
        mask: Mask token of a masked model; None for a causal one, where nothing comes before the first token.

    Attributes:
        lengths: (R,), tokens of each row.
        counts: (N,), tokens that are scored of each sentence.
    """

    def __init__(self, encodings: Sequence[Encoding], mask: int | None) -> None:
        numbers: dict[bytes, int] = {}
        ends, parts = [], []
        for number, (ids, plain, _) in enumerate(encodings):
            if mask is None:
                scored = np.flatnonzero(plain[1:]) + 1
                row = np.full(len(scored), numbers.setdefault(ids.tobytes(), len(numbers)))
                position = scored - 1
            else:
                scored = position = np.flatnonzero(plain)
                masked = ids[None].repeat(len(scored), axis=0)
                masked[np.arange(len(scored)), scored] = mask
                row = np.array([numbers.setdefault(key, len(numbers)) for key in map(bytes, masked)], dtype=np.int64)
            parts.append((row, position, ids[scored], np.full(len(scored), number)))
            ends.append(len(numbers))
        row, position, token, sentence = map(np.concatenate, zip(*parts, strict=True))
        order = row.argsort(kind="stable")
        self._rows = list(numbers)
        self._ends = np.array(ends)  # of each sentence, the end of the rows that it and the ones before it need
        self._targets = Targets(row[order], position[order], token[order], sentence[order])
        self._first_target = np.searchsorted(self._targets.row, np.arange(len(numbers) + 1))
        self.lengths = np.array([len(key) // encodings[0].ids.itemsize for key in numbers])
        self.counts = np.bincount(sentence, minlength=len(encodings))

    def __len__(self) -> int:
        return len(self._rows)

    def chunks(self, tokens: int) -> Iterator[Chunk]:
        """Divide the sentences, in their order: a chunk needs about so many tokens of rows."""
        needed = np.concatenate([[0], self.lengths.cumsum()])[self._ends]
        _, starts = np.unique(needed // tokens, return_index=True)
        for first, end in zip(starts, [*starts[1:], len(needed)], strict=True):
            yield Chunk(range(first, end), range(self._ends[first - 1] if first else 0, self._ends[end - 1]))

    def batch(self, numbers: Integers) -> tuple[Integers, Targets]:
        """Rows of one length, (B, L), and their targets; here `row` counts within the batch."""
        # A bytearray, unlike bytes, is memory that a tensor may share.
        ids = np.frombuffer(bytearray().join(self._rows[number] for number in numbers), dtype=np.int64)
        firsts, ends = self._first_target[numbers], self._first_target[numbers + 1]
        chosen = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
        row = np.repeat(np.arange(len(numbers)), ends - firsts)
        return ids.reshape(len(numbers), -1), Targets(row, *(column[chosen] for column in self._targets[1:]))
