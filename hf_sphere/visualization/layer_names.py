"""Short layer names for the margins of figures, and a selection of layers."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TypeVar

Item = TypeVar("Item")

_WORD = re.compile(r"[^\W\d_]+")


def shorten_layer_names(names: Sequence[str], longest: int = 26) -> list[str]:
    """Shorten the module paths of a model consistently, as far as the longest path requires.

    The first step removes the common parts at both ends, and the second step truncates the words. For example,
    `encoder.stages.0.layers.1` becomes `stages.0.layers.1` and then `sta.0.lay.1`. Numbers are kept because they
    distinguish layers.

    Args:
        names: Module paths, without duplicates.
        longest: Maximum number of characters, at least 8.

    Returns:
        A unique name for each path. If two letters per word are still too many, names are numbered from 1 and only
        their ends are kept.
    """
    if max(map(len, names), default=0) <= longest:
        return list(names)
    names = _without_common_ends(names)
    if max(map(len, names)) <= longest:
        return list(names)
    for letters in range(longest, 1, -1):
        short = [_WORD.sub(lambda word: word[0][:letters], name) for name in names]  # noqa: B023  (called at once)
        if max(map(len, short)) <= longest and len(set(short)) == len(short):
            return short
    starts = [f"{number}…" for number in range(1, len(names) + 1)]
    return [start + name[-max(longest - len(start), 1) :] for start, name in zip(starts, names, strict=True)]


def _without_common_ends(names: Sequence[str]) -> list[str]:
    """Remove the parts that all paths start or end with; the rest starts with a word, not with a number."""
    paths = [name.split(".") for name in names]
    spare = min(map(len, paths)) - 1  # at least one part of every path is kept
    start = min(_count_common(paths), spare)
    while start > 0 and any(path[start].isdecimal() for path in paths):
        start -= 1
    end = min(_count_common([path[::-1] for path in paths]), spare - start)
    return [".".join(path[start : len(path) - end]) for path in paths]


def _count_common(paths: Sequence[Sequence[str]]) -> int:
    """Count the parts that all paths start with."""
    return len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Choose at most `most` (at least two) evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
